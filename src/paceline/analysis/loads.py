"""Balance figures from load tables: peak-to-mean, straggler loss, percentiles over layers.

A load is a number of (token, expert) assignments that a unit (an expert or a device) computes.
Everything here is plain arithmetic on Python numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.text import shortened


@dataclass(frozen=True)
class Busiest:
    """The most loaded unit.

    Attributes:
        index: of the unit.
        load: its assignments.
        peak_to_mean: its load / mean load of all units.
    """

    index: int
    load: float
    peak_to_mean: float


def busiest(loads: Sequence[float]) -> Busiest:
    """The unit with the highest load (the smaller index on a tie).

    A layer ends when the device with the most rows does, however many experts it hosts, so units
    are compared with the mean over all of them, those without experts included.

    Args:
        loads: load of each unit, [units].

    Raises:
        ValueError: if there is no unit, or a load is negative or no number.

    >>> busiest([2, 6, 0, 0])
    Busiest(index=1, load=6, peak_to_mean=3.0)
    """
    if not loads:
        raise ValueError("loads is empty: allowed is one load for each of at least one unit.")
    if any(not 0 <= load < math.inf for load in loads):
        raise ValueError(f"loads={shortened(loads)} is not allowed: a load is a number >= 0.")
    index = max(range(len(loads)), key=lambda unit: loads[unit])
    total = math.fsum(loads)
    # Without any load every unit is trivially at its mean.
    return Busiest(index, loads[index], loads[index] * len(loads) / total if total else 1.0)


def peak_to_mean(loads: Sequence[float]) -> float:
    """Largest load / mean over the units; 1.0 is perfect balance. See `busiest`.

    >>> peak_to_mean([100, 700])
    1.75
    """
    return busiest(loads).peak_to_mean


def combine_peaks(peaks: Sequence[float], assignments: Sequence[float]) -> float:
    """Peak-to-mean of several layers or batches that run one after the other.

    Sum of the busiest unit's loads / sum of the mean loads: a mean weighted by assignments.

    Args:
        peaks: peak-to-mean of each, [layers].
        assignments: of each, [layers].

    Raises:
        ValueError: if the lengths differ or there is nothing to combine.

    >>> combine_peaks([2.0, 1.0], [20, 60])
    1.25
    """
    if not peaks or len(peaks) != len(assignments):
        raise ValueError(
            f"peaks has {len(peaks)} entries, assignments {len(assignments)}: allowed is the same "
            "number, at least 1."
        )
    total = math.fsum(assignments)
    if total <= 0:
        return 1.0
    return math.fsum(p * a for p, a in zip(peaks, assignments, strict=True)) / total


def add_loads(tables: Iterable[Sequence[float]]) -> list[float]:
    """Element-wise sum of load tables of one length, e.g. over batches.

    Raises:
        ValueError: if the lengths differ.

    >>> add_loads([[1, 2], [3, 4]])
    [4.0, 6.0]
    """
    return [math.fsum(column) for column in zip(*tables, strict=True)]


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation, e.g. over layers.

    Raises:
        ValueError: if values is empty or percent is outside [0, 100].

    >>> percentile([4, 1, 3, 2], 50)
    2.5
    """
    if not values:
        raise ValueError("values is empty: allowed is at least one.")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent={percent} is not allowed: it is from 0 to 100.")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
