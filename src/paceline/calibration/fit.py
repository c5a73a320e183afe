"""Fit an expert's stand-in: the low-rank ridge regression of its output on its input.

Reduced-rank ridge regression (Mukherjee and Zhu, Statistical Analysis and Data Mining 2011): of
all maps of at most that rank, the one with the least squared error plus ridge penalty. How much a
row counts is said by `paceline.calibration.drops`.

One Cholesky factor a ridge, and subspace iteration (Halko, Martinsson and Tropp, SIAM Review 2011)
for the directions: no eigenvalue decomposition of a [hidden, hidden] matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.calibration.moments import Moments
from paceline.numbers import check_count

ROWS_PER_RANK = 8
"""Rows an expert must have for every rank of its stand-in."""

LOG_RIDGE = 1e-2
"""Penalty of `fit_log`, relative to the mean variance of an input."""

_SMALLEST_VALUE = 1e-3  # of the largest; below it, how small a value is says little

_SMALLEST = 1e-12  # of the largest energy of a direction; below it, it says nothing

_ROUNDING = 1e-14  # relative error of a mean: what is left of equal values is none of theirs

_ITERATIONS, _SPARE = 4, 16  # of the subspace; directions beyond the rank that it has at least


@dataclass(frozen=True, eq=False)
class StandInFit:
    """An affine map in place of an expert: x -> bias + up (down (x - mean)).

    Attributes:
        bias: [hidden] mean output.
        up: [hidden, rank].
        down: [rank, hidden], scaled so that what it gives for the rows it was fitted to has
            variance 1 in every direction, and no two directions vary together: how far other rows
            are from these is then the length of what it gives for them (Mahalanobis).
        mean: [hidden] mean input.
    """

    bias: Tensor
    up: Tensor
    down: Tensor
    mean: Tensor

    @property
    def rank(self) -> int:
        """Of the map; 0: the expert has no stand-in, and the map gives zeros."""
        return self.down.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] what it gives for [rows, hidden]."""
        return self.bias + (x - self.mean) @ self.down.T @ self.up.T


def fit(seen: Moments, rank: int, ridge: float) -> StandInFit:
    """The stand-in of at most this rank.

    Args:
        seen: rows of an expert.
        rank: allowed; of few rows it is smaller: one for each `ROWS_PER_RANK` rows, and 0, no
            stand-in at all, where there are not even so many.
        ridge: penalty, relative to the mean variance of an input.

    Raises:
        ValueError: if the rank isn't a whole number >= 1, or the ridge not positive.

    >>> x = torch.arange(32.0, dtype=torch.float64).view(16, 2) ** 2
    >>> fit(Moments.of(x, 3 * x + 1), rank=2, ridge=1e-9)(x[:1]).round().tolist()
    [[1.0, 4.0]]
    """
    check_count("rank", rank)
    if not 0 < ridge < float("inf"):
        raise ValueError(f"ridge={ridge!r} is not allowed: it is a finite number > 0.")
    hidden = len(seen.mean)
    rank = min(rank, seen.rows // ROWS_PER_RANK, hidden)
    if rank == 0 or _constant(float(seen.xx.trace()), seen.mean, seen.weight):
        return none(hidden)
    penalized = seen.xx.clone()
    penalized.diagonal().add_(ridge * float(seen.xx.trace()) / hidden)
    factor = torch.linalg.cholesky(penalized)

    def explained(directions: Tensor) -> Tensor:
        """xy' (xx + penalty)^-1 xy, whose leading eigenvectors are the outputs' directions."""
        return seen.xy.T @ torch.cholesky_solve(seen.xy @ directions, factor)

    random = torch.Generator().manual_seed(0)
    width = min(hidden, max(2 * rank, rank + _SPARE))
    block = torch.randn(hidden, width, generator=random, dtype=torch.float64).to(seen.xx)
    for _ in range(_ITERATIONS):
        block = torch.linalg.qr(explained(block)).Q
    energy, turn = torch.linalg.eigh(block.T @ explained(block))
    floor = max(float(energy[-1]) * _SMALLEST, _floor(seen.bias, seen.weight, seen.yy))
    up = block @ turn[:, -rank:][:, energy[-rank:] > floor]
    if up.shape[1] == 0:  # outputs that are all alike depend on nothing
        return none(hidden)
    down = torch.cholesky_solve(seen.xy @ up, factor).T
    variance, axes = torch.linalg.eigh(down @ seen.xx @ down.T / seen.weight)
    scale = variance.clamp(min=float(variance[-1]) * _SMALLEST).sqrt()
    return StandInFit(seen.bias, up @ axes * scale, (axes / scale).T @ down, seen.mean)


def fit_log(seen: Moments, x: Tensor, values: Tensor, weight: Tensor) -> tuple[float, Tensor]:
    """Expect the logarithm of a positive value of a row: constant + slope (x - mean).

    A ridge regression. The logarithm, since the value is to be compared, and varies by its size.

    Args:
        seen: the rows; of its sums those of the inputs are used.
        x: [rows, hidden] inputs.
        values: [rows] >= 0; those that aren't finite say nothing.
        weight: [rows] > 0.

    Returns:
        The constant, and [hidden] the slope. Zeros if there are no rows.

    >>> x = torch.arange(4.0).unsqueeze(1)
    >>> constant, slope = fit_log(Moments.of(x, x), x, (2 * x[:, 0]).exp(), torch.ones(4))
    >>> round(constant, 2), round(float(slope), 1)
    (3.0, 2.0)
    """
    known = torch.isfinite(values) & torch.isfinite(x).all(1)
    x, values, weight = x[known].double(), values[known].double(), weight[known].double()
    slope = torch.zeros(len(seen.mean), dtype=torch.float64)
    if len(x) == 0:
        return 0.0, slope
    tiny = torch.finfo(torch.float32).tiny
    log = values.clamp(min=max(float(values.max()) * _SMALLEST_VALUE, tiny)).log()
    constant = float(weight @ log / weight.sum())
    spread = float(seen.xx.trace())
    if not _constant(spread, seen.mean, seen.weight):
        penalized = seen.xx.clone()
        penalized.diagonal().add_(LOG_RIDGE * spread / len(slope))
        towards = (x - seen.mean).T @ (weight * (log - constant))
        factor = torch.linalg.cholesky(penalized)
        slope = torch.cholesky_solve(towards.unsqueeze(1), factor).squeeze(1)
    return constant, slope


def none(hidden: int) -> StandInFit:
    """No stand-in: zeros for every input.

    >>> none(2)(torch.ones(1, 2)).tolist()
    [[0.0, 0.0]]
    """
    zeros = torch.zeros(hidden, dtype=torch.float64)
    return StandInFit(zeros, zeros.new_zeros(hidden, 0), zeros.new_zeros(0, hidden), zeros)


def _floor(mean: Tensor, weight: float, spread: float) -> float:
    """Energy that rounding of the means alone gives."""
    return _ROUNDING**2 * (spread + weight * float(mean.square().sum()))


def _constant(spread: float, mean: Tensor, weight: float) -> bool:
    return spread <= _floor(mean, weight, spread)
