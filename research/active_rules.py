"""Other ways to read fewer experts in a decode step: variants of Paceline's rule, published ones.

    python research/active_rules.py --json research/results/active_rules.json

Judged as benchmarks/active_experts.py judges Paceline's rule. The published ones are rebuilt from
their papers' words, not from their code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from active_experts import GOAL, Trial, main
from decode_steps import Chosen, Rule, Step, at_most, by_weight, keep_read

# -- values of experts -----------------------------------------------------------------------------


def by_votes(step: Step) -> Tensor:
    """Score an expert by the tokens that chose it, ties by weight."""
    weight = step.sums(step.weights)
    return step.sums(torch.ones_like(step.weights)) + weight.clamp(min=0) * 1e-3


def by_first_votes(step: Step) -> Tensor:
    """Score an expert by the tokens that chose it first, ties by weight."""
    first = torch.zeros_like(step.weights)
    first[..., 0] = 1
    return step.sums(first) + step.sums(step.weights).clamp(min=0) * 1e-3


def by_largest_weight(step: Step) -> Tensor:
    """Score an expert by its largest single weight, so that no token loses its main choice."""
    steps = step.ids.shape[0]
    value = torch.full((steps, step.experts), -torch.inf, dtype=torch.float64)
    return value.scatter_reduce(1, step.ids.flatten(1), step.weights.double().flatten(1), "amax")


def by_squared_weight(step: Step) -> Tensor:
    """Score an expert by its sum of squared weights: between the sum and the largest."""
    return step.sums(step.weights.double() ** 2)


def by_contribution(step: Step) -> Tensor:
    """Score an expert by its sum of weights times the norm of the error of dropping it."""
    assert step.norms is not None
    return step.sums(step.weights) * step.norms


def at_random(step: Step) -> Tensor:
    """Score the chosen experts at random: the control."""
    weight = step.sums(step.weights)
    rng = torch.Generator().manual_seed(0)
    return torch.where(
        weight > -torch.inf, torch.rand(weight.shape, generator=rng).double(), weight
    )


def sticky(most: int, bonus: float) -> Rule:
    """Read by weight, where an expert that the last step read counts (1 + bonus) times."""

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
    """Read by value, and give a token's lost choices to its best experts among those read."""
    return lambda step: _best_read(step, step.best(value(step), most))


# -- published ways --------------------------------------------------------------------------------


def truncated(k: int) -> Rule:
    """Keep every token's best k alone: blind to the batch."""

    def rule(step: Step) -> Chosen:
        kept = (torch.arange(step.ids.shape[2]) < k).expand_as(step.ids)
        ids = torch.where(kept, step.ids, step.experts)
        return Chosen(ids, torch.where(kept, step.weights, 0), ~kept)

    return rule


def opportunistic(k0: int) -> Rule:
    """Read as OEA (Oncescu et al., arXiv 2511.02237): best k0 of every token, then others read.

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
    """Score an expert as Lynx: B to the power of its bin, summed over B tokens that chose it.

    An expert's bin in a token is its logit less that of the token's best, in whole nats, at least
    -BINS: a strong choice of few tokens counts more than a weak one of many. The paper takes the
    width of a bin from the model; a nat is our choice.
    """
    chosen = step.scores.gather(2, step.ids).double().log()
    bins = (chosen - chosen.amax(2, keepdim=True)).floor().clamp(min=-BINS)
    return step.sums(float(step.ids.shape[1]) ** bins)


def remapped(most: int) -> Rule:
    """Replace as Lynx (Gupta et al., arXiv 2411.08982v3): drop the experts of least score.

    The `most` experts per device (theirs is a number for all, from the scores) with the highest
    score stay; an assignment of another goes to the token's best expert among those that stay.
    Earlier versions of the paper scored by votes.
    """
    return lambda step: _best_read(step, step.best(by_affinity(step), most))


def shared(most: int) -> Rule:
    """Read as XShare (Vankov et al., arXiv 2602.07265), per device: the most gate score in all.

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
    """Take every token's k best experts among those read, with the model's sum of weights."""
    k = step.ids.shape[2]
    scores = step.scores.masked_fill(~read.unsqueeze(1), -torch.inf)
    best, ids = scores.topk(k, dim=2)
    there = best > -torch.inf
    weights = torch.where(there, best, 0)
    former, now = step.weights.sum(2, keepdim=True), weights.sum(2, keepdim=True)
    weights = weights * former / now.clamp(min=1e-30)
    return Chosen(torch.where(there, ids, step.experts), weights)


# -- trials ----------------------------------------------------------------------------------------

VALUES: dict[str, Callable[[Step], Tensor]] = {
    "votes": by_votes,
    "first votes": by_first_votes,
    "largest weight": by_largest_weight,
    "squared weight": by_squared_weight,
    "contribution": by_contribution,
    "random": at_random,
}
ONE_DOMAIN = ("by random", "by votes", "by first votes", "sticky")
"""Families that are judged on batches of one domain alone."""


def trials(batch: int, kind: str) -> Iterator[Trial]:
    """Iterate over family, its setting, the rule, and True with stand-ins."""
    for trial in _all_trials(GOAL[batch]):
        if kind == "one domain" or trial[0] not in ONE_DOMAIN:
            yield trial


def _all_trials(goal: int) -> Iterator[Trial]:
    for name, value in VALUES.items():
        yield f"by {name}", {"most": goal}, at_most(value, goal), False
    for name in ("largest weight", "squared weight", "contribution"):
        yield f"by {name}", {"most": goal}, at_most(VALUES[name], goal), True
    yield "refilled", {"most": goal}, refilled(by_weight, goal), False
    for bonus in (0.25, 1.0):
        yield "sticky", {"most": goal, "bonus": bonus}, sticky(goal, bonus), True
    for stand_ins in (False, True):
        rule = at_most(by_weight, goal, renormalize=True)
        yield "renormalized", {"most": goal}, rule, stand_ins
    for k in (3, 2, 1):
        yield "top-k truncation", {"k": k}, truncated(k), False
        yield "OEA", {"k0": k}, opportunistic(k), False
        yield "Lynx", {"most": k}, remapped(k), False
        yield "XShare", {"most": k}, shared(k), False


if __name__ == "__main__":
    main(trials)
