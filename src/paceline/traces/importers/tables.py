"""Load tables in JSON: counts or shares by layer and expert, as several projects write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.traces.format import TraceError, seen
from paceline.traces.importers.asked import Asked
from paceline.traces.importers.counts import from_counts, layer_names
from paceline.traces.trace import Trace

Array = npt.NDArray[Any]


def read_table(data: Any, where: str, asked: Asked) -> Trace | None:
    """A trace of the load table in decoded JSON; None where this is no table known here.

    Raises:
        TraceError: if it is one, and something in it can't be.
    """
    if not isinstance(data, dict):
        return None
    for fits, read in _READERS:
        if fits(data):
            return read(data, where, asked)
    return None


def _olmoe(data: dict[str, Any], where: str, asked: Asked) -> Trace:
    """{model, num_experts, k, layers: {layer: {expert: count}}}."""
    experts = asked.agrees("experts", _whole(data["num_experts"], "num_experts", where), where)
    k = asked.agrees("k", _whole(data["k"], "k", where), where) if "k" in data else asked.k
    return _by_layer(
        data["layers"], experts, where, "JSON counts by layer and expert", k,
        asked, model=str(data["model"]) if "model" in data else None,
    )  # fmt: skip


def _mindspeed(data: dict[str, Any], where: str, asked: Asked) -> Trace:
    """{layer: {expert: count}}, as MindSpeed-RL writes token_collects_all.json."""
    experts = asked.needed("experts", where, "how many experts a layer has")
    return _by_layer(data, experts, where, "JSON counts by layer and expert", asked.k, asked)


def _prefetch(data: dict[str, Any], where: str, asked: Asked) -> Trace:
    """{layers: [{layer_id, experts: [{expert_id, activations}]}]} of llama-prefetch.cpp.

    Gate, up and down are counted each: every number is three times the assignments.
    """
    experts = asked.needed("experts", where, "how many experts a layer has")
    table: dict[str, dict[str, Any]] = {}
    for layer in data["layers"]:
        entries = layer.get("experts") if isinstance(layer, dict) else None
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            raise TraceError(f"{where}: layers hold {seen(layer)}: expected is a list of experts.")
        table[str(layer.get("layer_id"))] = {
            str(entry.get("expert_id")): entry.get("activations") for entry in entries
        }
    names, counts = _table(table, experts, where)
    if (counts % 3).any():
        raise TraceError(
            f"{where}: activations are no multiples of 3, which gate, up and down counted each "
            "would be."
        )
    notes = ["gate, up and down are counted each: divided by 3"]
    return from_counts(
        counts[None] // 3, names, where=where, source="llama-prefetch.cpp", batches="file",
        k=asked.k, asked=asked, notes=notes,
    )  # fmt: skip


def _logical_count(data: dict[str, Any], where: str, asked: Asked) -> Trace:
    """{logical_count: [layers][experts] or [steps][layers][experts]} for --init-expert-location."""
    counts = _numbers(data["logical_count"], where, "logical_count")
    counts = counts[None] if counts.ndim == 2 else counts
    if counts.ndim != 3:
        raise TraceError(f"{where}: logical_count has {counts.ndim} axes: expected are 2 or 3.")
    asked.agrees("experts", counts.shape[2], where)
    return from_counts(
        counts, layer_names(range(counts.shape[1])), where=where, source="SGLang logical_count",
        batches="forward" if len(counts) > 1 else "file", k=asked.k, asked=asked,
        notes=[TENSOR_PARALLEL] if asked.world_size is None else [],
    )  # fmt: skip


def _eplb(data: dict[str, Any], where: str, asked: Asked) -> Trace:
    """{weight: [layers][experts], ...}: what EPLB's rebalance_experts takes."""
    counts = _numbers(data["weight"], where, "weight")
    if counts.ndim != 2:
        raise TraceError(f"{where}: weight has {counts.ndim} axes: expected is [layers, experts].")
    asked.agrees("experts", counts.shape[1], where)
    return from_counts(
        counts[None], layer_names(range(len(counts))), where=where, source="EPLB weight",
        batches="file", k=asked.k, asked=asked,
    )  # fmt: skip


