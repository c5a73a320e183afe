"""Ways to read fewer experts in a decode step: Paceline's rule, variants of it, and published ones.

Every rule sees one step's tokens, the model's choice for them and the scores of all experts, and
says which (token, expert) pairs are computed and with which weights. Many steps are decided at
once: tensors have a leading axis of steps. The published ones are rebuilt from what their papers
say of the rule, not from their code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Step:
    """What one layer chose in many steps.

    Attributes:
        ids: [steps, tokens, k] experts, the token's best first.
        weights: [steps, tokens, k] combine weights.
        scores: [steps, tokens, experts] gate scores.
        devices: over which the experts are spread, equally many on each.
        order: [experts] all experts, device by device.
        norms: [experts] mean norm of what dropping each expert leaves; None if not calibrated.
        sequences: of how many steps each run of tokens consists: steps are in order within.
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
        """[steps, experts] sums of `values` [steps, tokens, k] by expert; -inf: nobody chose it."""
        steps = self.ids.shape[0]
        flat = self.ids.flatten(1)
        zero = torch.zeros(steps, self.experts, dtype=torch.float64)
        total = zero.scatter_add(1, flat, values.double().flatten(1))
        wanted = zero.scatter_add(1, flat, torch.ones_like(flat, dtype=torch.float64)) > 0
        return torch.where(wanted, total, -torch.inf)

    def best(self, value: Tensor, most: int, devices: int | None = None) -> Tensor:
        """[steps, experts] bool: on each device the `most` of largest `value` [steps, experts]."""
        by_device = value[:, self.order].view(len(value), devices or self.devices, -1)
        rank = by_device.argsort(dim=2, descending=True, stable=True).argsort(dim=2)
        best = ((rank < most) & (by_device > -torch.inf)).flatten(1)
        return torch.zeros_like(best).index_copy(1, self.order, best)

    def most_of_a_device(self, table: Tensor) -> Tensor:
        """[steps] how many of `table` [steps, experts] bool the device with most has."""
        return table[:, self.order].view(len(table), self.devices, -1).sum(2).amax(1)


@dataclass
class Chosen:
    """What is computed: [steps, tokens, slots] ids and weights, `experts` where nothing is."""

    ids: Tensor
    weights: Tensor
    dropped: Tensor = field(default_factory=lambda: torch.zeros(0))  # [steps, tokens, k] bool


Rule = Callable[[Step], Chosen]


def keep_read(step: Step, read: Tensor, renormalize: bool = False) -> Chosen:
    """The model's choice without assignments of experts that are not read."""
    kept = read.gather(1, step.ids.flatten(1)).view(step.ids.shape)
    weights = torch.where(kept, step.weights, 0)
    if renormalize:
        now, former = weights.sum(2, keepdim=True), step.weights.sum(2, keepdim=True)
        weights = torch.where(now > 0, weights * former / now.clamp(min=1e-30), weights)
    return Chosen(torch.where(kept, step.ids, step.experts), weights, ~kept)


# -- how to choose the experts a device reads ------------------------------------------------------


def by_weight(step: Step) -> Tensor:
    """Paceline's: the sum of combine weights."""
    return step.sums(step.weights)


def by_votes(step: Step) -> Tensor:
    """How many tokens chose it, ties by weight."""
    weight = step.sums(step.weights)
    return step.sums(torch.ones_like(step.weights)) + weight.clamp(min=0) * 1e-3


def by_first_votes(step: Step) -> Tensor:
    """How many tokens chose it first, ties by weight."""
    first = torch.zeros_like(step.weights)
    first[..., 0] = 1
    return step.sums(first) + step.sums(step.weights).clamp(min=0) * 1e-3


def by_largest_weight(step: Step) -> Tensor:
    """The largest single weight, so that nobody loses a choice that matters much to it."""
    steps = step.ids.shape[0]
    value = torch.full((steps, step.experts), -torch.inf, dtype=torch.float64)
    return value.scatter_reduce(1, step.ids.flatten(1), step.weights.double().flatten(1), "amax")


def by_squared_weight(step: Step) -> Tensor:
    """The sum of squared weights: between the sum and the largest."""
    return step.sums(step.weights.double() ** 2)


def by_contribution(step: Step) -> Tensor:
    """The sum of weights times the calibrated norm of what dropping the expert leaves."""
    assert step.norms is not None
    return step.sums(step.weights) * step.norms


def at_random(step: Step) -> Tensor:
    """Any of those that are wanted: the control."""
    weight = step.sums(step.weights)
    rng = torch.Generator().manual_seed(0)
    return torch.where(
        weight > -torch.inf, torch.rand(weight.shape, generator=rng).double(), weight
    )


