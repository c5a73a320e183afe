"""Some whole batches of a trace, all layers of them, in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from paceline.routing import RoutingInputs
from paceline.traces.format import PHASES, UNKNOWN, Header

PER_CHOICE = ("ids", "weights", "topk_scores", "scores")
"""Tensors [layers, tokens, ...]."""
FACTS = ("valid", "phase", "modality", "request", "source", "priority")
"""Tensors [tokens] where all layers saw the same rows, else [layers, tokens]."""
DEFAULTS = {"valid": 1, "phase": UNKNOWN, "modality": UNKNOWN, "priority": 0}
"""Meaning of facts that were not recorded, where they have one."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Batches in the order in which they ran; which tensors there are depends on the content.

    Attributes:
        starts: [batches + 1] int64: batch b has the tokens starts[b] to starts[b + 1]; only the
            number of batches means something where there are counts instead of tokens.
        ids: [layers, tokens, k] integers; an id outside [0, experts) of its layer is none.
        weights: [layers, tokens, k] combine weights.
        topk_scores: [layers, tokens, k] gate scores of the chosen experts.
        scores: [layers, tokens, experts] gate scores of all experts.
        valid: bool, False for padding.
        phase: uint8, see `PHASES`.
        modality: uint8, see `MODALITIES`.
        request: int64, any label.
        source: int32, device on which a token lives.
        priority: int8, as in `RoutingInputs`.
        counts: [batches, layers, groups, experts] integers, or float64 shares.
        group_codes: [groups, 2] uint8, phase and modality of each group of counts.
        rows: [batches, layers, groups] int64 tokens behind the counts, where known.
    """

    starts: Tensor
    ids: Tensor | None = None
    weights: Tensor | None = None
    topk_scores: Tensor | None = None
    scores: Tensor | None = None
    valid: Tensor | None = None
    phase: Tensor | None = None
    modality: Tensor | None = None
    request: Tensor | None = None
    source: Tensor | None = None
    priority: Tensor | None = None
    counts: Tensor | None = None
    group_codes: Tensor | None = None
    rows: Tensor | None = None

    @property
    def batches(self) -> int:
        """Batches in the chunk."""
        return self.starts.shape[0] - 1

    @property
    def tokens(self) -> int:
        """Token rows in the chunk, padding included."""
        return 0 if self.ids is None else self.ids.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are there, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def fact(self, name: str, layer: int) -> Tensor | None:
        """Return a fact [tokens] as a layer saw it, None where it wasn't recorded."""
        fact: Tensor | None = getattr(self, name)
        return fact if fact is None or fact.dim() == 1 else fact[layer]

    def take(self, rows: Tensor | slice, starts: Tensor) -> Chunk:
        """Take the tokens `rows` (indices, or a range) of all layers, in batches from `starts`."""
        changed: dict[str, Tensor] = {}
        for name, tensor in self.tensors().items():
            if name in PER_CHOICE:
                changed[name] = tensor[:, rows]
            elif name in FACTS:
                changed[name] = tensor[..., rows]
        return replace(self, starts=starts, **changed)

    def part(self, first: int, end: int) -> Chunk:
        """Take the batches `first` to `end`."""
        starts = self.starts[first : end + 1]
        if self.ids is not None:
            return self.take(slice(int(starts[0]), int(starts[-1])), starts - starts[0])
        assert self.counts is not None
        return replace(
            self,
            starts=starts - starts[0],
            counts=self.counts[first:end],
            rows=None if self.rows is None else self.rows[first:end],
        )

    def of_layers(self, layers: Tensor) -> Chunk:
        """Take the layers with these indices [layers] int64."""
        changed: dict[str, Tensor] = {}
        for name, tensor in self.tensors().items():
            if name in PER_CHOICE or (name in FACTS and tensor.dim() == 2):
                changed[name] = tensor[layers]
            elif name in ("counts", "rows"):
                changed[name] = tensor[:, layers]
        return replace(self, **changed)

    def inputs(self, header: Header, layer: int, batch: int, step: int = 0) -> RoutingInputs:
        """Return the routing inputs of a layer in a batch, for `paceline.route`.

        Where the trace has no weights they are all 1; a policy that ranks by weights must be
        refused before (`paceline.traces.simulate` does).

        Args:
            layer: index among the layers of the trace.
            batch: index in this chunk.
            step: number of the batch in the trace, for keep="random".
        """
        start, end = self.starts[batch : batch + 2].tolist()
        return self.inputs_of_rows(header, layer, start, end, step)

    def inputs_of_rows(
        self, header: Header, layer: int, start: int, end: int, step: int = 0
    ) -> RoutingInputs:
        """Return the routing inputs of the token rows `start` to `end`; see `inputs`."""
        if self.ids is None:
            raise ValueError(f"a trace of {header.content} doesn't hold what each token chose.")
        described = header.layers[layer]
        k = described.k or self.ids.shape[2]

        def chosen(tensor: Tensor | None, width: int) -> Tensor | None:
            return None if tensor is None else tensor[layer, start:end, :width]

        def fact(name: str) -> Tensor | None:
            whole = self.fact(name, layer)
            return None if whole is None else whole[start:end]

        ids = self.ids[layer, start:end, :k]
        weights = chosen(self.weights, k)
        topk_scores = chosen(self.topk_scores, k)
        if topk_scores is None and header.scores_are_weights and weights is not None:
            topk_scores = weights.float()
        phase = fact("phase")
        request, source, priority = fact("request"), fact("source"), fact("priority")
        return RoutingInputs(
            topk_ids=ids,
            topk_weights=torch.ones(ids.shape) if weights is None else weights,
            scores=chosen(self.scores, described.experts),
            topk_scores=topk_scores,
            valid=fact("valid"),
            token_source=source,
            token_request=request,
            token_priority=priority,
            token_decode=None if phase is None else phase == PHASES.index("decode"),
            num_experts=described.experts,
            layer=layer,
            step=step,
        )


