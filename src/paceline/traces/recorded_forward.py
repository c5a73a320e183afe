"""One forward as it is recorded: layer by layer from the model, then as part of a chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from paceline.routing import RoutingInputs
from paceline.traces.chunk import DEFAULTS, FACTS, PER_CHOICE, Chunk, id_dtype
from paceline.traces.format import MODALITIES, PHASES, UNKNOWN, Header, TraceError

_CODES = [
    (phase, modality)
    for phase in (*range(len(PHASES)), UNKNOWN)
    for modality in (*range(len(MODALITIES)), UNKNOWN)
]
"""Every pair of phase and modality, in the order of the groups that counts are kept in."""
_DTYPES = {
    "valid": torch.bool, "phase": torch.uint8, "modality": torch.uint8, "request": torch.int64,
    "source": torch.int32, "priority": torch.int8,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Recorded:
    """A forward that has ended, on the host.

    Attributes:
        layers: tensors of each layer by name, [rows of the layer, ...]; empty where it didn't run.
        ks: experts per token of each layer, None where it didn't run.
        requests: labels of requests are below this.
    """

    layers: tuple[dict[str, Tensor], ...]
    ks: tuple[int | None, ...]
    requests: int

    @property
    def rows(self) -> int:
        """Number of rows of the layer with the most."""
        return max((layer["ids"].shape[0] for layer in self.layers if "ids" in layer), default=0)

    @property
    def bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.values())


class Forward:
    """A running forward.

    Args:
        content: "counts", "choices" or "scores".
    """

    def __init__(self, layers: int, content: str) -> None:
        self._layers: list[dict[str, Tensor]] = [{} for _ in range(layers)]
        self._ks: list[int | None] = [None] * layers
        self._content = content

    def has(self, layer: int) -> bool:
        """Check if a layer has run in this forward."""
        return self._ks[layer] is not None

    def add(
        self, layer: int, inputs: RoutingInputs, modality: Mapping[str, Tensor] | None, known: bool
    ) -> None:
        """Keep the routing inputs of a layer.

        Args:
            layer: index of it.
            modality: name -> [tokens] bool, text where none is True; None: unknown.
            known: the forward is known, and so which tokens decode.

        Raises:
            TraceError: if scores of all experts are to be recorded and the layer has none.
        """
        self._ks[layer] = inputs.topk_ids.shape[1]
        facts = _facts(inputs, modality, known)
        if self._content == "counts":
            self._layers[layer] = _counted(inputs, facts)
            return
        kept = {"ids": inputs.topk_ids, "weights": inputs.topk_weights, **facts}
        if inputs.scores is not None:
            inside = inputs.topk_ids.long().clamp(0, inputs.scores.shape[1] - 1)
            kept["topk_scores"] = inputs.scores.float().gather(1, inside)
            if self._content == "scores":
                kept["scores"] = inputs.scores.float()
        elif self._content == "scores":
            raise TraceError("a layer of this model doesn't give the scores of all experts.")
        elif inputs.topk_scores is not None:
            kept["topk_scores"] = inputs.topk_scores.float()
        # the model may go on to change what it owns
        self._layers[layer] = {name: tensor.detach().clone() for name, tensor in kept.items()}

    def recorded(self, first_request: int) -> Recorded:
        """Copy all of it to the host; requests get labels from `first_request` on."""
        layers, requests = [], first_request
        for kept in self._layers:
            layer = {name: tensor.cpu() for name, tensor in kept.items()}
            if "request" in layer and layer["request"].numel():
                layer["request"] = layer["request"].long() + first_request
                requests = max(requests, int(layer["request"].max()) + 1)
            layers.append(layer)
        return Recorded(tuple(layers), tuple(self._ks), requests)


def chunk_of(forwards: Sequence[Recorded], header: Header) -> Chunk:
    """Make a chunk of forwards."""
    if header.content == "counts":
        return _chunk_of_counts(forwards, header)
    starts = torch.tensor([0, *(forward.rows for forward in forwards)]).cumsum(0)
    tensors: dict[str, Tensor] = {}
    for name in (*PER_CHOICE, *FACTS):
        known = [name in layer for forward in forwards for layer in forward.layers if layer]
        if name != "valid" and not (any(known) if name in DEFAULTS else all(known)):
            continue  # a fact that isn't known of every row is left out
        dtype = _dtype(name, forwards, header)
        parts = [_stacked(name, forward, dtype, header) for forward in forwards]
        tensors[name] = torch.cat(parts, 1) if name in PER_CHOICE else _fact(parts)
    if tensors["valid"].all():
        del tensors["valid"]
    return Chunk(starts=starts, **tensors)


def _facts(
    inputs: RoutingInputs, modality: Mapping[str, Tensor] | None, known: bool
) -> dict[str, Tensor]:
    """Return the known facts [tokens] by name."""
    rows, device = inputs.topk_ids.shape[0], inputs.topk_ids.device
    stated = {
        "valid": inputs.valid,
        "request": inputs.token_request,
        "source": inputs.token_source,
        "priority": inputs.token_priority,
    }
    facts = {name: tensor for name, tensor in stated.items() if tensor is not None}
    if known:
        decode = inputs.token_decode
        facts["phase"] = (
            torch.zeros(rows, dtype=torch.uint8, device=device) if decode is None else decode.byte()
        )
    if modality is not None:
        codes = torch.zeros(rows, dtype=torch.uint8, device=device)
        for name, members in modality.items():
            codes = codes.masked_fill(members.to(device), MODALITIES.index(name))
        facts["modality"] = codes
    return facts


def _counted(inputs: RoutingInputs, facts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Count assignments [groups, experts] and rows [groups] of one layer, on its device."""
    experts, ids = inputs.experts(None), inputs.topk_ids.long()
    blank = torch.full(ids.shape[:1], UNKNOWN, dtype=torch.uint8, device=ids.device)
    phase, modality = (facts.get(name, blank).long() for name in ("phase", "modality"))
    phase = phase.clamp(max=len(PHASES))
    modality = modality.clamp(max=len(MODALITIES))
    group = phase * (len(MODALITIES) + 1) + modality
    offered = (ids >= 0) & (ids < experts)
    if inputs.valid is not None:
        offered &= inputs.valid.unsqueeze(1)
        group = torch.where(inputs.valid, group, len(_CODES))
    size = len(_CODES) * experts
    place = torch.where(offered, group.unsqueeze(1) * experts + ids, size).flatten()
    counts = torch.zeros(size + 1, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, place, torch.ones_like(place, dtype=torch.int32))
    rows = torch.zeros(len(_CODES) + 1, dtype=torch.int64, device=ids.device)
    rows.scatter_add_(0, group, torch.ones_like(group))
    return {"counts": counts[:-1].view(len(_CODES), experts), "rows": rows[:-1]}


