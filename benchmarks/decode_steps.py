"""Decode steps of one layer, and Paceline's rule for the experts that they read.

A rule sees the tokens of a step, the model's choice for them and the scores of all experts, and
returns the (token, expert) pairs to compute and their weights. Many steps are judged at once:
tensors have a leading axis of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Step:
    """Choice of one layer in many steps.

    Attributes:
        ids: [steps, tokens, k] experts, the token's best first.
        weights: [steps, tokens, k] combine weights.
        scores: [steps, tokens, experts] gate scores.
        devices: that share the experts equally.
        order: [experts] all experts, device by device.
        norms: [experts] mean norm of the error of dropping each expert; None if not calibrated.
        sequences: steps per run of tokens, in order.
        layer: index of the layer.
    """

    ids: Tensor
    weights: Tensor
    scores: Tensor
    devices: int
    order: Tensor
    norms: Tensor | None
    sequences: int
    layer: int = 0

    @property
    def experts(self) -> int:
        return self.scores.shape[2]

    def sums(self, values: Tensor) -> Tensor:
        """Sum `values` [steps, tokens, k] by expert, [steps, experts]; -inf: no token chose it."""
        steps = self.ids.shape[0]
        flat = self.ids.flatten(1)
        zero = torch.zeros(steps, self.experts, dtype=torch.float64)
        total = zero.scatter_add(1, flat, values.double().flatten(1))
        chosen = zero.scatter_add(1, flat, torch.ones_like(flat, dtype=torch.float64)) > 0
        return torch.where(chosen, total, -torch.inf)

    def best(self, value: Tensor, most: int, devices: int | None = None) -> Tensor:
        """Mark the `most` experts of largest `value` on each device, both [steps, experts]."""
        by_device = value[:, self.order].view(len(value), devices or self.devices, -1)
        rank = by_device.argsort(dim=2, descending=True, stable=True).argsort(dim=2)
        best = ((rank < most) & (by_device > -torch.inf)).flatten(1)
        return torch.zeros_like(best).index_copy(1, self.order, best)

    def most_of_a_device(self, table: Tensor) -> Tensor:
        """Count the marks of `table` [steps, experts] on the device that has most, [steps]."""
        return table[:, self.order].view(len(table), self.devices, -1).sum(2).amax(1)


@dataclass
class Chosen:
    """Pairs to compute: [steps, tokens, slots] ids and weights, `experts` in empty slots."""

    ids: Tensor
    weights: Tensor
    dropped: Tensor = field(default_factory=lambda: torch.zeros(0))  # [steps, tokens, k] bool


Rule = Callable[[Step], Chosen]


def keep_read(step: Step, read: Tensor, renormalize: bool = False) -> Chosen:
    """Drop the assignments of experts that are not read."""
    kept = read.gather(1, step.ids.flatten(1)).view(step.ids.shape)
    weights = torch.where(kept, step.weights, 0)
    if renormalize:
        now, former = weights.sum(2, keepdim=True), step.weights.sum(2, keepdim=True)
        weights = torch.where(now > 0, weights * former / now.clamp(min=1e-30), weights)
    return Chosen(torch.where(kept, step.ids, step.experts), weights, ~kept)


def by_weight(step: Step) -> Tensor:
    """Score an expert by the sum of its combine weights, as Paceline does."""
    return step.sums(step.weights)


def at_most(
    value: Callable[[Step], Tensor],
    most: int,
    renormalize: bool = False,
    devices: int | None = None,
) -> Rule:
    """Read at most `most` experts per device, those of the largest value."""
    return lambda step: keep_read(step, step.best(value(step), most, devices), renormalize)


def by_layer(most: Sequence[int]) -> Rule:
    """Read at most `most` [layers] experts per device, by weight."""
    return lambda step: keep_read(step, step.best(by_weight(step), most[step.layer]))
