"""Workloads of a layer benchmark: experts, tokens, and synthetic, recorded or real routing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.engines.transformers import attach
from paceline.engines.transformers.layers.find import find_layers
from paceline.facts import Facts
from paceline.numbers import check_count
from paceline.placement import ExpertPlacement
from paceline.routing import Assignment, RoutingInputs
from paceline.traces import ImportOptions, open_trace
from paceline.traces.chunk import joined


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


def named_shape(name: str) -> Shape:
    """Return one of `SHAPES`, or a shape of five numbers: hidden,intermediate,experts,k,devices.

    Raises:
        ValueError: if it is neither.
    """
    if name in SHAPES:
        return SHAPES[name]
    parts = name.split(",")
    if len(parts) == 5 and all(part.strip().isdigit() and int(part) > 0 for part in parts):
        hidden, intermediate, experts, k, devices = map(int, parts)
        if k <= experts and devices <= experts:
            return Shape(name, hidden, intermediate, experts, k, devices)
    raise ValueError(
        f"shape must be one of {', '.join(SHAPES)}, or hidden,intermediate,experts,k,devices with "
        f"k and devices at most experts, got {name!r}."
    )


Gate = Callable[[Tensor], RoutingInputs]


@dataclass(frozen=True)
class Workload:
    """One MoE layer and the tokens that go through it.

    Attributes:
        hidden: [tokens, hidden] of one device.
        gate: hidden -> the model's own choice.
    """

    label: str
    hidden: Tensor
    gate: Gate
    shape: Shape
    origin: str


def build_experts(shape: Shape, count: int, seed: int = 0) -> nn.Module:
    """Build `count` random experts as Transformers runs them (stacked weights, grouped matmul)."""
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


def softmax_gate(weight: Tensor, bias: Tensor, k: int) -> Gate:
    """Build a gate of softmax, then top-k, as OLMoE has it.

    Args:
        weight: [experts, hidden].
        bias: [experts] that skews the loads.
    """

    def gate(hidden: Tensor) -> RoutingInputs:
        scores = torch.softmax(nn.functional.linear(hidden, weight, bias), dim=-1)
        weights, ids = torch.topk(scores, k, dim=-1)
        return RoutingInputs(topk_ids=ids, topk_weights=weights, scores=scores)

    return gate


def skewed_workload(
    shape: Shape, tokens: int, peak_to_mean: float, placement: ExpertPlacement, seed: int = 0
) -> Workload:
    """Draw random tokens whose busiest device gets `peak_to_mean` times the mean load.

    Experts differ in popularity by a random amount each, and those of the device that hosts most
    are more popular by the amount that makes its rows right, found by bisection.

    Args:
        tokens: on one device.
        peak_to_mean: of the devices, at least 1.
        seed: of the tokens; the router is the same for all seeds.

    Raises:
        ValueError: if no router reaches `peak_to_mean` on this placement.
    """
    check_count("tokens", tokens)
    if not peak_to_mean >= 1:
        raise ValueError(f"peak_to_mean must be at least 1, got {peak_to_mean}.")
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
            f"experts per token and {placement.sizes[busiest]} experts on device {busiest}: "
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
    """Take one layer of a model on real text: its own experts, router and inputs.

    Args:
        model: in eval mode.
        ids: [batch, length] token ids; a row is a request.
        layer: index among its MoE layers.

    Raises:
        ValueError: if the model has no such layer.
    """
    layers = capture(model, ids)
    if not 0 <= layer < len(layers):
        raise ValueError(f"layer must be one of the {len(layers)} MoE layers, got {layer}.")
    router, experts, hidden = layers[layer].router, layers[layer].experts, layers[layer].hidden
    choice = replace(layers[layer].inputs, token_source=None)

    def gate(rows: Tensor) -> RoutingInputs:
        router(rows)
        return choice

    stacked = [p for p in experts.parameters() if p.dim() == 3]
    intermediate = (
        min(d for p in stacked for d in p.shape[1:] if d != hidden.shape[1]) if stacked else 0
    )
    k, num_experts = choice.topk_ids.shape[1], choice.experts(None)
    shape = Shape(name, hidden.shape[1], intermediate, num_experts, k, 8)
    origin = f"{name} on real text, layer {layer}"
    return Workload(origin, hidden, gate, shape, origin), experts


def trace_workload(path: Path, shape: Shape, layer: int, tokens: int, offset: int = 0) -> Workload:
    """Take routing recorded from a model: a trace, or a file of another program (docs/traces.md).

    Rows without experts are padding. All batches are taken as one row after the other.

    Args:
        path: of the file or folder, or "sample:NAME".
        shape: sizes of the experts to run; experts and k must be those of the trace.
        tokens: how many rows, padding included, repeated where the trace has fewer.
        offset: row to start at, so that devices differ.

    Raises:
        ValueError: if the file is no such trace or doesn't fit the shape.
    """
    recorded = _recorded(path, shape, layer)
    rows = (torch.arange(tokens) + offset) % len(recorded.topk_ids)
    chosen = recorded.topk_ids[rows].long()
    kept = chosen < shape.experts
    scores = recorded.topk_weights if recorded.topk_scores is None else recorded.topk_scores

    def some(fact: Tensor | None) -> Tensor | None:
        return None if fact is None else fact[rows]

    choice = replace(
        recorded,
        topk_ids=chosen,
        topk_weights=recorded.topk_weights[rows].float().masked_fill(~kept, 0),
        topk_scores=scores[rows].float().masked_fill(~kept, 0),
        valid=some(recorded.valid),
        token_request=some(recorded.token_request),
        # the benchmark itself decides where tokens live, and has no phases
        scores=None, token_source=None, token_priority=None, token_decode=None, layer=layer,
    )  # fmt: skip
    weight = torch.zeros((shape.experts, shape.hidden))
    compute = softmax_gate(weight, torch.zeros(shape.experts), shape.k)

    def gate(hidden: Tensor) -> RoutingInputs:
        compute(hidden)  # costs what a gate costs; the choice is the recorded one
        return choice

    return Workload(
        label=f"{shape.name}, {path.name} layer {layer}",
        hidden=torch.randn((tokens, shape.hidden), generator=torch.Generator().manual_seed(0)),
        gate=gate,
        shape=shape,
        origin=f"recorded routing, {path.name}, layer {layer}",
    )


def _recorded(path: Path, shape: Shape, layer: int) -> RoutingInputs:
    """Read the whole routing of one layer."""
    trace = open_trace(path, ImportOptions(experts=shape.experts, k=shape.k))
    header = trace.header
    if not header.per_token:
        raise ValueError(f"trace {path} holds {header.content}, not what each token chose.")
    if layer >= len(header.layers):
        raise ValueError(
            f"layer must be below {len(header.layers)}, the layers of trace {path}, got {layer}."
        )
    own = header.layers[layer]
    if (own.experts, own.k) != (shape.experts, shape.k):
        raise ValueError(
            f"trace {path} has {own.experts} experts and k={own.k}: shape {shape.name} has "
            f"{shape.experts} and k={shape.k}."
        )
    one_layer = trace.select_layers([layer])
    whole = joined(list(one_layer.chunks))
    if whole.weights is None:
        raise ValueError(f"trace {path} holds no weights, which the experts' outputs need.")
    return whole.inputs_of_rows(one_layer.header, 0, 0, whole.tokens)


def token_rows(tokenizer: Any, texts: Iterable[str], tokens: int, length: int = 256) -> Tensor:
    """Return at least `tokens` token ids of texts in rows, repeated where the texts are too short.

    Returns:
        [sequences, length] int64.
    """
    ids = [i for text in texts for i in tokenizer(text)["input_ids"]]
    count = -(-tokens // length) * length
    return torch.tensor((ids * -(-count // max(1, len(ids))))[:count]).view(-1, length)


@dataclass(frozen=True)
class Captured:
    """One layer in one forward.

    Attributes:
        hidden: input of the experts, [tokens, hidden].
        inputs: the model's choice, with all scores where the router's rule is known, the request
            of each token (its row of the batch) and the device that it is on.
    """

    name: str
    router: nn.Module
    experts: nn.Module
    hidden: Tensor
    inputs: RoutingInputs


def capture(model: Any, ids: Tensor, devices: int = 1) -> list[Captured]:
    """Run a model on [batch, length] token ids; row i of B is on device i * devices // B.

    Raises:
        ValueError: if the model has no MoE layer, or one that can't be handled.
    """
    chosen: dict[str, RoutingInputs] = {}
    hidden_of: dict[str, Tensor] = {}

    def note(name: str, inputs: RoutingInputs, assignment: Assignment) -> None:
        chosen[name] = inputs

    def keep(
        name: str, run: Callable[..., Tensor], hidden: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        hidden_of[name] = hidden.reshape(-1, hidden.shape[-1]).clone()
        return run(hidden, ids, weights)

    with attach(model, None, devices, token_source="sequence") as pace:
        pace.watch(note, Facts(scores=True, all_scores=True, request=True, source=True))
        pace.replace_experts(keep)
        with torch.no_grad():
            model(input_ids=ids.to(model.device), use_cache=False)
    return [
        Captured(m.name, m.router, m.experts, hidden_of[m.name], chosen[m.name])
        for m in find_layers(model)
    ]
