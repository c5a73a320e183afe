"""A router's scoring rule, found by looking at what it does with random rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.engines.scoring import RULES, find_rule
from paceline.engines.transformers.layers.modules import LayerModules
from paceline.engines.transformers.layers.probe import Probe, logits_of, probe


@dataclass(frozen=True, eq=False)
class Scoring:
    """How one layer's scores are computed.

    Attributes:
        rule: key of RULES; None where no rule fits, with the `reason`.
        expands: whether an extra's weight is known as well (score times the token's own scale).
        reason: why `rule` is None or `expands` is False; empty where all is well.
        num_experts: experts that have a score; the router may know further classes.
        logits_at: where the logits are among the tensors of the router's output.
        linear: the router's linear map, where logits are just that: they may come rounded.
    """

    rule: str | None
    expands: bool
    reason: str
    num_experts: int
    logits_at: int = 0
    linear: RouterLinear | None = None

    def __call__(self, router_input: Tensor, router_output: Any, rows: int) -> Tensor:
        """[tokens, experts] float32 scores of what the router said.

        Raises:
            RuntimeError: if the router's output has no logits for these rows.
        """
        assert self.rule is not None
        logits = logits_of(router_output, self.logits_at, rows)
        if logits is None:
            raise RuntimeError("the router returned no logits for the rows its experts were given.")
        if self.linear is not None:
            logits = self.linear.unrounded(router_input, logits)
        return RULES[self.rule](logits.float())[:, : self.num_experts]


@dataclass(frozen=True, eq=False)
class RouterLinear:
    """A router's linear map whose logits come rounded to half precision: rounding makes false ties.

    The logits are computed again in float32 only while the map is what it was when it was found:
    an adapter or a wrapper changes what the router says, and that is what counts.

    Attributes:
        modules: of the layer.
        router: that the layer had.
        holder: of the weight [classes, hidden]: the router, or its only part that has any.
        name: of the holder within the router; empty: it is the router.
    """

    modules: LayerModules
    router: nn.Module
    holder: nn.Module
    name: str

    def unrounded(self, router_input: Tensor, logits: Tensor) -> Tensor:
        """[rows, classes] float32 logits; a row that doesn't follow from the map stays as it is."""
        if logits.element_size() > 2 or not self._unchanged():
            return logits
        again = self._again(router_input)
        near = _within_rounding(again, logits).all(1, keepdim=True)
        return torch.where(near, again, logits.float())

    def follows(self, router_input: Tensor, logits: Tensor) -> bool:
        """Whether these logits are just this map of this input."""
        return bool(_within_rounding(self._again(router_input), logits).all())

    def _again(self, router_input: Tensor) -> Tensor:
        weight, bias = self.holder.weight, getattr(self.holder, "bias", None)
        assert isinstance(weight, Tensor)
        rows = router_input.reshape(-1, weight.shape[1])
        bias = bias if isinstance(bias, Tensor) else None
        kind = weight.device.type
        if torch.is_autocast_enabled(kind):  # as the router was given them
            low = torch.get_autocast_dtype(kind)
            rows, weight = rows.to(low), weight.to(low)
            bias = None if bias is None else bias.to(low)
        with torch.autocast(kind, enabled=False):  # it would round what comes out
            return F.linear(rows.float(), weight.float(), None if bias is None else bias.float())

    def _unchanged(self) -> bool:
        """Whether the layer's router is still this one, and nothing was put on its weight."""
        if self.modules.router is not self.router:
            return False
        if self.name and self.router.get_submodule(self.name) is not self.holder:
            return False
        # a parametrised weight is computed anew at every look
        return "weight" in self.holder._parameters


def _within_rounding(exact: Tensor, rounded: Tensor) -> Tensor:
    """[rows, classes] bool: whether `rounded` is `exact` in the precision that it came in."""
    step = max(torch.finfo(rounded.dtype).eps, 1e-4)  # float32 sums differ by their order
    rounded = rounded.float()
    scale = rounded.abs() + 0.05 * rounded.abs().amax(1, keepdim=True)
    return (exact - rounded).abs() <= step * scale


@torch.no_grad()
def find_scoring(modules: LayerModules, found: Probe, num_experts: int) -> Scoring:
    """The scoring rule of a layer, from what it did with random rows."""

    def unknown(reason: str) -> Scoring:
        return Scoring(None, False, reason, num_experts)

    if found.logits is None:
        return unknown("its router returns no logits")
    if float(found.logits.float().std(1).max()) == 0:
        return unknown("its router gives all experts the same logit")
    judged = found
    if found.ids.shape[1] == 1 and _constant(found.weights):
        # one expert with weight 1 is proportional to anything: look at two of them
        two = _with_two(modules)
        if two is None:
            return unknown("one expert per token, always weighted alike, hides the scoring rule")
        judged = two
    assert judged.logits is not None
    rule, expands = find_rule(judged.logits, judged.ids, judged.weights, num_experts)
    if rule is None:
        return unknown("its weights are proportional to no known scoring function of its logits")
    reason = "its weights carry a factor of each expert, so an extra's is unknown"
    linear = _linear(modules, found)
    return Scoring(rule, expands, "" if expands else reason, num_experts, found.logits_at, linear)


def _constant(weights: Tensor) -> bool:
    return float((weights - weights.flatten()[0]).abs().max()) < 1e-6


_TOP_K_NAMES = ("top_k", "num_experts_per_tok", "k", "topk", "moe_top_k")


def _with_two(modules: LayerModules) -> Probe | None:
    """The same layer, choosing two experts a token, if its router or block can be told to."""
    for holder in (modules.router, modules.block):
        for name in _TOP_K_NAMES:
            former = holder.__dict__.get(name)
            if former != 1 or isinstance(former, bool):
                continue
            setattr(holder, name, 2)
            try:
                found = probe(modules)
                if found.ids.shape[1] == 2:
                    return found
            except ValueError:
                pass
            finally:
                setattr(holder, name, former)
    return None


def _linear(modules: LayerModules, found: Probe) -> RouterLinear | None:
    """The router's weight and bias, where its logits are just that linear map, rounded or not.

    A model that is in float32 now may be moved to half precision while it is attached.
    """
    logits, router = found.logits, modules.router
    assert logits is not None
    matrices = [
        (name, module)
        for name, module in router.named_modules()
        for p in module.parameters(recurse=False)
        if p.dim() > 1
    ]
    if len(matrices) != 1:  # none, or an adapter's beside it
        return None
    name, holder = matrices[0]
    weight = holder._parameters.get("weight")
    if weight is None or weight.shape != (logits.shape[1], found.router_input.shape[1]):
        return None
    linear = RouterLinear(modules, router, holder, name)
    return linear if linear.follows(found.router_input, logits) else None
