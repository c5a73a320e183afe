"""Expanded Drop: before the cap a token considers further experts, the extras.

So idle capacity does useful work (He et al., arXiv 2503.05066, section 4.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing.assignment import Candidates, topk_candidates
from paceline.routing.inputs import RoutingInputs
from paceline.routing.keys import KEY_BITS, descending_key
from paceline.routing.pools import token_devices
from paceline.routing.tensors import table


def expanded_candidates(
    inputs: RoutingInputs, policy: CapacityPolicy, placement: ExpertPlacement, capped: Tensor
) -> Candidates:
    """Return the model's own choice and, for tokens that are `capped`, the allowed extras.

    An extra's weight is its score times the token's own scale, which is the sum of the weights over
    the sum of the scores of its top-k: the weight that the model would have given it.

    Args:
        inputs: with scores of all experts.
        policy: with `expand`.
        placement: of the experts.
        capped: [tokens] or [1] bool: True where the pool is capped, and so expanded.

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
    # no division by zero even where the result is not used: its gradient would be NaN
    usable = torch.where(allowed, extra_scores, 0).gather(1, best).double()
    scale = [torch.where(scalable, total, 1).unsqueeze(1) for total in (weight_sum, score_sum)]
    weights = (usable * scale[0] / scale[1]).float().to(chosen.weights.dtype)
    return Candidates(
        inputs,
        placement.num_experts,
        ids=torch.cat([chosen.only(chosen.offered).ids, ids], 1),
        weights=torch.cat([chosen.weights, weights], 1),
    )


def _candidate_ids(
    inputs: RoutingInputs, policy: CapacityPolicy, placement: ExpertPlacement, chosen: Candidates
) -> Tensor:
    """Return [tokens, candidates] ascending expert ids, num_experts for no candidate."""
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
    """Return [tokens, candidates] bool: True where an expert is among the token's own top-k."""
    rows = torch.zeros((ids.shape[0], num_experts + 1), dtype=torch.bool, device=ids.device)
    rows = rows.scatter(1, torch.where(chosen.offered, chosen.ids.long(), num_experts), True)
    return rows.gather(1, ids)


def _token_sums(chosen: Candidates) -> tuple[Tensor, Tensor]:
    """Sum the weights and the scores of each token's top-k: [tokens] float64 each."""
    scores = chosen.scores
    assert scores is not None
    weight_sum = torch.where(chosen.offered, chosen.weights, 0).double().sum(1)
    score_sum = torch.where(chosen.offered, scores, 0).double().sum(1)
    return weight_sum, score_sum


def best_extras(candidates: Candidates, free: Tensor) -> Candidates:
    """Offer only the `free` [tokens] best extras of each token."""
    genuine, extra = candidates.offered.tensor_split([candidates.k], dim=1)
    best = extra & (extra.long().cumsum(1) <= free.unsqueeze(1))
    return candidates.only(torch.cat([genuine, best], 1))


def trim(candidates: Candidates, kept: Tensor, max_experts: int) -> Tensor:
    """Drop the lowest scores of tokens with more than `max_experts`: [tokens, slots] bool kept.

    Where a pool is not capped no token has more: it has no extras there.
    """
    scores = candidates.scores
    assert scores is not None
    key = torch.where(kept, descending_key(scores), 1 << KEY_BITS)
    order = torch.sort(key, dim=1, stable=True).indices
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return kept & (rank < max_experts)
