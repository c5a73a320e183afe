"""A router's scoring rule, found by looking at what it does with random rows.

The gate score s[t, e] of SPEC is the model's own scoring function of the router's logits, before
top-k renormalisation and scaling. Whatever an architecture does afterwards, the weights of the
experts it chose are proportional to their scores, token by token; so the rule is the one for which
they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.engines.transformers.discovery import Site
from paceline.engines.transformers.probe import Sighting, find_logits, observe

RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda logits: F.softplus(logits).sqrt(),
    "identity": lambda logits: logits,
    "softplus": F.softplus,
    "relu": torch.relu,
    "squared_relu": lambda logits: torch.relu(logits).square(),
}
"""Scoring functions of logits [tokens, classes] float32, over all classes of the router."""


@dataclass(frozen=True, eq=False)
class Scoring:
    """How one layer's scores are computed.

    Attributes:
        rule: key of RULES; None where no rule fits, with the `reason`.
        expands: whether an extra's weight is known as well (score times the token's own scale).
        reason: why `rule` is None or `expands` is False; empty where all is well.
        num_experts: experts that have a score; the router may know further classes.
        gate: the router's linear map where logits come rounded and can be computed again in
            float32.
    """

    rule: str | None
    expands: bool
    reason: str
    num_experts: int
    gate: tuple[Tensor, Tensor | None] | None = None

    def __call__(self, router_input: Tensor, router_output: Any, ids: Tensor) -> Tensor:
        """[tokens, experts] float32 scores.

        Raises:
            RuntimeError: if the router's output has no logits for these rows.
        """
        assert self.rule is not None
        if self.gate is not None:
            weight, bias = self.gate
            rows = router_input.reshape(-1, weight.shape[1])
            logits = F.linear(rows.float(), weight.float(), None if bias is None else bias.float())
        else:
            found = find_logits(router_output, ids)
            if found is None:
                raise RuntimeError(
                    "the router returned no logits for the rows its experts were given."
                )
            logits = found.float()
        return RULES[self.rule](logits)[:, : self.num_experts]


@torch.no_grad()
def find_scoring(site: Site, sighting: Sighting, num_experts: int) -> Scoring:
    """The scoring rule of a layer, from what it did with random rows."""
    k = sighting.ids.shape[1]
    if sighting.logits is None:
        return Scoring(None, False, "its router returns no logits", num_experts)
    if float(sighting.logits.float().std(1).max()) == 0:
        return Scoring(None, False, "its router gives all experts the same logit", num_experts)
    rule = _best_rule(sighting, num_experts)
    if rule is not None and k == 1 and _constant(sighting.weights):
        # One expert with weight 1 is proportional to anything: look at two of them.
        second = _with_two(site)
        rule = None if second is None else _best_rule(second, num_experts)
        if rule is None:
            return Scoring(
                None,
                False,
                "one expert a token, always weighted alike, hides the scoring rule",
                num_experts,
            )
    gate = _gate(site, sighting)
    if rule is not None:
        return Scoring(rule, True, "", num_experts, gate)
    rule = _rule_with_expert_scale(sighting, num_experts)
    if rule is not None:
        return Scoring(
            rule,
            False,
            "its weights carry a factor of each expert, so an extra's is unknown",
            num_experts,
            gate,
        )
    return Scoring(
        None,
        False,
        "its weights are proportional to no known scoring function of its logits",
        num_experts,
    )


def _tolerance(weights: Tensor) -> float:
    return 1e-4 if weights.dtype in (torch.float32, torch.float64) else 2e-2


def _best_rule(sighting: Sighting, num_experts: int) -> str | None:
    """The rule whose scores are most nearly proportional to the weights, if any is."""
    errors = {name: _disproportion(sighting, rule, num_experts) for name, rule in RULES.items()}
    best = min(errors, key=errors.__getitem__)
    return best if errors[best] < _tolerance(sighting.weights) else None


def _chosen(
    sighting: Sighting, rule: Callable[[Tensor], Tensor], num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, k] weights, scores of the chosen experts (float64), and where both say something."""
    assert sighting.logits is not None
    scores = rule(sighting.logits.float())[:, :num_experts].double()
    inside = (sighting.ids >= 0) & (sighting.ids < num_experts)
    chosen = scores.gather(1, sighting.ids.clamp(0, num_experts - 1).long())
    weights = sighting.weights.double()
    return weights, chosen, inside & (weights != 0) & chosen.isfinite()


