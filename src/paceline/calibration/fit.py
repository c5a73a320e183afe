"""Fit an expert's stand-in: the low-rank ridge regression of its output on its input.

Reduced-rank ridge regression (Mukherjee and Zhu, Statistical Analysis and Data Mining 2011): of
all maps of at most that rank, the one with the least squared error plus ridge penalty. Every row
counts alike: weighting by combine weights is worse, as a cap drops assignments of low weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.numbers import check_count

ROWS_PER_RANK = 8
"""Rows an expert must have for every rank of its stand-in."""

_SMALLEST = 1e-12  # of the largest variance of the inputs; below it a direction says nothing

_ROUNDING = 1e-14  # relative error of a mean: what is left of equal values is none of theirs


@dataclass(frozen=True, eq=False)
class StandInFit:
    """An affine map in place of an expert: x -> bias + up (down (x - mean)).

    Attributes:
        bias: [hidden] mean output.
        up: [hidden, rank].
        down: [rank, hidden].
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


class Regression:
    """Rows of one expert, decomposed once, so that every ridge and rank is cheap.

    Args:
        x: [rows, hidden] inputs.
        y: [rows, hidden] outputs. Rows with a value that isn't finite are left out.

    Raises:
        ValueError: if the shapes differ.

    >>> x = torch.arange(32.0).view(16, 2) ** 2
    >>> Regression(x, 3 * x + 1).fit(rank=2, ridge=0)(x[:1]).round().tolist()
    [[1.0, 4.0]]
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        if x.dim() != 2 or x.shape != y.shape:
            raise ValueError(
                f"x has shape {list(x.shape)}, y {list(y.shape)}: allowed is [rows, hidden], twice."
            )
        finite = torch.isfinite(x).all(1) & torch.isfinite(y).all(1)
        x, y = x[finite].double(), y[finite].double()
        self.rows, self.hidden = x.shape
        if self.rows == 0:
            return
        self._mean, self._bias = x.mean(0), y.mean(0)
        rounding_x, rounding_y = ((_ROUNDING * t).square().sum() for t in (x, y))
        x, y = x - self._mean, y - self._bias
        # x = P diag(d) Q', by the smaller of the two Gram matrices
        wide = self.rows < self.hidden
        variance, vectors = torch.linalg.eigh(x @ x.T if wide else x.T @ x)
        some = variance > torch.maximum(variance.amax() * _SMALLEST, rounding_x)
        self._variance, vectors = variance[some], vectors[:, some]
        d = self._variance.sqrt()
        self._rounding = rounding_y
        self._q = x.T @ vectors / d if wide else vectors
        self._c = (vectors.T @ y) if wide else (vectors.T @ (x.T @ y)) / d.unsqueeze(1)

    def fit(self, rank: int, ridge: float) -> StandInFit:
        """The stand-in of at most this rank.

        Args:
            rank: allowed; of few rows it is smaller: one for each `ROWS_PER_RANK` rows, and 0,
                no stand-in at all, where there are not even so many.
            ridge: penalty, relative to the mean variance of an input.

        Raises:
            ValueError: if the rank isn't a whole number >= 1, or the ridge negative.
        """
        check_count("rank", rank)
        if not 0 <= ridge < float("inf"):
            raise ValueError(f"ridge={ridge!r} is not allowed: it is a finite number >= 0.")
        rank = min(rank, self.rows // ROWS_PER_RANK)
        if rank == 0 or len(self._variance) == 0:
            return none(self.hidden)
        penalty = ridge * self._variance.sum() / self.hidden
        shrunk = self._c * (self._variance / (self._variance + penalty)).sqrt().unsqueeze(1)
        energy, directions = torch.linalg.eigh(shrunk.T @ shrunk)
        some = energy[-rank:] > torch.maximum(energy[-1] * _SMALLEST, self._rounding)
        up = directions[:, -rank:][:, some]
        if up.shape[1] == 0:  # outputs that are all alike depend on nothing
            return none(self.hidden)
        gain = self._variance.sqrt() / (self._variance + penalty)
        down = (self._q @ (gain.unsqueeze(1) * (self._c @ up))).T
        return StandInFit(self._bias, up, down, self._mean)


def none(hidden: int) -> StandInFit:
    """No stand-in: zeros for every input.

    >>> none(2)(torch.ones(1, 2)).tolist()
    [[0.0, 0.0]]
    """
    zeros = torch.zeros(hidden, dtype=torch.float64)
    return StandInFit(zeros, zeros.new_zeros(hidden, 0), zeros.new_zeros(0, hidden), zeros)
