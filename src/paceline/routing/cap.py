"""What survives a policy's caps: capacities or active experts, on the backend that suits."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.routing.budget import Budget
from paceline.routing.candidates import Candidates, topk_candidates
from paceline.routing.keys import KEY_BITS, descending_key
from paceline.routing.selection import backend_for
from paceline.routing.survivors import Survivors


def survivors(budget: Budget) -> Survivors:
    """What survives the policy's caps, of which one at most rules a forward."""
    policy, backend, inputs = budget.policy, backend_for(budget.inputs), budget.inputs
    expands = policy.expand is not None and policy.factor is not None
    given = backend.expanded(budget) if expands else topk_candidates(inputs, budget.num_experts)
    left = None if policy.max_active is None else backend.narrow(budget, given)
    if policy.factor is None:
        left = left or Survivors.of(given, given.offered)
    elif left is None or not backend.on_host:
        # without waiting for the device nobody knows which of the two rules: the other does nothing
        ids = given.ids if left is None else left.ids
        left = _bounded(budget, Candidates(inputs, budget.num_experts, ids, given.weights))
    if policy.renormalize:
        left = left._replace(weights=_renormalized(left, given))
    return left


def _bounded(budget: Budget, candidates: Candidates) -> Survivors:
    """What survives capacity_factor: Token Drop, or Expanded Drop where the policy expands."""
    policy, backend = budget.policy, backend_for(budget.inputs)
    if policy.expand is None:
        return backend.keep_best(budget, candidates)
    if policy.expand_rule == "compete":
        left = backend.keep_best(budget, candidates)
        if policy.max_experts is None:
            return left
        return Survivors.of(candidates, _trim(candidates, left.kept, policy.max_experts))
    if policy.max_experts is not None:
        # extras can't change which genuine ones stay: a token knows the places it has left
        genuine = backend.keep_best(budget, candidates.genuine).kept
        candidates = _best_extras(candidates, policy.max_experts - genuine.sum(1))
    return backend.keep_best(budget, candidates, fill=True)


def _best_extras(candidates: Candidates, free: Tensor) -> Candidates:
    """Offer only the `free` [tokens] best extras of each token."""
    genuine, extra = candidates.offered.tensor_split([candidates.k], dim=1)
    wanted = extra & (extra.long().cumsum(1) <= free.unsqueeze(1))
    return candidates.withdraw(torch.cat([genuine, wanted], 1))


def _trim(candidates: Candidates, kept: Tensor, max_experts: int) -> Tensor:
    """[tokens, slots] bool: a token with more than `max_experts` loses its lowest scores.

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


def _renormalized(left: Survivors, candidates: Candidates) -> Tensor:
    """[tokens, slots] weights of tokens that lost something, scaled to their former sum."""
    genuine = candidates.genuine
    lost = (genuine.offered & ~left.kept[:, : genuine.k]).any(1)
    former = torch.where(genuine.offered, genuine.weights, 0).double().sum(1)
    now = left.weights.double().sum(1)
    scaled = (left.weights.double() * (former / now).unsqueeze(1)).to(left.weights.dtype)
    usable = lost & (now > 0) & now.isfinite() & former.isfinite()
    return torch.where(usable.unsqueeze(1), scaled, left.weights)