def _fingerprint(data: dict[str, Any], where: str, asked: Asked) -> Trace:
    """{think_expert_analytics: {layer_N: {expert: {count_frequency}}}}: shares of tokens."""
    experts = asked.needed("experts", where, "how many experts a layer has")
    table = {}
    for layer, entries in data["think_expert_analytics"].items():
        if not isinstance(entries, dict):
            raise TraceError(
                f"{where}: {seen(layer)} holds {seen(entries)}: expected is an object."
            )
        table[layer.removeprefix("layer_")] = {
            expert: entry.get("count_frequency") if isinstance(entry, dict) else None
            for expert, entry in entries.items()
        }
    names, shares = _table(table, experts, where)
    notes = [
        "shares of generated tokens that chose an expert, averaged over samples: no totals, so "
        "nothing is said of tokens or batches"
    ]
    return from_counts(
        shares[None], names, where=where, source="GPT-OSS expert fingerprint", batches="file",
        k=asked.k, shares=True, model="gpt-oss", notes=notes,
    )  # fmt: skip


def _esft_summary(data: dict[str, Any], where: str, asked: Asked) -> Trace:
    """{token_scores: {layer: {expert: share}}, gate_scores: ...} of ESFT."""
    experts = asked.needed("experts", where, "how many experts a layer has")
    if not isinstance(data["token_scores"], dict):
        raise TraceError(f"{where}: token_scores is no object of layers.")
    names, shares = _table(data["token_scores"], experts, where)
    notes = ["shares of assignments with few decimals: no totals, so nothing is said of tokens"]
    return from_counts(
        shares[None], names, where=where, source="ESFT summary", batches="file", k=asked.k,
        shares=True, notes=notes,
    )  # fmt: skip


TENSOR_PARALLEL = (
    "under plain tensor parallelism every rank counts the same tokens: totals are then as many "
    "times too large (ratios are right), and --world-size says how many"
)


def _by_layer(
    table: Any, experts: int, where: str, source: str, k: int | None, asked: Asked,
    model: str | None = None,
) -> Trace:  # fmt: skip
    if not isinstance(table, dict):
        raise TraceError(f"{where}: layers are {seen(table)}: expected is an object.")
    names, counts = _table(table, experts, where)
    return from_counts(
        counts[None], names, where=where, source=source, batches="file", k=k, asked=asked,
        model=model,
    )  # fmt: skip


def _table(
    layers: Mapping[str, Any], experts: int, where: str
) -> tuple[list[str], npt.NDArray[np.float64]]:
    """Names and [layers, experts] float64 of {layer: {expert: number}}; absent experts are 0."""
    if not layers:
        raise TraceError(f"{where} has no layers.")
    indices = sorted(_index(layer, "layer", where) for layer in layers)
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
                    f"{where}: layer {layer} names expert {index}: allowed is 0 to {experts - 1}."
                )
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TraceError(
                    f"{where}: expert {expert} of layer {layer} has {seen(value)}, which is "
                    "no number."
                )
            table[row[_index(layer, "layer", where)], index] = value
    return layer_names(indices), table


def _index(text: Any, what: str, where: str) -> int:
    if not isinstance(text, str) or not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise TraceError(f"{where}: {seen(text)} is no number of a {what}.")
    return int(text)


def _whole(value: Any, field: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 20:
        raise TraceError(f"{where}: {field}={seen(value)} is not allowed: it is at least 1.")
    return value


def _numbers(lists: Any, where: str, field: str) -> Array:
    try:
        array = np.array(lists)
    except ValueError:
        array = np.array(["uneven"])
    if array.dtype.kind not in "if" or not array.size:
        raise TraceError(f"{where}: {field} are no even nested lists of numbers.")
    return array


def _numbered(data: Any) -> bool:
    """Whether an object's keys are all numbers, and its values objects with such keys."""
    return bool(data) and all(
        key.isdigit() and isinstance(value, dict) and value and all(e.isdigit() for e in value)
        for key, value in data.items()
    )


def _is_prefetch(data: dict[str, Any]) -> bool:
    layers = data.get("layers")
    first = layers[0] if isinstance(layers, list) and layers else None
    return isinstance(first, dict) and "experts" in first


_Reader = Callable[[dict[str, Any], str, Asked], Trace]
_READERS: Sequence[tuple[Callable[[dict[str, Any]], bool], _Reader]] = (
    (lambda data: "num_experts" in data and "layers" in data, _olmoe),
    (_is_prefetch, _prefetch),
    (lambda data: "logical_count" in data, _logical_count),
    (lambda data: "weight" in data and {"num_replicas", "phy2log"} & data.keys() != set(), _eplb),
    (lambda data: isinstance(data.get("think_expert_analytics"), dict), _fingerprint),
    (lambda data: "token_scores" in data, _esft_summary),
    (_numbered, _mindspeed),
)
