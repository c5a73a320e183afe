"""Fit an expert's stand-in: the low-rank ridge regression of its output on its input.

Reduced-rank ridge regression (Mukherjee and Zhu, Statistical Analysis and Data Mining 2011): of
all maps of at most that rank, the one with the least squared error plus ridge penalty. Rows are
weighted by `paceline.calibration.rows`.

One Cholesky factor per ridge, and subspace iteration (Halko, Martinsson and Tropp, SIAM Review
2011) for the directions: no eigenvalue decomposition of a [hidden, hidden] matrix.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from paceline.numbers import check_count

CHUNK = 4096
"""Rows multiplied at once."""

EXACT = 1024
"""Hidden size up to which all is computed in float64.

Beyond it products are taken in float32 and summed in float64, which takes half as long; their error
is far below the smallest ridge penalty. So are the fits that only judge others.
"""

_BLOCK = 512  # columns of a symmetric product computed at once

ROWS_PER_RANK = 8
"""Rows an expert must have per rank of its stand-in."""

LOG_RIDGE = 1e-2
"""Penalty of `fit_log`, relative to the mean variance of an input."""

_SMALLEST_VALUE = 1e-3  # of the largest; below it, values don't matter

_SMALLEST = 1e-12  # of the largest energy of a direction; below it, it is noise

_LITTLE = 1e-6  # share of the rows' weight or energy below which a difference is rounding

_ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6}
"""Relative error of a mean: smaller differences are rounding."""

ITERATIONS = 4
"""Iterations of the subspace; half of them tell ridges apart."""

_SPARE = 16  # fewest directions beyond the rank


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, means and centred products of an expert's rows: all that a fit needs.

    Attributes:
        rows: number of rows.
        weight: sum of their weights.
        mean: [hidden] weighted mean of the inputs x.
        bias: [hidden] weighted mean of the outputs y.
        xx: [hidden, hidden] weighted sum of (x - mean)(x - mean)'.
        xy: [hidden, hidden] weighted sum of (x - mean)(y - bias)'.
        yy: weighted sum of |y - bias|^2.
    """

    rows: int
    weight: float
    mean: Tensor
    bias: Tensor
    xx: Tensor
    xy: Tensor
    yy: float

    @classmethod
    def of(cls, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Moments:
        """Sum rows up; those with a value that isn't finite are left out.

        Args:
            x: [rows, hidden] inputs.
            y: [rows, hidden] outputs.
            weight: [rows] > 0; None: 1 each.

        Raises:
            ValueError: if the shapes differ.

        >>> Moments.of(torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [6.0]])).xy.tolist()
        [[4.0]]
        """
        if x.dim() != 2 or x.shape != y.shape:
            raise ValueError(
                f"x and y must both have shape [rows, hidden], got {list(x.shape)} and "
                f"{list(y.shape)}"
            )
        if weight is None:
            weight = torch.ones(len(x))
        finite = torch.isfinite(x).all(1) & torch.isfinite(y).all(1)
        if not bool(finite.all()):
            x, y, weight = x[finite], y[finite], weight[finite]
        if len(x) == 0:
            return no_moments(x.shape[1])
        parts = zip(*(torch.split(t, CHUNK) for t in (x, y, weight)), strict=True)
        return merged(_of_chunk(*part) for part in parts)


def no_moments(hidden: int) -> Moments:
    """Return the moments of no rows."""
    zeros = torch.zeros(hidden, dtype=torch.float64)
    table = zeros.new_zeros(hidden, hidden)
    return Moments(0, 0.0, zeros, zeros, table, table, 0.0)


def merged(parts: Iterable[Moments]) -> Moments:
    """Merge the moments of one or more parts.

    >>> rows = [torch.tensor([[1.0]]), torch.tensor([[3.0]])]
    >>> merged(Moments.of(part, part) for part in rows).xx.tolist()
    [[2.0]]
    """
    return reduce(_merge, parts)


def without(whole: Moments, part: Moments) -> Moments | None:
    """Take a part of the rows out again; None if so little is left that it would be rounding.

    >>> rows = [torch.tensor([[1.0]]), torch.tensor([[3.0]]), torch.tensor([[7.0]])]
    >>> parts = [Moments.of(part, part) for part in rows]
    >>> without(merged(parts), parts[2]).xx.tolist()
    [[2.0]]
    """
    rows, weight = whole.rows - part.rows, whole.weight - part.weight
    if part.rows == 0 or rows <= 0 or weight < _LITTLE * whole.weight:
        return None
    mean = whole.mean + (whole.mean - part.mean) * (part.weight / weight)
    bias = whole.bias + (whole.bias - part.bias) * (part.weight / weight)
    x, y, between = part.mean - mean, part.bias - bias, weight * part.weight / whole.weight
    xx = (whole.xx - part.xx).addr_(x, x, alpha=-between)
    yy = whole.yy - part.yy - between * float(y.square().sum())
    if xx.trace() < _LITTLE * whole.xx.trace() or yy < _LITTLE * whole.yy:
        return None
    xy = (whole.xy - part.xy).addr_(x, y, alpha=-between)
    return Moments(rows, weight, mean, bias, xx, xy, yy)


def _dtype(hidden: int) -> torch.dtype:
    """Return the type of products of rows, and of fits that only judge others."""
    return torch.float32 if hidden > EXACT else torch.float64


def _of_chunk(x: Tensor, y: Tensor, weight: Tensor) -> Moments:
    x, y, weight = (t.to(_dtype(x.shape[1])) for t in (x, y, weight))
    total = float(weight.sum())
    mean, bias = (weight @ t / total for t in (x, y))
    root = weight.sqrt().unsqueeze(1)
    x, y = (x - mean).mul_(root), (y - bias).mul_(root)
    xx, xy, yy = _gram(x), (x.T @ y).double(), float(y.square().sum())
    return Moments(len(x), total, mean.double(), bias.double(), xx, xy, yy)


def _gram(x: Tensor) -> Tensor:
    """Return x' x in float64; of its two equal halves only one is computed."""
    hidden = x.shape[1]
    out = x.new_empty(hidden, hidden, dtype=torch.float64)
    for start in range(0, hidden, _BLOCK):
        end = start + _BLOCK
        out[start:, start:end] = x[:, start:].T @ x[:, start:end]
        out[start:end, end:] = out[end:, start:end].T
    return out


def _merge(a: Moments, b: Moments) -> Moments:
    """Merge two (Chan, Golub and LeVeque, The American Statistician 1983)."""
    if a.rows == 0 or b.rows == 0:
        return a if b.rows == 0 else b
    total = a.weight + b.weight
    x, y = b.mean - a.mean, b.bias - a.bias
    between = a.weight * b.weight / total
    return Moments(
        a.rows + b.rows,
        total,
        a.mean + x * (b.weight / total),
        a.bias + y * (b.weight / total),
        (a.xx + b.xx).addr_(x, x, alpha=between),
        (a.xy + b.xy).addr_(x, y, alpha=between),
        a.yy + b.yy + between * float(y.square().sum()),
    )


@dataclass(frozen=True, eq=False)
class StandInFit:
    """An affine map in place of an expert: x -> bias + up (down (x - mean)).

    Attributes:
        bias: [hidden] mean output.
        up: [hidden, rank].
        down: [rank, hidden], scaled so that its outputs for the rows fitted to have variance 1 in
            every direction and are uncorrelated: the distance of other rows from these is then the
            length of their outputs (Mahalanobis).
        mean: [hidden] mean input.
    """

    bias: Tensor
    up: Tensor
    down: Tensor
    mean: Tensor

    @property
    def rank(self) -> int:
        """Rank of the map; 0: the expert has no stand-in, and the map returns zeros."""
        return self.down.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the map to [rows, hidden] inputs."""
        return self.bias + (x - self.mean) @ self.down.T @ self.up.T


def fit(
    moments: Moments,
    rank: int,
    ridge: float,
    iterations: int = ITERATIONS,
    exact: bool = True,
) -> StandInFit:
    """Fit the stand-in of at most this rank.

    Args:
        moments: of an expert's rows.
        rank: at most; smaller with few rows: one per `ROWS_PER_RANK` rows, and 0, no stand-in,
            with fewer than that.
        ridge: penalty, relative to the mean variance of an input.
        iterations: of the subspace.
        exact: solve in float64 whatever the hidden size; else as `EXACT` says.

    Raises:
        ValueError: if the rank isn't a whole number >= 1, or the ridge not positive.

    >>> x = torch.arange(32.0, dtype=torch.float64).view(16, 2) ** 2
    >>> fit(Moments.of(x, 3 * x + 1), rank=2, ridge=1e-9)(x[:1]).round().tolist()
    [[1.0, 4.0]]
    """
    check_count("rank", rank)
    if not 0 < ridge < float("inf"):
        raise ValueError(f"ridge must be a finite number > 0, got {ridge!r}")
    hidden = len(moments.mean)
    rank = min(rank, moments.rows // ROWS_PER_RANK, hidden)
    if rank == 0 or _constant(float(moments.xx.trace()), moments.mean, moments.weight):
        return no_stand_in(hidden)
    # iterations correct each other: for large sizes they run in float32, the last product exactly
    rough = _dtype(hidden)
    last = torch.float64 if exact else rough
    factor = _factor(moments.xx, ridge * float(moments.xx.trace()) / hidden, last)
    last = factor.dtype
    xx, xy = moments.xx.to(last), moments.xy.to(last)
    rough_xy, rough_factor = xy.to(rough), factor.to(rough)

    def explained(directions: Tensor, xy: Tensor, factor: Tensor) -> Tensor:
        """Multiply by xy' (xx + penalty)^-1 xy, with the outputs' directions as eigenvectors."""
        return xy.T @ torch.cholesky_solve(xy @ directions, factor)

    random = torch.Generator().manual_seed(0)
    width = min(hidden, max(2 * rank, rank + _SPARE))
    block = torch.randn(hidden, width, generator=random, dtype=torch.float64).to(rough_xy)
    for _ in range(iterations):
        block = torch.linalg.qr(explained(block, rough_xy, rough_factor)).Q
    if rough is not last:
        block = torch.linalg.qr(block.to(last)).Q
    energy, turn = torch.linalg.eigh(block.T @ explained(block, xy, factor))
    floor = max(float(energy[-1]) * _SMALLEST, _floor(moments.bias, moments.weight, moments.yy))
    up = block @ turn[:, -rank:][:, energy[-rank:] > floor]
    if up.shape[1] == 0:  # equal outputs depend on nothing
        return no_stand_in(hidden)
    down = torch.cholesky_solve(xy @ up, factor).T
    variance, axes = torch.linalg.eigh(down @ xx @ down.T / moments.weight)
    scale = variance.clamp(min=float(variance[-1]) * _SMALLEST).sqrt()
    up, down = up @ axes * scale, (axes / scale).T @ down
    return StandInFit(moments.bias, up.double(), down.double(), moments.mean)


def fit_log(moments: Moments, x: Tensor, values: Tensor, weight: Tensor) -> tuple[float, Tensor]:
    """Fit the logarithm of a positive value per row: constant + slope (x - mean).

    A ridge regression. The logarithm, as values vary by orders of magnitude and are compared.

    Args:
        moments: of the rows; only those of the inputs are used.
        x: [rows, hidden] inputs.
        values: [rows] >= 0; those that aren't finite are ignored.
        weight: [rows] > 0.

    Returns:
        The constant, and the slope [hidden]; zeros if there are no rows.

    >>> x = torch.arange(4.0).unsqueeze(1)
    >>> constant, slope = fit_log(Moments.of(x, x), x, (2 * x[:, 0]).exp(), torch.ones(4))
    >>> round(constant, 2), round(float(slope), 1)
    (3.0, 2.0)
    """
    known = torch.isfinite(values) & torch.isfinite(x).all(1)
    dtype = _dtype(len(moments.mean))
    x, values, weight = x[known].to(dtype), values[known].double(), weight[known].double()
    slope = torch.zeros(len(moments.mean), dtype=torch.float64)
    if len(x) == 0:
        return 0.0, slope
    tiny = torch.finfo(torch.float32).tiny
    log = values.clamp(min=max(float(values.max()) * _SMALLEST_VALUE, tiny)).log()
    constant = float(weight @ log / weight.sum())
    spread = float(moments.xx.trace())
    if not _constant(spread, moments.mean, moments.weight):
        factor = _factor(moments.xx, LOG_RIDGE * spread / len(slope), dtype)
        towards = (x - moments.mean.to(dtype)).T @ (weight * (log - constant)).to(dtype)
        slope = torch.cholesky_solve(towards.unsqueeze(1).to(factor), factor).squeeze(1).double()
    return constant, slope


def _factor(xx: Tensor, penalty: float, dtype: torch.dtype) -> Tensor:
    """Return the Cholesky factor of xx + penalty; in float64 where `dtype` is too coarse for it."""
    penalized = xx.to(dtype, copy=True)
    penalized.diagonal().add_(penalty)
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(penalized)
    if not failed:
        return factor
    if dtype is torch.float64:
        raise ValueError("products of rows must be finite and positive semidefinite")
    return _factor(xx, penalty, torch.float64)


def no_stand_in(hidden: int) -> StandInFit:
    """Return the fit of no stand-in: zeros for every input.

    >>> no_stand_in(2)(torch.ones(1, 2)).tolist()
    [[0.0, 0.0]]
    """
    zeros = torch.zeros(hidden, dtype=torch.float64)
    return StandInFit(zeros, zeros.new_zeros(hidden, 0), zeros.new_zeros(0, hidden), zeros)


def _floor(mean: Tensor, weight: float, spread: float) -> float:
    """Return the energy that rounding of the means alone causes."""
    return _ROUNDING[_dtype(len(mean))] ** 2 * (spread + weight * float(mean.square().sum()))


def _constant(spread: float, mean: Tensor, weight: float) -> bool:
    return spread <= _floor(mean, weight, spread)
