"""What a layer benchmark runs: experts of some shape, tokens, and a router that skews loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.bench.captured import capture
from paceline.numbers import check_count
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing import RoutingInputs


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer of SwiGLU experts, and the devices the method's paper spread them over."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    k: int
    devices: int


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("olmoe", 2048, 1024, 64, 8, 8),
        Shape("mixtral", 4096, 14336, 8, 2, 8),
        Shape("deepseek-v2-lite", 2048, 1408, 64, 6, 8),
        Shape("qwen3-30b-a3b", 2048, 768, 128, 8, 8),
        Shape("qwen1.5-moe", 2048, 1408, 60, 4, 6),
        Shape("small", 512, 256, 16, 4, 4),
        Shape("tiny", 64, 32, 8, 2, 4),
    )
}
"""Published sizes of one layer each; "small" and "tiny" are for a quick look."""

Gate = Callable[[Tensor], RoutingInputs]


@dataclass(frozen=True)
class Workload:
    """One MoE layer and what goes through it.

    Attributes:
        label: for the report.
        hidden: [tokens, hidden] of one device.
        gate: hidden -> the model's own choice.
        shape: sizes of the layer.
        origin: where the routing comes from.
    """

    label: str
    hidden: Tensor
    gate: Gate
    shape: Shape
    origin: str


def build_experts(shape: Shape, count: int, seed: int = 0) -> nn.Module:
    """`count` random experts as Transformers runs them (stacked weights, grouped matmul).

    Args:
        shape: sizes of an expert.
        count: experts that this process holds.
        seed: of the weights.
    """
    from transformers.models.olmoe.configuration_olmoe import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

    config = OlmoeConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_experts=count,
        num_experts_per_tok=1,
    )
    config._experts_implementation = "grouped_mm"
    experts: Any = OlmoeExperts(config)
    experts._is_expert_parallel = True
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in experts.parameters():
            # uniform is much quicker to draw than normal, and as good for a timing
            weight.uniform_(-0.03, 0.03, generator=rng)
    module: nn.Module = experts.eval()
    return module


def softmax_gate(weight: Tensor, bias: Tensor, k: int, renormalise: bool = False) -> Gate:
    """Softmax, then top-k, as OLMoE and Mixtral do it.

    Args:
        weight: [experts, hidden].
        bias: [experts] that skews the loads.
        k: experts a token.
        renormalise: whether the weights of a token sum to 1.
    """

    def gate(hidden: Tensor) -> RoutingInputs:
        scores = torch.softmax(nn.functional.linear(hidden, weight, bias), dim=-1)
        weights, ids = torch.topk(scores, k, dim=-1)
        if renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return RoutingInputs(topk_ids=ids, topk_weights=weights, scores=scores)

    return gate


def skewed_workload(
    shape: Shape, tokens: int, peak_to_mean: float, placement: ExpertPlacement, seed: int = 0
) -> Workload:
    """Random tokens whose busiest device gets `peak_to_mean` times the mean load.

    Experts differ in popularity by a random amount each, and those of the device with most of them
    are more popular by what makes its rows right, found by bisection.

    Args:
        shape: sizes of the layer.
        tokens: on one device.
        peak_to_mean: of the devices, at least 1.
        placement: of the experts.
        seed: of tokens, router and, with another stream, popularity.

    Raises:
        ValueError: if no router reaches `peak_to_mean` on this placement.
    """
    check_count("tokens", tokens)
    if not peak_to_mean >= 1:
        raise ValueError(f"peak_to_mean={peak_to_mean} is not allowed: it is at least 1.")
    drawn = torch.Generator().manual_seed(seed)
    hidden = torch.randn((tokens, shape.hidden), generator=drawn)
    common = torch.Generator().manual_seed(1_000_003)  # the router is the same on every rank
    weight = torch.randn((shape.experts, shape.hidden), generator=common) / shape.hidden**0.5
    popularity = 0.3 * torch.randn(shape.experts, generator=common)
    busiest = max(range(placement.num_devices), key=placement.sizes.__getitem__)
    hot = torch.tensor([device == busiest for device in placement.expert_to_device])
    sample = torch.randn((4096, shape.hidden), generator=common)
    logits = nn.functional.linear(sample, weight, popularity)

    def reached(extra: float) -> float:
        ids = torch.topk(logits + extra * hot, shape.k, dim=-1).indices
        return float(hot[ids].float().mean()) * placement.num_devices

    low, high = -8.0, 16.0
    if reached(high) < peak_to_mean:
        raise ValueError(
            f"peak_to_mean={peak_to_mean} is not possible with {shape.k} of {shape.experts} "
            f"experts a token and {placement.sizes[busiest]} experts on device {busiest}: "
            f"at most {reached(high):.2f}."
        )
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) < peak_to_mean else (low, middle)
    return Workload(
        label=f"{shape.name}, device peak-to-mean {peak_to_mean:g}",
        hidden=hidden,
        gate=softmax_gate(weight, popularity + high * hot, shape.k),
        shape=shape,
        origin=f"synthetic router, device {busiest} {peak_to_mean:g} times as busy as the mean",
    )


def model_workload(model: Any, ids: Tensor, layer: int, name: str) -> tuple[Workload, nn.Module]:
    """One layer of a model on real text: its own experts, router and inputs.

    Args:
        model: in eval mode.
        ids: [batch, length] token ids; a row is a request.
        layer: index among its MoE layers.
        name: for the report.

    Raises:
        ValueError: if the model has no such layer.
    """
    layers = capture(model, ids)
    if not 0 <= layer < len(layers):
        raise ValueError(f"layer {layer} is not allowed: the model has {len(layers)} MoE layers.")
    router, experts, hidden = layers[layer].router, layers[layer].experts, layers[layer].hidden
    given = replace(layers[layer].inputs, token_source=None)

    def gate(rows: Tensor) -> RoutingInputs:
        router(rows)
        return given

    stacked = [p for p in experts.parameters() if p.dim() == 3]
    intermediate = (
        min(d for p in stacked for d in p.shape[1:] if d != hidden.shape[1]) if stacked else 0
    )
    k, num_experts = given.topk_ids.shape[1], given.experts(None)
    shape = Shape(name, hidden.shape[1], intermediate, num_experts, k, 8)
    origin = f"{name} on real text, layer {layer}"
    return Workload(origin, hidden, gate, shape, origin), experts


Compared = CapacityPolicy | Sequence[CapacityPolicy] | None
"""A policy of a benchmark: one for all layers, one a layer, or None for no cap."""


def parse_policies(
    texts: Sequence[str],
    shares_batch: bool,
    any_load: bool = True,
    planned: Compared = None,
) -> dict[str, Any]:
    """Label -> policy, or one a layer; "none", no cap, always comes first, "plan" last.

    Where devices have a batch each and no pool is named, it is "source".

    Args:
        texts: short forms of policies.
        shares_batch: whether all devices hold the same tokens.
        any_load: cap however small a batch is, unless min_expert_load is named.
        planned: of a plan, compared under the label "plan".

    Raises:
        ValueError: on a bad policy, or one that can't be in this layout.
    """
    policies: dict[str, Any] = {"none": None}
    for text in texts:
        if text != "none":
            policy = CapacityPolicy.parse(text)
            policies[text] = _compared(policy, text, shares_batch, any_load)
    if isinstance(planned, CapacityPolicy):
        policies["plan"] = _compared(planned, "plan", shares_batch, any_load)
    elif planned is not None:
        # a layer that a plan doesn't cap is meant: only all of them would compare nothing
        caps = [policy for policy in planned if policy.caps] or list(planned)
        checked = [_compared(policy, "plan", shares_batch, any_load) for policy in caps]
        replaced = dict(zip(caps, checked, strict=True))
        each = [replaced.get(policy, policy) for policy in planned]
        policies["plan"] = each[0] if len(each) == 1 else each
    return policies


def _compared(
    policy: CapacityPolicy, text: str, shares_batch: bool, any_load: bool
) -> CapacityPolicy:
    """A policy as a benchmark means it."""
    if policy.compensate:
        raise ValueError(f"policy {text!r}: compensate is not timed here: leave it out.")
    if policy.keep == "contribution":
        raise ValueError(f"policy {text!r}: keep=contribution needs a calibration, none is here.")
    if not policy.caps or policy.mode != "enforce":
        raise ValueError(f'policy {text!r} caps nothing: use "none" for the layer without a cap.')
    if any_load and policy.min_expert_load == "auto" and policy.max_active is None:
        policy = policy.replace(min_expert_load=0)
    if not shares_batch and "pool" not in policy.model_fields_set:
        policy = policy.replace(pool="source")
    if shares_batch and (policy.pool == "source" or policy.expand == "own_device"):
        raise ValueError(
            f"policy {text!r} needs tokens that live on a device: with a shared batch they live on "
            'all; allowed is pool="batch" without expand="own_device".'
        )
    return policy
