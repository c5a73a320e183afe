"""Scoring rules of routers: gate scores from logits, and which rule a router was seen to use.

The gate score s[t, e] is the model's own scoring function of the router's logits, before top-k
renormalisation and scaling. Whatever an architecture does afterwards, the weights of the experts
it chose are proportional to their scores, token by token; so the rule is the one for which they
are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda logits: F.softplus(logits).sqrt(),
    "identity": lambda logits: logits,
    "softplus": F.softplus,
    "relu": torch.relu,
    "squared_relu": lambda logits: torch.relu(logits).square(),
}
"""Name -> scoring function of logits [tokens, classes] float32, over all classes of the router."""

_OTHER_NAMES = {"sqrtsoftplus": "sqrt_softplus"}


def rule_named(name: str | None) -> str | None:
    """Return the key of `RULES` for a name that a model or an engine uses, None if there is none.

    >>> rule_named("sqrtsoftplus")
    'sqrt_softplus'
    """
    name = _OTHER_NAMES.get(name or "", name)
    return name if name in RULES else None


def find_rule(
    logits: Tensor, ids: Tensor, weights: Tensor, num_experts: int
) -> tuple[str | None, bool]:
    """Return the scoring rule that explains a router's choice, and whether it tells all weights.

    Args:
        logits: [rows, classes] of the router; classes >= num_experts.
        ids: [rows, k] chosen experts.
        weights: [rows, k] their weights.
        num_experts: experts that have a score.

    Returns:
        A key of `RULES`, None where no rule explains the weights; and True if a weight is score
        times a scale of the token, False if each expert has a factor of its own as well, so that
        the weight of an expert that was not chosen is unknown.
    """
    tolerance = 1e-4 if weights.dtype in (torch.float32, torch.float64) else 2e-2
    weights = weights.double()
    errors = {}
    for name, rule in RULES.items():
        chosen, known = _chosen(rule, logits, ids, weights, num_experts)
        errors[name] = _disproportion(weights, chosen, known)
    best = min(errors, key=errors.__getitem__)
    if errors[best] < tolerance:
        return best, True
    if ids.shape[1] < 2 or bool((ids >= num_experts).any()):
        return None, False
    for name, rule in RULES.items():
        chosen, known = _chosen(rule, logits, ids, weights, num_experts)
        if not bool(known.all()) or bool((chosen <= 0).any()) or bool((weights <= 0).any()):
            continue
        if _has_expert_factors((weights / chosen).log(), ids, num_experts, tolerance):
            return name, False
    return None, False


def _chosen(
    rule: Callable[[Tensor], Tensor], logits: Tensor, ids: Tensor, weights: Tensor, num_experts: int
) -> tuple[Tensor, Tensor]:
    """Return [rows, k] float64 scores of the chosen experts, and where they can be compared."""
    scores = rule(logits.float())[:, :num_experts].double()
    inside = (ids >= 0) & (ids < num_experts)
    chosen = scores.gather(1, ids.clamp(0, num_experts - 1).long())
    return chosen, inside & (weights != 0) & chosen.isfinite()


def _disproportion(weights: Tensor, chosen: Tensor, known: Tensor) -> float:
    """Return the largest spread of weight / score within a token (with k = 1, over all tokens)."""
    if not bool(known.any()) or bool((chosen[known] <= 0).any()):
        return torch.inf
    ratio = weights / torch.where(known, chosen, 1)
    if weights.shape[1] == 1:
        ratio, known = ratio.T, known.T
    high = torch.where(known, ratio, -torch.inf).amax(1)
    low = torch.where(known, ratio, torch.inf).amin(1)
    spread = (high / low - 1)[known.any(1)]
    return float(spread.max()) if bool((low[known.any(1)] > 0).all()) else torch.inf


def _has_expert_factors(log: Tensor, ids: Tensor, num_experts: int, tolerance: float) -> bool:
    """Return True if log(weight / score) is a term of the token plus a term of the expert."""
    onehot = F.one_hot(ids.long(), num_experts).double()  # [rows, k, experts]
    design = (onehot[:, 1:] - onehot[:, :1]).flatten(0, 1)
    target = (log[:, 1:] - log[:, :1]).flatten()
    fit = torch.linalg.pinv(design.T @ design) @ (design.T @ target)
    # enough equations to be a test of the rule, not merely a fit of it
    return len(target) > num_experts and float((design @ fit - target).abs().max()) < tolerance
