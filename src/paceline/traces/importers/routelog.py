"""JSONL route logs: a "meta" line, then one "route" line a token and layer.

Several public patches of vLLM write them: {"type": "meta", model_id, layers_logged, top_k} and
{"type": "route", req_id, token_idx, layer, topk_ids, topk_weights}. In some, token_idx starts anew
at every forward; in others it counts on.
"""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.traces.format import TraceError, seen
from paceline.traces.importers.asked import Asked
from paceline.traces.importers.choices import from_choices
from paceline.traces.importers.counts import layer_names
from paceline.traces.importers.texts import lines
from paceline.traces.trace import Trace


def is_meta(data: Any) -> bool:
    """Whether a decoded first line is that of a route log."""
    return isinstance(data, dict) and data.get("type") == "meta"


class _Rows:
    """What a log says of one layer, flat: a long log has millions of rows."""

    def __init__(self) -> None:
        self.ids, self.weights = array("i"), array("f")
        self.requests, self.tokens = array("i"), array("q")

    def table(self, values: array[Any], rows: int, k: int) -> npt.NDArray[Any]:
        """[rows, k] of the first rows."""
        return np.asarray(values).reshape(-1, k)[:rows]


def read_route_log(path: Path, where: str, asked: Asked) -> Trace:
    """The tokens of a route log, in its order; a batch ends where token_idx falls back.

    Raises:
        TraceError: if a line can't be, or layers disagree about the tokens.
    """
    meta: dict[str, Any] = {}
    layers: dict[int, _Rows] = defaultdict(_Rows)
    requests: dict[str, int] = {}
    k = 0
    for number, line in lines(path):
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise TraceError(f"{place} is not JSON (was the log cut off?).") from None
        if is_meta(row):
            meta = meta or row
            k = k or asked.agrees("k", _number(meta, "top_k", place), place)
        elif isinstance(row, dict) and row.get("type") == "route":
            own = layers[_number(row, "layer", place)]
            own.ids.extend(_chosen(row, k, place))
            own.weights.extend(_weights(row, k, place))
            own.tokens.append(_number(row, "token_idx", place))
            own.requests.append(requests.setdefault(str(row.get("req_id")), len(requests)))
    if not layers:
        raise TraceError(f'{path} has no line of type "route".')
    experts = asked.experts
    if "num_experts" in meta:
        experts = asked.agrees("experts", _number(meta, "num_experts", str(path)), where)
    if experts is None:
        experts = asked.needed("experts", where, "how many experts a layer has")
    indices = sorted(layers)
    counts = [len(layers[i].tokens) for i in indices]
    tokens = min(counts)
    notes = [f"cut to the {tokens} tokens that every layer has"] if tokens < max(counts) else []
    first = layers[indices[0]]
    for layer in indices:
        own = layers[layer]
        if (own.requests[:tokens], own.tokens[:tokens]) != (
            first.requests[:tokens],
            first.tokens[:tokens],
        ):
            raise TraceError(
                f"{path}: layers {indices[0]} and {layer} name other tokens (req_id, token_idx), "
                "so which rows belong together is unknown."
            )
    starts = [0, *_restarts(first, tokens), tokens]
    notes.append(
        "token_idx starts anew: a batch is a forward of that log"
        if len(starts) > 2
        else "token_idx counts on: where a forward ends isn't told"
    )
    complete = all(len(own.weights) == len(own.ids) for own in layers.values())
    weights = [layers[i].table(layers[i].weights, tokens, k) for i in indices] if complete else None
    return from_choices(
        np.stack([layers[i].table(layers[i].ids, tokens, k) for i in indices]),
        layer_names(indices), where=where, source="JSONL route log", experts=experts,
        starts=np.array(starts), batches="forward" if len(starts) > 2 else "file",
        weights=None if weights is None else np.stack(weights), k=k,
        facts={"request": np.array(first.requests[:tokens], dtype=np.int64)},
        model=str(meta["model_id"]) if "model_id" in meta else None, notes=notes,
    )  # fmt: skip


def _chosen(row: dict[str, Any], k: int, place: str) -> list[int]:
    ids = row.get("topk_ids")
    if (
        not isinstance(ids, list)
        or len(ids) != k
        or not all(type(i) is int and -1 <= i < 1 << 31 for i in ids)
    ):
        raise TraceError(f"{place}: topk_ids={seen(ids)} are no {k} ids.")
    return ids


def _weights(row: dict[str, Any], k: int, place: str) -> list[float]:
    given = row.get("topk_weights")
    if given is None:
        return []
    numbers = isinstance(given, list) and all(isinstance(w, int | float) for w in given)
    if not numbers or len(given) != k or not all(abs(w) < 1e30 for w in given):
        raise TraceError(f"{place}: topk_weights={seen(given)} are no {k} weights.")
    return list(given)


def _restarts(rows: _Rows, count: int) -> list[int]:
    """Where a forward starts: a request's token_idx doesn't go on, or falls back."""
    last: dict[int, int] = {}
    found = []
    for row in range(count):
        request, token = rows.requests[row], rows.tokens[row]
        if token <= last.get(request, -1):
            found.append(row)
            last = {}
        last[request] = token
    return found


def _number(row: dict[str, Any], field: str, place: str) -> int:
    value = row.get(field)
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise TraceError(f"{place}: {field}={seen(value)} is no whole number.")
    return value
