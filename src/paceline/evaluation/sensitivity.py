"""What each layer costs when it alone is capped, and the factors of layers that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.analysis.layer_factors import between, share_bound
from paceline.batches import Sampling, check_length, make_batches
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.progress import Progress

RATIOS = (0.4, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0)
"""Factors that are tried in each layer, over that of the policy."""

_DIGITS = 4  # of a factor


@dataclass(frozen=True)
class Sensitivity:
    """What layers cost when they alone are capped.

    Attributes:
        names: of the layers.
        factors: that were tried.
        losses: [layers][factors] mean divergence of a token's next-token distribution from that of
            the model without a cap (Kullback-Leibler, nats).
        weights: [layers] what a row costs in each, any unit.
        tokens: that were run.
    """

    names: tuple[str, ...]
    factors: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    tokens: int

    def share(self, policy: CapacityPolicy) -> tuple[CapacityPolicy, ...]:
        """The policy of each layer: the policy's factor bounds their mean, weighted by cost.

        Raises:
            ValueError: if it has no factor, or one below those that were tried.

        >>> layers = Sensitivity(("a", "b"), (0.5, 1.5), ((4.0, 0.0), (1.0, 0.0)), (1.0, 1.0), 8)
        >>> [each.capacity_factor for each in layers.share(CapacityPolicy(capacity_factor=1))]
        [1.3, 0.7]
        """
        bound = bound_of(policy)
        chosen = share_bound(self.factors, self.losses, bound, self.weights)
        scale = 10**_DIGITS  # rounded down: the bound holds
        rounded = [math.floor(factor * scale + 1e-6) / scale for factor in chosen]
        return tuple(policy.replace(capacity_factor=factor) for factor in rounded)

    def to_dict(self, policy: CapacityPolicy) -> dict[str, Any]:
        """What was found, and what `share` makes of it, JSON-able."""
        bound, measured = bound_of(policy), np.array(self.factors)
        rows = zip(self.names, self.weights, self.losses, self.share(policy), strict=True)
        layers = []
        for name, weight, losses, own in rows:
            both = np.array([bound, own.capacity_factor])
            at_bound, at_factor = between(measured, np.array(losses), both).tolist()
            layers.append({
                "name": name, "weight": weight, "losses": list(losses),
                "factor": own.capacity_factor, "at_bound": at_bound, "at_factor": at_factor,
            })  # fmt: skip
        return {
            "schema": "paceline-factors/1",
            "policy": str(policy),
            "tokens": self.tokens,
            "factors": list(self.factors),
            "layers": layers,
        }


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
) -> Sensitivity:
    """Run texts with one layer capped at a time, and see how far the model's answers move.

    Args:
        model: a Mixture-of-Experts model in evaluation mode; it is restored afterwards.
        tokenizer: its tokenizer.
        texts: name -> text.
        policy: of the capped layer, with another factor each time.
        plan: where experts are, and the calibration unless it is given.
        calibration: for a policy that compensates.
        sampling: which tokens of the texts to run.
        factors: to try; None: `RATIOS` of the policy's.
        progress: told after every forward.

    Raises:
        ValueError: if the model can't follow the policy, the policy has no factor, or no batch is
            large enough for the cap to apply.
    """
    from paceline.engines.transformers import attach

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

        for batch in batches:
            base = run(None, batch.ids)
            for layer in range(count):
                for index, factor in enumerate(tried):
                    alone: list[CapacityPolicy | None] = [None] * count
                    alone[layer] = policy.replace(capacity_factor=factor)
                    sums[layer, index] += divergence(base, run(alone, batch.ids))
            if not any(layer.capped_forwards for layer in pace.stats().layers):
                raise ValueError(
                    f'the cap of "{policy}" never applied: batches of {batch.ids.numel()} tokens '
                    "are too small for its min_expert_load."
                )
        tokens = sum(batch.ids.numel() for batch in batches)
        weights = tuple(map(float, pace.row_costs()))
        names = tuple(pace.layers)
    losses = tuple(tuple(row) for row in (sums / tokens).clamp(min=0).tolist())
    return Sensitivity(names, tried, losses, weights, tokens)


def bound_of(policy: CapacityPolicy) -> float:
    """The factor that a policy gives every layer, which bounds their mean where they differ.

    Raises:
        ValueError: if it has none.

    >>> bound_of(CapacityPolicy(capacity_factor=0.75))
    0.75
    """
    if policy.capacity_factor is None:
        raise ValueError(f'the policy "{policy}" has no capacity_factor to share out over layers.')
    if policy.mode != "enforce":
        raise ValueError(f'the policy "{policy}" caps nothing: allowed is mode=enforce.')
    return policy.capacity_factor


def divergence(base: Tensor, other: Tensor) -> float:
    """Sum over tokens of the Kullback-Leibler divergence of other's distribution from base's.

    Args:
        base: [rows, tokens, vocabulary] logits.
        other: likewise.

    >>> divergence(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
    0.0
    """
    total = 0.0
    for one, two in zip(base, other, strict=True):  # row by row: little memory
        want, got = (torch.log_softmax(row.float(), -1) for row in (one, two))
        each = torch.nn.functional.kl_div(got, want, reduction="sum", log_target=True)
        total += float(each)
    return total
