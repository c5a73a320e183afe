"""The assignments a token may have: its top-k, and with expansion further experts.

Expanded Drop (He et al., arXiv 2503.05066, section 4.3): before the cap, a token considers
further experts, so that idle capacity does useful work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing.constants import table
from paceline.routing.inputs import RoutingInputs
from paceline.routing.keys import KEY_BITS, descending_key
from paceline.routing.lazy import lazy
from paceline.routing.pools import token_devices


class Candidates:
    """Assignments that compete for capacity: slots 0..k-1 genuine, then the extras, best first.

    Attributes:
        inputs: of the layer.
        num_experts: experts of the layer, E.
        ids: [tokens, slots] any integer dtype; outside [0, E): no assignment.
        weights: [tokens, slots] combine weights.
    """

    def __init__(self, inputs: RoutingInputs, num_experts: int, ids: Tensor, weights: Tensor):
        self.inputs, self.num_experts, self.ids, self.weights = inputs, num_experts, ids, weights
        self.k = inputs.topk_ids.shape[1]

    @lazy
    def offered(self) -> Tensor:
        """[tokens, slots] bool: an assignment (in range, of a valid token)."""
        in_range = (self.ids >= 0) & (self.ids < self.num_experts)
        valid = self.inputs.valid
        return in_range if valid is None else in_range & valid.unsqueeze(1)

    @lazy
    def safe_ids(self) -> Tensor:
        """[tokens, slots] int64 in [0, E), 0 where nothing is offered."""
        return torch.where(self.offered, self.ids.long(), 0)

    @property
    def scores(self) -> Tensor | None:
        """[tokens, slots] float32 gate scores, None where none are known; gathered anew."""
        if self.inputs.scores is not None:
            return self.inputs.scores.gather(1, self.safe_ids).float()
        return None if self.inputs.topk_scores is None else self.inputs.topk_scores.float()

    @property
    def genuine(self) -> Candidates:
        """The first k slots alone."""
        ids, weights = self.ids[:, : self.k], self.weights[:, : self.k]
        return Candidates(self.inputs, self.num_experts, ids, weights)

    def withdraw(self, keep: Tensor) -> Candidates:
        """Offer only what is in `keep`, [tokens, slots] bool."""
        ids = torch.where(keep, self.ids.long(), self.num_experts)
        return Candidates(self.inputs, self.num_experts, ids, self.weights)


def topk_candidates(inputs: RoutingInputs, num_experts: int) -> Candidates:
    """The model's own choice."""
    return Candidates(inputs, num_experts, inputs.topk_ids, inputs.topk_weights)


def expanded_candidates(
    inputs: RoutingInputs, policy: CapacityPolicy, placement: ExpertPlacement, capped: Tensor
) -> Candidates:
    """The model's own choice and, for tokens that are `capped`, the extras the policy allows.

    An extra's weight is its score times the token's own scale, the sum of the weights over the
    sum of the scores of its top-k: what the model would have given it.

    Args:
        inputs: with scores of all experts.
        policy: with `expand`.
        placement: of the experts.
        capped: [tokens] or [1] bool: whose pool is capped, and so expanded.

    Raises:
        ValueError: if scores of all experts, or sources that `expand` needs, are missing.
    """
    chosen = topk_candidates(inputs, placement.num_experts)
    if inputs.scores is None:
        raise ValueError(f"expand={policy.expand!r} needs scores of all experts.")
    scores = inputs.scores.float()
    ids = _candidate_ids(inputs, policy, placement, chosen)
    safe_ids = ids.clamp(max=placement.num_experts - 1)
    extra_scores = scores.gather(1, safe_ids)

    weight_sum, score_sum = _token_sums(chosen)
    scalable = (weight_sum > 0) & (score_sum > 0)
    scalable &= weight_sum.isfinite() & score_sum.isfinite()
    allowed = (
        (ids < placement.num_experts)
        & ~extra_scores.isnan()
        & (extra_scores != -torch.inf)
        & (scalable & capped).unsqueeze(1)
        & ~_is_chosen(ids, chosen, placement.num_experts)
    )
    if inputs.valid is not None:
        allowed = allowed & inputs.valid.unsqueeze(1)

    # ids ascend in a row, so a stable sort sends ties to the smaller expert
    key = torch.where(allowed, descending_key(extra_scores), 1 << KEY_BITS)
    limit = min(ids.shape[1], policy.expand_limit or ids.shape[1])
    best = torch.sort(key, dim=1, stable=True).indices[:, :limit]
    ids = torch.where(allowed, ids, placement.num_experts).gather(1, best)
    weighed = extra_scores.gather(1, best).double() * weight_sum.unsqueeze(1)
    weights = (weighed / score_sum.unsqueeze(1)).float().to(chosen.weights.dtype)
    return Candidates(
        inputs,
        placement.num_experts,
        ids=torch.cat([chosen.withdraw(chosen.offered).ids, ids], 1),
        weights=torch.cat([chosen.weights, weights], 1),
    )


def _candidate_ids(
    inputs: RoutingInputs, policy: CapacityPolicy, placement: ExpertPlacement, chosen: Candidates
) -> Tensor:
    """[tokens, candidates] ascending expert ids, num_experts where there is no candidate."""
    device, num_experts = chosen.ids.device, placement.num_experts
    largest = max(placement.sizes)
    if policy.expand == "own_device":
        rows = [placement.experts_of(d) for d in range(placement.num_devices)]
        padded = tuple((*row, *[num_experts] * (largest - len(row))) for row in rows)
        own = token_devices(inputs, placement.num_devices, 'expand="own_device"')
        return table(padded, chosen.ids)[own]
    every = torch.arange(num_experts, device=device).expand(chosen.ids.shape[0], -1)
    if policy.expand == "all":
        return every
    device_of = table((*placement.expert_to_device, placement.num_devices), chosen.ids)
    visited = torch.zeros(
        (chosen.ids.shape[0], placement.num_devices + 1), dtype=torch.bool, device=device
    )
    chosen_devices = device_of[torch.where(chosen.offered, chosen.ids.long(), num_experts)]
    visited = visited.scatter(1, chosen_devices, True)
    reachable = torch.where(visited[:, device_of[:-1]], every, num_experts)
    return torch.sort(reachable, dim=1).values[:, : min(num_experts, chosen.k * largest)]


def _is_chosen(ids: Tensor, chosen: Candidates, num_experts: int) -> Tensor:
    """[tokens, candidates] whether an expert is among the token's own top-k."""
    rows = torch.zeros((ids.shape[0], num_experts + 1), dtype=torch.bool, device=ids.device)
    rows = rows.scatter(1, torch.where(chosen.offered, chosen.ids.long(), num_experts), True)
    return rows.gather(1, ids)


def _token_sums(chosen: Candidates) -> tuple[Tensor, Tensor]:
    """[tokens] float64 sums of the weights and of the scores of a token's top-k."""
    scores = chosen.scores
    assert scores is not None
    weight_sum = torch.where(chosen.offered, chosen.weights, 0).double().sum(1)
    score_sum = torch.where(chosen.offered, scores, 0).double().sum(1)
    return weight_sum, score_sum