def id_dtype(experts: int) -> torch.dtype:
    """Choose the smallest integers that hold every expert and `experts` itself, which is none."""
    return torch.uint8 if experts < 1 << 8 else torch.int16 if experts < 1 << 15 else torch.int32


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Join chunks of one trace, one after the other."""
    if len(chunks) == 1:
        return chunks[0]
    changed: dict[str, Any] = {}
    names = {name: None for chunk in chunks for name in chunk.tensors()}
    for name in names:
        found = [getattr(chunk, name) for chunk in chunks]
        if name == "starts":
            offsets = torch.tensor([0, *(int(part[-1]) for part in found[:-1])]).cumsum(0)
            moved = [part + offset for part, offset in zip(found, offsets, strict=True)]
            changed[name] = torch.cat([moved[0], *(part[1:] for part in moved[1:])])
        elif name in PER_CHOICE:
            changed[name] = torch.cat(found, 1)
        elif name in FACTS:
            changed[name] = _joined_fact(name, found, chunks)
        else:
            raise ValueError(f"chunks with {name} can't be joined: they hold no tokens.")
    return replace(chunks[0], **changed)


def _joined_fact(
    name: str, found: Sequence[Tensor | None], chunks: Sequence[Chunk]
) -> Tensor | None:
    """Join a fact of several chunks; one without it has its default there, or None."""
    known = [part for part in found if part is not None]
    default = DEFAULTS.get(name)
    if default is None and len(known) < len(found):
        return None
    layers = next((part.shape[0] for part in known if part.dim() == 2), None)
    parts = []
    for part, chunk in zip(found, chunks, strict=True):
        whole = known[0].new_full((chunk.tokens,), default or 0) if part is None else part
        parts.append(whole if layers is None or whole.dim() == 2 else whole.expand(layers, -1))
    return torch.cat(parts, -1)
