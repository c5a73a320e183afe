"""Weighted sums over rows of an expert's inputs and outputs: all that a fit needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

CHUNK = 4096
"""Rows multiplied at once."""

EXACT = 1024
"""Hidden size up to which products are taken in float64; beyond it in float32, summed in float64.

On two cores a [2048, 2048] product of 4,096 rows takes half as long so, and its error is far
below the smallest ridge penalty.
"""


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, means and centred products of rows.

    Attributes:
        rows: that were summed up.
        weight: of all of them.
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
        """Of rows; those with a value that isn't finite are left out.

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
                f"x has shape {list(x.shape)}, y {list(y.shape)}: allowed is [rows, hidden], twice."
            )
        if weight is None:
            weight = torch.ones(len(x))
        finite = torch.isfinite(x).all(1) & torch.isfinite(y).all(1)
        if not bool(finite.all()):
            x, y, weight = x[finite], y[finite], weight[finite]
        if len(x) == 0:
            return none(x.shape[1])
        parts = zip(*(torch.split(t, CHUNK) for t in (x, y, weight)), strict=True)
        return merged(_of_chunk(*part) for part in parts)


def none(hidden: int) -> Moments:
    """Of no rows."""
    zeros = torch.zeros(hidden, dtype=torch.float64)
    table = zeros.new_zeros(hidden, hidden)
    return Moments(0, 0.0, zeros, zeros, table, table, 0.0)


def merged(parts: Iterable[Moments]) -> Moments:
    """Of all rows of several parts, at least one.

    >>> rows = [torch.tensor([[1.0]]), torch.tensor([[3.0]])]
    >>> merged(Moments.of(part, part) for part in rows).xx.tolist()
    [[2.0]]
    """
    return reduce(_merge, parts)


def _of_chunk(x: Tensor, y: Tensor, weight: Tensor) -> Moments:
    x, y, weight = x.double(), y.double(), weight.double()
    total = float(weight.sum())
    mean, bias = (weight @ t / total for t in (x, y))
    root = weight.sqrt().unsqueeze(1)
    x, y = (x - mean) * root, (y - bias) * root
    yy = float(y.square().sum())
    if x.shape[1] > EXACT:
        x, y = x.float(), y.float()
    return Moments(len(x), total, mean, bias, (x.T @ x).double(), (x.T @ y).double(), yy)


def _merge(a: Moments, b: Moments) -> Moments:
    """Chan, Golub and LeVeque, The American Statistician 1983."""
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
