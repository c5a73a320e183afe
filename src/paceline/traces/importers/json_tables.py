"""Load tables in JSON: counts or shares by layer and expert, as several projects write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.traces.format import TraceError, seen
from paceline.traces.importers.sglang_recorder import TENSOR_PARALLEL
from paceline.traces.importers.source import Source, whole_number
from paceline.traces.importers.to_trace import from_counts, layer_names
from paceline.traces.trace import Trace

Array = npt.NDArray[Any]
Fields = dict[str, Any]
Reader = Callable[[Fields, Source], Trace]


def matches(source: Source) -> bool:
    """Check for a table of one of the forms below."""
    return _reader(source) is not None


def read(source: Source) -> Trace:
    """Read the table.

    Raises:
        TraceError: if it holds something that its form does not allow.
    """
    reader = _reader(source)
    assert reader is not None
    return reader(source.json, source)


def _reader(source: Source) -> Reader | None:
    data = source.json
    if not isinstance(data, dict):
        return None
    return next((reader for fits, reader in _READERS if fits(data)), None)


def _olmoe(data: Fields, source: Source) -> Trace:
    """Read {model, num_experts, k, layers: {layer: {expert: count}}}."""

    def stated(field: str) -> int:
        return whole_number(data[field], field, source.where, least=1, below=(1 << 20) + 1)

    experts = source.agree("experts", stated("num_experts"))
    k = source.agree("k", stated("k")) if "k" in data else None
    if not isinstance(data["layers"], dict):
        raise TraceError(f"{source.where}: layers are {seen(data['layers'])}, not an object.")
    model = str(data["model"]) if "model" in data else None
    return _by_layer(data["layers"], experts, source, k=k, model=model)


def _mindspeed(data: Fields, source: Source) -> Trace:
    """Read {layer: {expert: count}}, as MindSpeed-RL writes token_collects_all.json."""
    return _by_layer(data, source.require("experts"), source)


def _by_layer(data: Fields, experts: int, source: Source, **known: Any) -> Trace:
    names, counts = _table(data, experts, source.where)
    program = "JSON counts by layer and expert"
    return from_counts(source, counts[None], names, program=program, batches="file", **known)


def _prefetch(data: Fields, source: Source) -> Trace:
    """Read {layers: [{layer_id, experts: [{expert_id, activations}]}]} of llama-prefetch.cpp.

    Gate, up and down are counted each: every number is three times the assignments.
    """
    experts = source.require("experts")
    table: dict[str, Fields] = {}
    for layer in data["layers"]:
        entries = layer.get("experts") if isinstance(layer, dict) else None
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            raise TraceError(f"{source.where}: layers hold {seen(layer)}, not a list of experts.")
        table[str(layer.get("layer_id"))] = {
            str(entry.get("expert_id")): entry.get("activations") for entry in entries
        }
    names, counts = _table(table, experts, source.where)
    if (counts % 3).any():
        raise TraceError(
            f"{source.where}: activations are no multiples of 3, which gate, up and down counted "
            "each would be."
        )
    return from_counts(
        source, counts[None] // 3, names, program="llama-prefetch.cpp", batches="file",
        notes=["gate, up and down are counted each: divided by 3"],
    )  # fmt: skip


def _logical_count(data: Fields, source: Source) -> Trace:
    """Read {logical_count} of SGLang, [layers][experts] or [steps][layers][experts]."""
    counts = _numbers(data, "logical_count", (2, 3), source)
    counts = counts[None] if counts.ndim == 2 else counts
    return from_counts(
        source, counts, layer_names(range(counts.shape[1])), program="SGLang logical_count",
        batches="forward" if len(counts) > 1 else "file",
        notes=[TENSOR_PARALLEL] if source.options.world_size is None else [],
    )  # fmt: skip


def _eplb(data: Fields, source: Source) -> Trace:
    """Read {weight: [layers][experts], ...}: the argument of EPLB's rebalance_experts."""
    counts = _numbers(data, "weight", (2,), source)
    names = layer_names(range(len(counts)))
    return from_counts(source, counts[None], names, program="EPLB weight", batches="file")


