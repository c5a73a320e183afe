"""Capacity factors of layers under one bound on the model's expert time.

A factor bounds a layer's busiest device, and so its time: the weighted mean of the factors bounds
the model. Losses of layers capped alone are assumed to add up. Where each loss falls with its
factor at a slowing rate, the best choice takes steps in order of what they save, until the bound is
used up (Fox, "Discrete optimization via marginal analysis", Management Science 1966).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

STEP = 0.01
"""Distance between the factors that are considered, at most."""

Array: TypeAlias = NDArray[Any]


def share_bound(
    factors: Sequence[float],
    losses: Sequence[Sequence[float]],
    bound: float,
    weights: Sequence[float] | None = None,
) -> list[float]:
    """Choose a factor for each layer, with least total loss and a weighted mean within the bound.

    Between measured factors the square root of a loss is assumed linear, as losses are of second
    order in the share that is dropped; where a curve isn't convex, its lower convex hull counts.
    Room that would save nothing is divided evenly among the layers.

    Args:
        factors: measured factors, ascending, > 0.
        losses: [layers, factors] loss with this layer alone capped, >= 0.
        bound: on the weighted mean, at least the smallest of the factors.
        weights: [layers] cost of a unit of factor in each layer, > 0; None: equal.

    Returns:
        [layers] factors, none below the smallest measured one.

    Raises:
        ValueError: if an argument is bad.

    >>> share_bound([0.5, 1.0, 1.5], [[4.0, 1.0, 0.0], [1.0, 0.25, 0.0]], bound=1.0)
    [1.3, 0.7]
    """
    measured, curves = np.asarray(factors, dtype=float), np.asarray(losses, dtype=float)
    heavy = np.ones(len(curves)) if weights is None else np.asarray(weights, dtype=float)
    _check(measured, curves, bound, heavy)
    steps = int(np.ceil((measured[-1] - measured[0]) / STEP - 1e-9))
    grid = np.linspace(measured[0], measured[-1], steps + 1)
    saved = np.array([-np.diff(_hull(grid, between(measured, curve, grid))) for curve in curves])
    each = (grid[1] - grid[0]) * heavy
    room, taken = (bound - measured[0]) * heavy.sum(), np.zeros(len(curves), dtype=int)
    order = np.argsort(-(saved / each[:, None]), axis=None, kind="stable")
    for layer, at in zip(*np.unravel_index(order, saved.shape), strict=True):
        if saved[layer, at] <= 0 or each[layer] > room + 1e-9:
            break
        room -= each[layer]
        taken[layer] += 1
    chosen: list[float] = (grid[taken] + max(0.0, room) / heavy.sum()).tolist()
    return chosen


def between(measured: Array, curve: Array, at: Array) -> Array:
    """Interpolate losses, [points]: the square root is linear between measured factors."""
    root: Array = np.interp(at, measured, np.sqrt(curve))
    return root**2


def _hull(x: Array, y: Array) -> Array:
    """Compute the lower convex hull of a curve that never rises, at its own points (Andrew)."""
    y = np.minimum.accumulate(y)
    corners: list[int] = []
    for point in range(len(x)):
        while len(corners) > 1:
            first, last = corners[-2:]
            run = (y[last] - y[first]) * (x[point] - x[first])
            if run < (y[point] - y[first]) * (x[last] - x[first]):
                break
            corners.pop()
        corners.append(point)
    hull: Array = np.interp(x, x[corners], y[corners])
    return hull


def _check(measured: Array, curves: Array, bound: float, heavy: Array) -> None:
    if len(measured) < 2 or not (np.diff(measured) > 0).all() or not measured[0] > 0:
        raise ValueError(
            f"factors must be at least two ascending numbers > 0, got {measured.tolist()}"
        )
    if curves.ndim != 2 or curves.shape[1] != len(measured) or not len(curves):
        raise ValueError(
            f"losses must be [layers, {len(measured)}], got shape {list(curves.shape)}"
        )
    if not np.isfinite(curves).all() or (curves < 0).any():
        raise ValueError("losses must be finite numbers >= 0")
    if heavy.shape != (len(curves),) or not (np.isfinite(heavy) & (heavy > 0)).all():
        raise ValueError("weights must be a finite number > 0 for each layer")
    if not (np.isfinite(bound) and bound >= measured[0]):
        raise ValueError(f"bound must be at least {measured[0]:g}, got {bound}")
