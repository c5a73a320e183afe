"""Balance of loads: the busiest unit beside the mean unit, over named axes.

A load is the number of (token, expert) assignments that a unit (an expert or a device) computes in
one batch of one layer. Units work at the same time, so a layer takes as long as its busiest unit.
Batches and layers run one after the other, so their times add up: over several of them,
peak-to-mean is the sum of the busiest loads / the sum of the mean loads, which is the time that
experts take relative to the time with perfect balance.

`peaks(loads, ("batch", "layer", "device"))` finds the busiest and the mean over the last axis;
`.over("batch")` sums both over a named axis; `.ratio` divides them. All of this takes NumPy arrays
and torch tensors alike, and never waits for a torch device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Peaks:
    """Load of the busiest unit beside the mean load of all units.

    Attributes:
        axes: names of the axes of both tables, for example ("batch", "layer").
        busiest: [*axes] load of the busiest unit.
        mean: [*axes] mean load of the units, idle ones included; where `busiest` is what a cap
            leaves, still the mean before the cap.

    >>> by_layer = Peaks(("layer",), np.array([20.0, 30.0]), np.array([10.0, 30.0]))
    >>> by_layer.ratio.tolist(), float(by_layer.over("layer").ratio)
    ([2.0, 1.0], 1.25)
    """

    axes: tuple[str, ...]
    busiest: Any
    mean: Any

    def over(self, *names: str) -> Peaks:
        """Sum over some axes, whose entries run one after the other.

        Raises:
            ValueError: if there is no axis of a name.
        """
        if not set(names) <= set(self.axes):
            raise ValueError(f"axes must be among {self.axes}, got {names}")
        if not names:
            return self
        places = tuple(self.axes.index(name) for name in names)
        rest = tuple(name for name in self.axes if name not in names)
        return Peaks(rest, self.busiest.sum(places), self.mean.sum(places))

    def __add__(self, other: Peaks) -> Peaks:
        return Peaks(self.axes, self.busiest + other.busiest, self.mean + other.mean)

    @property
    def ratio(self) -> Any:
        """[*axes] peak-to-mean: busiest load / mean load; 1 where there is no load."""
        idle = self.mean == 0
        return self.busiest / (self.mean + idle) + idle

    @property
    def best_possible(self) -> Peaks:
        """The peaks if the loads, being whole numbers, were spread as evenly as possible."""
        return Peaks(self.axes, -(-self.mean // 1), self.mean)


def peaks(loads: Any, axes: Sequence[str]) -> Peaks:
    """Find the busiest unit and the mean unit over the last axis.

    Args:
        loads: NumPy array or torch tensor [*axes], >= 0.
        axes: names of the axes, the last one that of the units, for example ("layer", "device").

    Raises:
        ValueError: if there isn't one name per axis.

    >>> peaks(np.array([[1, 3], [5, 1]]), ("batch", "device")).over("batch").ratio.item()
    1.6
    """
    if len(axes) != loads.ndim:
        raise ValueError(f"axes must name {loads.ndim} axes of loads, got {tuple(axes)}")
    is_array = isinstance(loads, np.ndarray)
    busiest = loads.max(-1) if is_array else loads.amax(-1)
    total = loads.sum(-1) if is_array else loads.sum(-1).double()
    return Peaks(tuple(axes[:-1]), busiest, total / loads.shape[-1])


@dataclass(frozen=True)
class Spread:
    """Peak-to-mean of many batches (and layers); None where none of them has a load.

    Attributes:
        mean: sum of the busiest loads / sum of the mean loads.
    """

    mean: float | None
    p50: float | None
    p95: float | None
    max: float | None


def spread(of: Peaks, mean: float | None = None) -> Spread:
    """Sum up the peak-to-mean of all batches that have a load.

    Args:
        of: NumPy peaks of any axes.
        mean: over all of them, where it is known more exactly than these tables have it.

    >>> spread(Peaks(("batch",), np.array([3.0, 5.0]), np.array([2.0, 3.0]))).mean
    1.6
    """
    busy = of.mean > 0
    if not busy.any():
        return Spread(None, None, None, None)
    busiest, means = of.busiest[busy], of.mean[busy]
    ratios = busiest / means
    if mean is None:
        mean = float(busiest.sum() / means.sum())
    p50, p95, highest = (percentile(ratios, percent) for percent in (50, 95, 100))
    return Spread(mean, p50, p95, highest)


NOISE = 0.1
"""Uneven load by chance alone from which on a sample is too small to tell real from chance."""


@dataclass(frozen=True)
class Sample:
    """Number of tokens behind a figure of balance, and the part of it that is chance.

    Attributes:
        tokens: in all.
        tokens_needed: tokens of which chance alone makes the busiest device `NOISE` above the mean.
        too_little: True if there are fewer.
        by_chance: peak-to-mean of one batch if every expert were equally likely.
    """

    tokens: int
    tokens_needed: int
    too_little: bool
    by_chance: float


def sample_of(tokens: int, batches: int, k: int, sizes: Sequence[int]) -> Sample:
    """Describe the tokens behind a figure of balance.

    Args:
        tokens: in all batches.
        batches: about equally large.
        k: experts per token.
        sizes: experts of each device.

    >>> sample_of(tokens=3, batches=1, k=4, sizes=[4] * 8).too_little
    True
    >>> sample_of(tokens=4096, batches=4, k=4, sizes=[4] * 8).tokens_needed
    326
    """
    one = _chance(1.0, k, sizes)
    needed = math.ceil((one / NOISE) ** 2)
    by_chance = 1 + _chance(max(tokens, 1) / max(batches, 1), k, sizes)
    return Sample(tokens, needed, tokens < needed, by_chance)


def _chance(tokens: float, k: int, sizes: Sequence[int]) -> float:
    """Return how far the busiest device is expected above the mean by chance, relative to it.

    A device's rows are sums of independent hypergeometric draws, nearly normal; the largest of so
    many normal variables is about a known quantile (Blom, 1958).
    """
    experts, devices = sum(sizes), sum(1 for size in sizes if size)
    if devices < 2 or experts <= k:
        return 0.0
    part = max(sizes) / experts
    variance = k * part * (1 - part) * (experts - k) / (experts - 1)
    highest = NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))
    return highest * math.sqrt(variance / tokens) / (k * part)


def straggler_loss(peak_to_mean: float) -> float:
    """Return the share of the expert time that an average unit waits: 1 - 1 / peak-to-mean.

    At most 1 (which it can be after drops, relative to the mean before them), nobody waits: 0.

    Raises:
        ValueError: if it is negative or NaN.

    >>> straggler_loss(2.0)
    0.5
    """
    if not peak_to_mean >= 0:
        raise ValueError(f"peak_to_mean must be a number >= 0, got {peak_to_mean}")
    return 1 - 1 / peak_to_mean if peak_to_mean > 1 else 0.0


def combine_peaks(ratios: Sequence[float], assignments: Sequence[float]) -> float:
    """Combine the peak-to-mean of layers or batches that run one after the other.

    The mean weighted by assignments, which is the sum of the busiest loads / the sum of the means.

    Args:
        ratios: [layers] peak-to-mean of each.
        assignments: [layers] of each.

    Raises:
        ValueError: if the lengths differ or there is nothing to combine.

    >>> combine_peaks([2.0, 1.0], [20, 60])
    1.25
    """
    if not ratios or len(ratios) != len(assignments):
        raise ValueError(
            f"ratios and assignments must have the same length, at least 1, got {len(ratios)} and "
            f"{len(assignments)}"
        )
    total = math.fsum(assignments)
    if total <= 0:
        return 1.0
    return math.fsum(r * a for r, a in zip(ratios, assignments, strict=True)) / total


def percentile(values: Sequence[float] | npt.NDArray[Any], percent: float) -> float:
    """Return a percentile, with linear interpolation.

    Raises:
        ValueError: if there are no values, or percent is outside [0, 100].

    >>> percentile([4, 1, 3, 2], 50)
    2.5
    """
    if not len(values):
        raise ValueError("values must have at least one entry, got none")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be from 0 to 100, got {percent}")
    return float(np.percentile(values, percent))


def share(part: float, whole: float) -> float:
    """Return part / whole, and 0 of nothing.

    >>> share(1, 4), share(0, 0)
    (0.25, 0.0)
    """
    return part / whole if whole else 0.0


@lru_cache(maxsize=256)
def unit_matrix(unit_of: tuple[int, ...], units: int) -> npt.NDArray[np.int64]:
    """Return [experts, units] ones where a unit hosts an expert: expert loads @ it = unit loads.

    Args:
        unit_of: [experts] the unit of each expert, such as `ExpertPlacement.expert_to_device`.

    >>> (np.array([[5, 1, 2]]) @ unit_matrix((0, 1, 0), 2)).tolist()
    [[7, 1]]
    """
    matrix = np.zeros((len(unit_of), units), dtype=np.int64)
    matrix[np.arange(len(unit_of)), np.array(unit_of, dtype=np.int64)] = 1
    matrix.flags.writeable = False  # it is shared
    return matrix
