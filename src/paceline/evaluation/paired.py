"""Two runs over the same samples: their mean difference, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """Mean difference of paired samples.

    Attributes:
        mean: sum of (other - base) over the sum of the weights.
        standard_error: of `mean`; None with fewer than two clusters.
        samples: how many.
        clusters: groups of samples that may depend on each other, such as those of one text.
    """

    mean: float
    standard_error: float | None
    samples: int
    clusters: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def difference(
    base: Sequence[float],
    other: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    weights: Sequence[float] | None = None,
) -> Difference:
    """The mean difference between two runs, sample by sample.

    The standard error is that of paired differences; with clusters it is cluster-robust (Liang and
    Zeger 1986, with the factor G / (G - 1) for G clusters), as Miller, "Adding Error Bars to Evals"
    (arXiv 2411.00640), asks for questions that share a text. With weights the mean is the ratio of
    sums, and its error that of the linearised ratio.

    Args:
        base: a figure of each sample, [samples].
        other: the same of the other run, [samples].
        clusters: which samples may depend on each other, [samples]; None: none do.
        weights: what each figure is a sum over, such as tokens, [samples]; None: 1.

    Raises:
        ValueError: if the lengths differ, or there is no sample.

    >>> difference([1, 0, 1, 1], [1, 0, 0, 1])
    Difference(mean=-0.25, standard_error=0.25, samples=4, clusters=4)
    """
    count = len(base)
    groups = list(range(count)) if clusters is None else list(clusters)
    sizes = [1.0] * count if weights is None else list(weights)
    if not count or {len(other), len(groups), len(sizes)} != {count}:
        raise ValueError(
            f"{count} samples, {len(other)} others, {len(groups)} clusters and {len(sizes)} "
            "weights: allowed is the same number of each, at least 1."
        )
    total = math.fsum(sizes)
    changes = [o - b for b, o in zip(base, other, strict=True)]
    mean = math.fsum(changes) / total
    left: dict[Hashable, list[float]] = {}
    for group, change, size in zip(groups, changes, sizes, strict=True):
        left.setdefault(group, []).append(change - mean * size)
    found = len(left)
    error = None
    if found > 1:
        spread = math.fsum(math.fsum(values) ** 2 for values in left.values())
        error = math.sqrt(spread * found / (found - 1)) / total
    return Difference(mean, error, count, found)