def narrow(
    value: Callable[[Step], Tensor],
    most: int,
    renormalize: bool = False,
    devices: int | None = None,
) -> Rule:
    """At most `most` experts a device, those of the largest value."""
    return lambda step: keep_read(step, step.best(value(step), most, devices), renormalize)


def by_layer(most: Sequence[int]) -> Rule:
    """By weight, so many experts a device as `most` [layers] says for each layer."""
    return lambda step: keep_read(step, step.best(by_weight(step), most[step.layer]))


def sticky(most: int, bonus: float) -> Rule:
    """By weight, where an expert that the last step read counts (1 + bonus) times its weight."""

    def rule(step: Step) -> Chosen:
        weight = by_weight(step)
        runs = weight.view(-1, step.sequences, step.experts)
        read, before = torch.zeros_like(runs, dtype=torch.bool), None
        for t in range(step.sequences):
            value = runs[:, t]
            if before is not None:
                value = torch.where(before, value * (1 + bonus), value)
            before = step.best(value, most)
            read[:, t] = before
        return keep_read(step, read.flatten(0, 1))

    return rule


def refilled(value: Callable[[Step], Tensor], most: int) -> Rule:
    """`narrow`, where a token's lost choices go to its best experts among those that are read."""
    return lambda step: _best_read(step, step.best(value(step), most))


# -- published ways --------------------------------------------------------------------------------


def truncated(k: int) -> Rule:
    """Every token's best k alone: blind to the batch."""

    def rule(step: Step) -> Chosen:
        kept = (torch.arange(step.ids.shape[2]) < k).expand_as(step.ids)
        ids = torch.where(kept, step.ids, step.experts)
        return Chosen(ids, torch.where(kept, step.weights, 0), ~kept)

    return rule


def opportunistic(k0: int) -> Rule:
    """OEA (Oncescu et al., arXiv 2511.02237): best k0 of every token, then others already read.

    First the union of every token's best k0 is read; then each token walks down its ranking, as far
    as there are experts, and takes those that are read until it has k. The sum of weights is what
    it was. This is the form that the paper ends with: k0 the same for all tokens, no limit of rank.
    """

    def rule(step: Step) -> Chosen:
        read = torch.zeros(len(step.ids), step.experts, dtype=torch.bool)
        read = read.scatter(1, step.ids[..., :k0].flatten(1), True)
        return _best_read(step, read)

    return rule


BINS = 5
"""Lynx' bins below the first for a router that takes one expert of eight, as here."""


def by_affinity(step: Step) -> Tensor:
    """Lynx' score of an expert: B to the power of its bin, summed over B tokens that chose it.

    An expert's bin in a token is its logit less that of the token's best, in whole nats, at least
    -BINS: what few tokens want much counts more than what many want a little. How wide a bin is,
    the paper takes from the model; a nat is our choice.
    """
    chosen = step.scores.gather(2, step.ids).double().log()
    bins = (chosen - chosen.amax(2, keepdim=True)).floor().clamp(min=-BINS)
    return step.sums(float(step.ids.shape[1]) ** bins)


def remapped(most: int) -> Rule:
    """Lynx (Gupta et al., arXiv 2411.08982v3): drop experts the batch cares least for, and remap.

    The `most` experts a device (theirs is a number for all, from the scores) with the highest
    score stay; an assignment of another goes to the token's best expert among those that stay.
    Earlier versions of the paper scored by votes.
    """
    return lambda step: _best_read(step, step.best(by_affinity(step), most))


def shared(most: int) -> Rule:
    """XShare (Vankov et al., arXiv 2602.07265), aware of devices: the most gate score in all.

    A device's `most` experts are first those that are some token's best, then those with the
    largest sum of gate scores over all tokens, chosen or not; each token takes its best k among
    them.
    """

    def rule(step: Step) -> Chosen:
        total = step.scores.double().sum(1)
        first = torch.zeros_like(total).scatter(1, step.ids[..., 0], 1.0)
        return _best_read(step, step.best(total + 1e6 * first, most))

    return rule


def _best_read(step: Step, read: Tensor) -> Chosen:
    """Every token's k best experts among those read, weights as the model's, summing up alike."""
    k = step.ids.shape[2]
    scores = step.scores.masked_fill(~read.unsqueeze(1), -torch.inf)
    best, ids = scores.topk(k, dim=2)
    there = best > -torch.inf
    weights = torch.where(there, best, 0)
    former, now = step.weights.sum(2, keepdim=True), weights.sum(2, keepdim=True)
    weights = weights * former / now.clamp(min=1e-30)
    return Chosen(torch.where(there, ids, step.experts), weights)
