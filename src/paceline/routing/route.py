"""Routing as a pure function: the model's choice in, a bounded assignment out."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing.assignment import Assignment
from paceline.routing.budget import Budget
from paceline.routing.candidates import Candidates, topk_candidates
from paceline.routing.inputs import RoutingInputs
from paceline.routing.kernels import operator
from paceline.routing.metrics import KEY_BITS, descending_key
from paceline.routing.selection import Kept, backend_for


def route(
    inputs: RoutingInputs, policy: CapacityPolicy, placement: ExpertPlacement | None = None
) -> Assignment:
    """Bound the load of every unit, as `policy` says (He et al., arXiv 2503.05066).

    Pure and deterministic; any device, no host sync on accelerators, output shapes that depend on
    input shapes and the policy alone. Under torch.compile it is one operator.

    Args:
        inputs: the model's choice for every token of one layer.
        policy: what to bound and what to keep.
        placement: which device hosts which expert; None: every expert is a device of its own.

    Returns:
        The assignment, [tokens, slots], with slots = k unless the policy expands.

    Raises:
        ValueError: if the policy needs an input that is missing, or its cap can never bind.
    """
    num_experts = inputs.experts(placement)
    if placement is None:
        placement = _alone(num_experts)
    check_binding(policy, placement, inputs.topk_ids.shape[1])
    budget = Budget(inputs, policy, placement)
    bounded = None
    if policy.caps:
        bounded = operator.bound(budget) if torch.compiler.is_compiling() else bound(budget)
    if bounded is not None and policy.mode == "enforce":
        shown = bounded
    else:
        chosen = topk_candidates(inputs, num_experts)
        shown = Kept.of(chosen, chosen.offered)
    return Assignment(
        topk_ids=shown.ids,
        topk_weights=shown.weights,
        kept=shown.kept,
        num_experts=num_experts,
        budget=budget,
        bounded_ids=(bounded or shown).ids,
    )


def check_binding(policy: CapacityPolicy, placement: ExpertPlacement, k: int) -> None:
    """Refuse a policy that this placement, or this many experts a token, makes meaningless.

    Raises:
        ValueError: for a device cap on one device that allows its whole load, or max_experts < k.
    """
    if not policy.caps:
        return
    assert policy.factor is not None
    if policy.unit == "device" and placement.num_devices == 1 and policy.factor >= 1:
        raise ValueError(
            f'capacity_factor={policy.capacity_factor} with unit="device" on 1 device can never '
            'bind: allowed is a factor < 1, more devices, or unit="expert".'
        )
    if policy.max_experts is not None and policy.max_experts < k:
        raise ValueError(
            f"max_experts={policy.max_experts} is not allowed: it is at least k, here {k}."
        )


def bound(budget: Budget) -> Kept:
    """What survives the cap: Token Drop, or Expanded Drop where the policy expands."""
    policy, backend = budget.policy, backend_for(budget.inputs)
    if policy.expand is None:
        candidates = topk_candidates(budget.inputs, budget.num_experts)
        kept = backend.keep_best(budget, candidates)
    else:
        candidates = backend.expanded(budget)
        if policy.expand_rule == "compete":
            kept = backend.keep_best(budget, candidates)
            if policy.max_experts is not None:
                kept = Kept.of(candidates, _trim(candidates, kept.kept, policy.max_experts))
        else:
            if policy.max_experts is not None:
                # extras can't change which genuine ones stay: a token knows the places it has left
                genuine = backend.keep_best(budget, candidates.genuine).kept
                candidates = _best_extras(candidates, policy.max_experts - genuine.sum(1))
            kept = backend.keep_best(budget, candidates, fill=True)
    if policy.renormalize:
        kept = kept._replace(weights=_renormalized(kept, candidates))
    return kept


def _best_extras(candidates: Candidates, left: Tensor) -> Candidates:
    """Offer only the `left` [tokens] best extras of each token."""
    genuine, extra = candidates.offered.tensor_split([candidates.k], dim=1)
    wanted = extra & (extra.long().cumsum(1) <= left.unsqueeze(1))
    return candidates.withdraw(torch.cat([genuine, wanted], 1))


def _trim(candidates: Candidates, selected: Tensor, max_experts: int) -> Tensor:
    """[tokens, slots] bool: a token with more than `max_experts` loses its lowest scores."""
    scores = candidates.scores
    assert scores is not None
    key = torch.where(selected, descending_key(scores), 1 << KEY_BITS)
    order = torch.sort(key, dim=1, stable=True).indices
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return selected & (rank < max_experts)


def _renormalized(kept: Kept, candidates: Candidates) -> Tensor:
    """[tokens, slots] weights of tokens that lost something, scaled to their former sum."""
    genuine = candidates.genuine
    lost = (genuine.offered & ~kept.kept[:, : genuine.k]).any(1)
    former = torch.where(genuine.offered, genuine.weights, 0).double().sum(1)
    left = kept.weights.double().sum(1)
    scaled = (kept.weights.double() * (former / left).unsqueeze(1)).to(kept.weights.dtype)
    usable = lost & (left > 0) & left.isfinite() & former.isfinite()
    return torch.where(usable.unsqueeze(1), scaled, kept.weights)


@lru_cache(maxsize=64)
def _alone(num_experts: int) -> ExpertPlacement:
    return ExpertPlacement.per_expert(num_experts)
