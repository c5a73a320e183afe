"""Capacity factors by layer, under one bound on the model's expert time.

Each layer is capped alone, to measure its cost. A factor bounds a layer's busiest device, and so
its time: the weighted mean of the factors bounds the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.batches import Sampling, check_length, make_batches
from paceline.engines.transformers import attach
from paceline.evaluation.results import Form, Schema
from paceline.evaluation.subject import Store
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.progress import Progress

RATIOS = (0.4, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0)
"""Factors that are tried in each layer, relative to that of the policy."""

STEP = 0.01
"""Distance between the factors that are considered, at most."""

_DIGITS = 4  # of a factor
Array: TypeAlias = NDArray[Any]


class LayerFactor(Form):
    """The factor of one layer.

    Attributes:
        name: of the layer.
        weight: cost of a row.
        losses: with this layer alone capped, at each measured factor.
        factor: chosen.
        at_bound: loss at the bound.
        at_factor: loss at the chosen factor.
    """

    name: str
    weight: float
    losses: list[float]
    factor: float
    at_bound: float
    at_factor: float


class LayerFactors(Schema):
    """Factors of all layers under the bound of a policy, and the losses they were chosen by."""

    policy: str
    tokens: int
    factors: list[float]
    layers: list[LayerFactor]


@dataclass(frozen=True)
class Sensitivity:
    """Cost of capping each layer alone.

    Attributes:
        names: of the layers.
        factors: that were tried.
        losses: [layers][factors] mean divergence of a token's next-token distribution from that of
            the model without a cap (Kullback-Leibler, nats).
        weights: [layers] cost of a row in each, any unit.
        tokens: that were run.
    """

    names: tuple[str, ...]
    factors: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    tokens: int

    def share(self, policy: CapacityPolicy) -> tuple[CapacityPolicy, ...]:
        """Choose the policy of each layer: the policy's factor bounds their mean, weighted by cost.

        Raises:
            ValueError: if it has no factor, or one below those that were tried.

        >>> layers = Sensitivity(("a", "b"), (0.5, 1.5), ((4.0, 0.0), (1.0, 0.0)), (1.0, 1.0), 8)
        >>> [each.capacity_factor for each in layers.share(CapacityPolicy(capacity_factor=1))]
        [1.3, 0.7]
        """
        chosen = share_bound(self.factors, self.losses, bound_of(policy), self.weights)
        scale = 10**_DIGITS  # rounded down: the bound holds
        rounded = [math.floor(factor * scale + 1e-6) / scale for factor in chosen]
        return tuple(policy.replace(capacity_factor=factor) for factor in rounded)

    def result(self, policy: CapacityPolicy) -> LayerFactors:
        """Return the factors that `share` chooses, with the losses at each."""
        bound, measured = bound_of(policy), np.array(self.factors)
        rows = zip(self.names, self.weights, self.losses, self.share(policy), strict=True)
        layers = []
        for name, weight, losses, own in rows:
            both = np.array([bound, bound_of(own)])
            at_bound, at_factor = between(measured, np.array(losses), both).tolist()
            layers.append(LayerFactor(
                name=name, weight=weight, losses=list(losses),
                factor=bound_of(own), at_bound=at_bound, at_factor=at_factor,
            ))  # fmt: skip
        return LayerFactors(
            schema="paceline-factors/1",
            policy=str(policy),
            tokens=self.tokens,
            factors=list(self.factors),
            layers=layers,
        )


def measure_layers(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, str],
    policy: CapacityPolicy,
    *,
    plan: Plan,
    calibration: Any = None,
    sampling: Sampling | None = None,
    factors: Sequence[float] | None = None,
    progress: Progress | None = None,
    store: Store | None = None,
    fingerprint: str = "",
) -> Sensitivity:
    """Run texts with one layer capped at a time, and measure how far the model's answers move.

    The model is in evaluation mode, and restored afterwards.

    Args:
        policy: of the capped layer, with another factor each time.
        plan: where experts are, and the calibration unless it is given.
        factors: to try; None: `RATIOS` of the policy's.
        store: of what an earlier run found, None: nothing is kept.
        fingerprint: of all that the result depends on besides texts, policy and factors.

    Raises:
        ValueError: if the model can't follow the policy, the policy has no factor, or no batch is
            large enough for the cap to apply.
    """
    sampling = sampling or Sampling()
    bound = bound_of(policy)
    tried = tuple(bound * ratio for ratio in RATIOS) if factors is None else tuple(factors)
    check_length(model, sampling.sequence_length)
    batches, _ = make_batches(tokenizer, texts, sampling)
    places = plan.replace(policies=())
    with attach(model, policy, plan=places, calibration=calibration) as pace:
        count = len(pace.layers)
        sums = torch.zeros((count, len(tried)), dtype=torch.float64)
        total, done = len(batches) * (1 + sums.numel()), 0

        def run(policies: Any, ids: Tensor) -> Tensor:
            nonlocal done
            pace.policy = policies
            with torch.no_grad():
                logits: Tensor = model(input_ids=ids.to(model.device), use_cache=False).logits
            done += 1
            if progress is not None:
                progress(done, total, "forwards")
            return logits

        def of_batch(ids: Tensor) -> list[list[float]]:
            base = run(None, ids)
            found = torch.zeros_like(sums)
            for layer in range(count):
                for index, factor in enumerate(tried):
                    alone: list[CapacityPolicy | None] = [None] * count
                    alone[layer] = policy.replace(capacity_factor=factor)
                    found[layer, index] = divergence(base, run(alone, ids))
            if not any(layer.capped_forwards for layer in pace.stats().layers):
                raise ValueError(
                    f'the cap of "{policy}" never applied: batches of {ids.numel()} tokens '
                    "are too small for its min_expert_load."
                )
            table: list[list[float]] = found.tolist()
            return table

        kept = store or Store()
        for number, batch in enumerate(batches, start=1):
            key = [fingerprint, "layers alone", policy.to_json(), tried, batch.ids.tolist()]
            sums += torch.tensor(kept.get(key, partial(of_batch, batch.ids)), dtype=sums.dtype)
            done = number * (1 + sums.numel())
        tokens = sum(batch.ids.numel() for batch in batches)
        weights = tuple(map(float, pace.row_costs()))
        names = tuple(pace.layers)
    losses = tuple(tuple(row) for row in (sums / tokens).clamp(min=0).tolist())
    return Sensitivity(names, tried, losses, weights, tokens)


def bound_of(policy: CapacityPolicy) -> float:
    """Return the factor of a policy, which bounds the mean where layers differ.

    Raises:
        ValueError: if it has none.

    >>> bound_of(CapacityPolicy(capacity_factor=0.75))
    0.75
    """
    if policy.capacity_factor is None:
        raise ValueError(f'the policy "{policy}" has no capacity_factor to share out over layers.')
    if policy.mode != "enforce":
        raise ValueError(f'mode must be enforce to share out a factor, got "{policy}".')
    return policy.capacity_factor


def divergence(base: Tensor, other: Tensor) -> float:
    """Sum the Kullback-Leibler divergence of other's distributions from base's over tokens.

    Args:
        base: [rows, tokens, vocabulary] logits.
        other: likewise.

    >>> divergence(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
    0.0
    """
    total = 0.0
    for one, two in zip(base, other, strict=True):  # row by row: little memory
        target, found = (torch.log_softmax(row.float(), -1) for row in (one, two))
        each = torch.nn.functional.kl_div(found, target, reduction="sum", log_target=True)
        total += float(each)
    return total


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

    Losses of layers capped alone are assumed to add up. Where each loss falls with its factor at a
    slowing rate, the best choice takes steps in order of what they save, until the bound is used up
    (Fox, "Discrete optimization via marginal analysis", Management Science 1966).

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
    """Interpolate losses, [points]: the square root is linear between measured factors.

    >>> between(np.array([0.5, 1.5]), np.array([4.0, 0.0]), np.array([1.0])).tolist()
    [1.0]
    """
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
