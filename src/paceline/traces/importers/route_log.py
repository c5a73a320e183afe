"""JSONL route logs: a "meta" line, then one "route" line per token and layer.

Several public patches of vLLM write them: {"type": "meta", model_id, layers_logged, top_k} and
{"type": "route", req_id, token_idx, layer, topk_ids, topk_weights}. In some, token_idx starts anew
at every forward; in others it counts on.
"""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.traces.format import TraceError, seen
from paceline.traces.importers.source import Source, whole_number
from paceline.traces.importers.to_trace import from_choices, layer_names
from paceline.traces.trace import Trace


class _Rows:
    """The rows of one layer, flat: a long log has millions."""

    def __init__(self) -> None:
        self.ids, self.weights = array("i"), array("f")
        self.forwards, self.requests, self.tokens = array("i"), array("i"), array("q")

    def places(self) -> list[Key]:
        """Forward, request and token_idx of every row."""
        return list(zip(self.forwards, self.requests, self.tokens, strict=True))


def matches(source: Source) -> bool:
    """Check for JSON lines whose first is of type "meta"."""
    return _is_meta(source.first_row)


def read(source: Source) -> Trace:
    """Read the tokens of a route log, in its order; a batch ends where token_idx falls back.

    Layers may lack rows of others: each is counted with those that it has.

    Raises:
        TraceError: if a line can't be read, or layers disagree about the tokens.
    """
    path = source.path
    meta: dict[str, Any] = {}
    layers: dict[int, _Rows] = defaultdict(_Rows)
    requests: dict[str, int] = {}
    # token_idx in this forward by layer and request, and by request alone
    last: dict[tuple[int, int], int] = {}
    k = forward = before = 0

    def parse(line: str, place: str) -> None:
        nonlocal meta, k, forward, before
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise TraceError(f"{place} is not JSON (was the log cut off?).") from None
        if _is_meta(row):
            meta = meta or row
            k = k or source.agree("k", whole_number(meta.get("top_k"), "top_k", place))
        elif isinstance(row, dict) and row.get("type") == "route":
            layer = whole_number(row.get("layer"), "layer", place)
            ids, weights = _chosen(row, k, place), _weights(row, k, place)
            token = whole_number(row.get("token_idx"), "token_idx", place)
            request = requests.setdefault(str(row.get("req_id")), len(requests))
            falls_back = layer < before and token <= last.get((_ANY, request), -1)
            if falls_back or token <= last.get((layer, request), -1):
                forward += 1
                last.clear()
            last[layer, request] = last[_ANY, request] = token
            before = layer
            own = layers[layer]
            own.ids.extend(ids)
            own.weights.extend(weights)
            own.forwards.append(forward)
            own.requests.append(request)
            own.tokens.append(token)

    source.each_line(parse)
    if not layers:
        raise TraceError(f'{path} has no line of type "route".')
    if "num_experts" in meta:
        stated = whole_number(meta["num_experts"], "num_experts", str(path))
        experts = source.agree("experts", stated)
    else:
        experts = source.require("experts")
    indices = sorted(layers)
    keys, places = _places(layers)
    tokens = len(keys)
    lacking = [f"layer {i}" for i in indices if len(layers[i].tokens) < tokens]
    notes = []
    if lacking:
        notes.append(
            f"{', '.join(lacking)}: fewer rows than the {tokens} of others, counted with their own"
        )
    edges = np.flatnonzero(np.diff([key[0] for key in keys])) + 1
    starts = [0, *edges.tolist(), tokens]
    notes.append(
        "token_idx starts anew: a batch is a forward of that log"
        if forward
        else "token_idx counts on: where a forward ends is unknown"
    )

    def table(name: str, missing: float) -> npt.NDArray[Any]:
        found = []
        for index in indices:
            rows = np.asarray(getattr(layers[index], name)).reshape(-1, k)
            full = np.full((tokens, k), missing, dtype=rows.dtype)
            full[places[index]] = rows
            found.append(full)
        return np.stack(found)

    weighed = all(len(own.weights) == len(own.ids) for own in layers.values())
    return from_choices(
        source, table("ids", -1), layer_names(indices), program="JSONL route log", experts=experts,
        starts=np.array(starts), batches="forward" if forward else "file",
        weights=table("weights", 0.0) if weighed else None,
        facts={"request": np.array([key[1] for key in keys], dtype=np.int64)},
        model=str(meta["model_id"]) if "model_id" in meta else None, notes=notes,
    )  # fmt: skip


_ANY = -1  # instead of a layer

Key = tuple[int, int, int]
"""Forward, request and token_idx of a row."""


def _places(layers: Mapping[int, _Rows]) -> tuple[list[Key], dict[int, Any]]:
    """Return the tokens of all layers, and where the rows of each layer stand among them."""
    whole = max(layers.values(), key=lambda own: len(own.tokens)).places()
    keys = {layer: own.places() for layer, own in layers.items()}
    every = set().union(*keys.values())
    # in the order of the log, where one layer has all tokens
    tokens = whole if len(every) == len(whole) else sorted(every)
    at = {key: row for row, key in enumerate(tokens)}
    found: dict[int, Any] = {
        layer: slice(None) if own == tokens else np.array([at[key] for key in own], dtype=np.int64)
        for layer, own in keys.items()
    }
    return tokens, found


def _is_meta(row: Any) -> bool:
    return isinstance(row, dict) and row.get("type") == "meta"


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
    weights = row.get("topk_weights")
    if weights is None:
        return []
    numbers = isinstance(weights, list) and all(isinstance(w, int | float) for w in weights)
    if not numbers or len(weights) != k or not all(abs(w) < 1e30 for w in weights):
        raise TraceError(f"{place}: topk_weights={seen(weights)} are no {k} weights.")
    return list(weights)