def _disproportion(sighting: Sighting, rule: Callable[[Tensor], Tensor], num_experts: int) -> float:
    """Largest relative spread of weight / score within a token (with k = 1, over all tokens)."""
    weights, chosen, known = _chosen(sighting, rule, num_experts)
    if not bool(known.any()) or bool((chosen[known] <= 0).any()):
        return torch.inf
    ratio = weights / torch.where(known, chosen, 1)
    if weights.shape[1] == 1:
        ratio, known = ratio.T, known.T
    high = torch.where(known, ratio, -torch.inf).amax(1)
    low = torch.where(known, ratio, torch.inf).amin(1)
    spread = (high / low - 1)[known.any(1)]
    return float(spread.max()) if bool((low[known.any(1)] > 0).all()) else torch.inf


def _rule_with_expert_scale(sighting: Sighting, num_experts: int) -> str | None:
    """The rule for which log(weight / score) is a term of the token plus a term of the expert."""
    ids = sighting.ids.long()
    if ids.shape[1] < 2 or bool((ids >= num_experts).any()):
        return None
    for name, rule in RULES.items():
        weights, chosen, known = _chosen(sighting, rule, num_experts)
        if not bool(known.all()) or bool((chosen <= 0).any()) or bool((weights <= 0).any()):
            continue
        log = (weights / chosen).log()
        onehot = F.one_hot(ids, num_experts).double()  # [rows, k, experts]
        design = (onehot[:, 1:] - onehot[:, :1]).flatten(0, 1)
        target = (log[:, 1:] - log[:, :1]).flatten()
        fit = torch.linalg.pinv(design.T @ design) @ (design.T @ target)
        # enough equations to be a test of the rule, not merely a fit of it
        if len(target) > num_experts and float((design @ fit - target).abs().max()) < _tolerance(
            sighting.weights
        ):
            return name
    return None


def _constant(weights: Tensor) -> bool:
    return float((weights - weights.flatten()[0]).abs().max()) < 1e-6


def _with_two(site: Site) -> Sighting | None:
    """The same layer, choosing two experts a token, if its router can be told to."""
    router: Any = site.router
    if getattr(router, "top_k", None) != 1:
        return None
    router.top_k = 2
    try:
        sighting = observe(site)
        return sighting if sighting.ids.shape[1] == 2 else None
    except ValueError:
        return None
    finally:
        router.top_k = 1


def _gate(site: Site, sighting: Sighting) -> tuple[Tensor, Tensor | None] | None:
    """The router's weight and bias, where its logits are rounded and are just that linear map."""
    assert sighting.logits is not None
    if sighting.logits.dtype in (torch.float32, torch.float64):
        return None
    holders = [site.router, *(m for m in site.router.modules() if isinstance(m, nn.Linear))]
    for holder in holders:
        weight, bias = getattr(holder, "weight", None), getattr(holder, "bias", None)
        if not isinstance(weight, Tensor) or weight.shape != (
            sighting.logits.shape[1],
            sighting.router_input.shape[1],
        ):
            continue
        bias = bias if isinstance(bias, Tensor) else None
        again = F.linear(
            sighting.router_input.float(), weight.float(), None if bias is None else bias.float()
        )
        error = (again - sighting.logits.float()).abs().max()
        if float(error) < 2e-2 * float(again.abs().max()):
            return weight, bias
    return None