def _chunk_of_counts(forwards: Sequence[Recorded], header: Header) -> Chunk:
    shape = (len(forwards), len(header.layers), len(_CODES))
    counts = torch.zeros((*shape, header.experts), dtype=torch.int32)
    rows = torch.zeros(shape, dtype=torch.int64)
    for batch, forward in enumerate(forwards):
        for index, layer in enumerate(forward.layers):
            if layer:
                counts[batch, index, :, : layer["counts"].shape[1]] = layer["counts"]
                rows[batch, index] = layer["rows"]
    used = rows.any(0).any(0)
    return Chunk(
        starts=torch.arange(len(forwards) + 1),
        counts=counts[:, :, used],
        group_codes=torch.tensor(_CODES, dtype=torch.uint8)[used],
        rows=rows[:, :, used],
    )


def _dtype(name: str, forwards: Sequence[Recorded], header: Header) -> torch.dtype:
    if name in FACTS:
        return _DTYPES[name]
    if name == "ids":
        return id_dtype(header.experts)
    found = [layer[name].dtype for f in forwards for layer in f.layers if name in layer]
    return reduce(torch.promote_types, found)


def _stacked(name: str, forward: Recorded, dtype: torch.dtype, header: Header) -> Tensor:
    """Collect one forward as [layers, rows, ...]; shorter layers have padding at the end."""
    layers = []
    for layer, described in zip(forward.layers, header.layers, strict=True):
        own, default = layer.get(name), DEFAULTS.get(name, 0)
        rows = layer["ids"].shape[0] if layer else 0
        if name == "ids":
            default = described.experts
            if own is not None:
                own = torch.where((own >= 0) & (own < default), own.long(), default)
        shape = [forward.rows]
        if name in PER_CHOICE:
            shape.append(header.experts if name == "scores" else max(k or 0 for k in forward.ks))
        whole = torch.full(shape, default, dtype=dtype)
        if own is not None and name in PER_CHOICE:
            whole[:rows, : own.shape[1]] = own
        elif own is not None:
            # routing takes priorities beyond these as the nearest of them
            whole[:rows] = own.clamp(-128, 127) if name == "priority" else own
        if name == "valid":
            whole[rows:] = False
        layers.append(whole)
    return torch.stack(layers)


def _fact(parts: Sequence[Tensor]) -> Tensor:
    """Join facts [layers, rows] of several forwards; [rows] where all layers have the same."""
    whole = torch.cat(list(parts), 1)
    same: Tensor = (whole == whole[:1]).all()
    return whole[0].clone() if same else whole
