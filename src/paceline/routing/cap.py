"""What survives a cap: Token Drop and Expanded Drop, on the backend that suits the tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.routing.budget import Budget
from paceline.routing.candidates import Candidates, topk_candidates
from paceline.routing.keys import KEY_BITS, descending_key
from paceline.routing.selection import backend_for
from paceline.routing.survivors import Survivors


def survivors(budget: Budget) -> Survivors:
    """What survives the cap: Token Drop, or Expanded Drop where the policy expands."""
    policy, backend = budget.policy, backend_for(budget.inputs)
    if policy.expand is None:
        candidates = topk_candidates(budget.inputs, budget.num_experts)
        left = backend.keep_best(budget, candidates)
    else:
        candidates = backend.expanded(budget)
        if policy.expand_rule == "compete":
            left = backend.keep_best(budget, candidates)
            if policy.max_experts is not None:
                left = Survivors.of(candidates, _trim(candidates, left.kept, policy.max_experts))
        else:
            if policy.max_experts is not None:
                # extras can't change which genuine ones stay: a token knows the places it has left
                genuine = backend.keep_best(budget, candidates.genuine).kept
                candidates = _best_extras(candidates, policy.max_experts - genuine.sum(1))
            left = backend.keep_best(budget, candidates, fill=True)
    if policy.renormalize:
        left = left._replace(weights=_renormalized(left, candidates))
    return left


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