def _fingerprint(data: Fields, source: Source) -> Trace:
    """Read {think_expert_analytics: {layer_N: {expert: {count_frequency}}}}: shares of tokens."""
    experts = source.require("experts")
    table = {}
    for layer, entries in data["think_expert_analytics"].items():
        if not isinstance(entries, dict):
            raise TraceError(f"{source.where}: {seen(layer)} holds {seen(entries)}, not an object.")
        table[layer.removeprefix("layer_")] = {
            expert: entry.get("count_frequency") if isinstance(entry, dict) else None
            for expert, entry in entries.items()
        }
    names, shares = _table(table, experts, source.where)
    notes = [
        "shares of generated tokens that chose an expert, averaged over samples: no totals, so "
        "nothing is said of tokens or batches"
    ]
    return from_counts(
        source, shares[None], names, program="GPT-OSS expert fingerprint", batches="file",
        shares=True, model="gpt-oss", notes=notes,
    )  # fmt: skip


def _esft_summary(data: Fields, source: Source) -> Trace:
    """Read {token_scores: {layer: {expert: share}}, gate_scores: ...} of ESFT."""
    experts = source.require("experts")
    if not isinstance(data["token_scores"], dict):
        raise TraceError(f"{source.where}: token_scores is no object of layers.")
    names, shares = _table(data["token_scores"], experts, source.where)
    notes = ["shares of assignments with few decimals: no totals, so nothing is said of tokens"]
    return from_counts(
        source, shares[None], names, program="ESFT summary", batches="file", shares=True,
        notes=notes,
    )  # fmt: skip


def _table(
    layers: Mapping[str, Any], experts: int, where: str
) -> tuple[list[str], npt.NDArray[np.float64]]:
    """Return names and [layers, experts] of {layer: {expert: number}}; absent experts are 0."""
    if not layers:
        raise TraceError(f"{where} has no layers.")
    number = {layer: _index(layer, "layer", where) for layer in layers}
    indices = sorted(number.values())
    if len(set(indices)) < len(indices):
        raise TraceError(f"{where} names a layer twice.")
    row = {index: i for i, index in enumerate(indices)}
    table = np.zeros((len(layers), experts))
    for layer, entries in layers.items():
        if not isinstance(entries, Mapping):
            raise TraceError(f"{where}: layer {layer} holds {seen(entries)}, not its experts.")
        for expert, value in entries.items():
            index = _index(expert, "expert", where)
            if index >= experts:
                raise TraceError(
                    f"{where}: layer {layer} names expert {index}: ids must be 0 to {experts - 1}."
                )
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TraceError(
                    f"{where}: expert {expert} of layer {layer} has {seen(value)}, which is "
                    "no number."
                )
            table[row[number[layer]], index] = value
    return layer_names(indices), table


def _index(text: Any, what: str, where: str) -> int:
    if not isinstance(text, str) or not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise TraceError(f"{where}: {seen(text)} is no number of a {what}.")
    return int(text)


def _numbers(data: Fields, field: str, axes: tuple[int, ...], source: Source) -> Array:
    """Return nested lists as an array whose last axis is the experts."""
    try:
        array = np.array(data[field])
    except ValueError:
        array = np.array(["uneven"])
    if array.dtype.kind not in "if" or not array.size:
        raise TraceError(f"{source.where}: {field} are no even nested lists of numbers.")
    if array.ndim not in axes:
        expected = " or ".join(map(str, axes))
        raise TraceError(f"{source.where}: {field} has {array.ndim} axes: expected {expected}.")
    source.agree("experts", array.shape[-1])
    return array


def _is_prefetch(data: Fields) -> bool:
    layers = data.get("layers")
    first = layers[0] if isinstance(layers, list) and layers else None
    return isinstance(first, dict) and "experts" in first


def _is_numbered(data: Fields) -> bool:
    """Check that all keys are numbers, and all values objects with such keys."""
    return bool(data) and all(
        key.isdigit() and isinstance(value, dict) and value and all(e.isdigit() for e in value)
        for key, value in data.items()
    )


_READERS: Sequence[tuple[Callable[[Fields], bool], Reader]] = (
    (lambda data: "num_experts" in data and "layers" in data, _olmoe),
    (_is_prefetch, _prefetch),
    (lambda data: "logical_count" in data, _logical_count),
    (lambda data: "weight" in data and {"num_replicas", "phy2log"} & data.keys() != set(), _eplb),
    (lambda data: isinstance(data.get("think_expert_analytics"), dict), _fingerprint),
    (lambda data: "token_scores" in data, _esft_summary),
    (_is_numbered, _mindspeed),
)
