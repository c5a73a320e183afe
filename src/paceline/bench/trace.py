"""Recorded routing, of any format that traces are read from, as a benchmark's workload."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from paceline.bench.workload import Shape, Workload, softmax_gate
from paceline.routing import RoutingInputs
from paceline.traces import Asked, open_trace
from paceline.traces.chunk import joined


def trace_workload(path: Path, shape: Shape, layer: int, tokens: int, offset: int = 0) -> Workload:
    """Routing recorded from a model: a trace, or what another program wrote (docs/traces.md).

    Rows without experts are padding. All batches are taken as one row after the other.

    Args:
        path: of the file or folder, or "sample:NAME".
        shape: sizes of the experts to run; experts and k must be those of the trace.
        layer: which of the trace, by index.
        tokens: how many rows, padding included, repeated where the trace has fewer.
        offset: row to start at, so that devices differ.

    Raises:
        ValueError: if the file is no such trace or doesn't fit the shape.
    """
    given = _inputs(path, shape, layer)
    rows = (torch.arange(tokens) + offset) % len(given.topk_ids)
    chosen = given.topk_ids[rows].long()
    kept = chosen < shape.experts
    scores = given.topk_scores if given.topk_scores is not None else given.topk_weights

    def some(fact: torch.Tensor | None) -> torch.Tensor | None:
        return None if fact is None else fact[rows]

    given = replace(
        given,
        topk_ids=chosen,
        topk_weights=given.topk_weights[rows].float().masked_fill(~kept, 0),
        topk_scores=scores[rows].float().masked_fill(~kept, 0),
        valid=some(given.valid),
        token_request=some(given.token_request),
        # a benchmark says itself where tokens live, and has no phases
        scores=None, token_source=None, token_priority=None, token_decode=None, layer=layer,
    )  # fmt: skip
    weight = torch.zeros((shape.experts, shape.hidden))
    compute = softmax_gate(weight, torch.zeros(shape.experts), shape.k)

    def gate(hidden: torch.Tensor) -> RoutingInputs:
        compute(hidden)  # costs what a gate costs; the choice is the recorded one
        return given

    return Workload(
        label=f"{shape.name}, {path.name} layer {layer}",
        hidden=torch.randn((tokens, shape.hidden), generator=torch.Generator().manual_seed(0)),
        gate=gate,
        shape=shape,
        origin=f"recorded routing, {path.name}, layer {layer}",
    )


def _inputs(path: Path, shape: Shape, layer: int) -> RoutingInputs:
    """All that one layer got."""
    trace = open_trace(path, Asked(experts=shape.experts, k=shape.k))
    header = trace.header
    if not header.per_token:
        raise ValueError(f"trace {path} holds {header.content}, not what each token chose.")
    if layer >= len(header.layers):
        raise ValueError(
            f"layer={layer} is not allowed: the trace {path} has {len(header.layers)} layers."
        )
    own = header.layers[layer]
    if (own.experts, own.k) != (shape.experts, shape.k):
        raise ValueError(
            f"trace {path} has {own.experts} experts and k={own.k}: shape {shape.name} has "
            f"{shape.experts} and k={shape.k}."
        )
    narrow = trace.narrowed([layer])
    whole = joined(list(narrow.chunks))
    if whole.weights is None:
        raise ValueError(f"trace {path} holds no weights, which the experts' outputs need.")
    return whole.inputs_of_rows(narrow.header, 0, 0, whole.tokens)
