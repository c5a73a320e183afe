"""JSONL route logs: a "meta" line, then one "route" line per token and layer.

Several public patches of vLLM write them: {"type": "meta", model_id, layers_logged, top_k} and
{"type": "route", req_id, token_idx, layer, topk_ids, topk_weights}. In some, token_idx starts anew
at every forward; in others it counts on.
"""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
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
        self.requests, self.tokens = array("i"), array("q")


def matches(source: Source) -> bool:
    """Check for JSON lines whose first is of type "meta"."""
    return _is_meta(source.first_row)


def read(source: Source) -> Trace:
    """Read the tokens of a route log, in its order; a batch ends where token_idx falls back.

    Raises:
        TraceError: if a line can't be read, or layers disagree about the tokens.
    """
    path = source.path
    meta: dict[str, Any] = {}
    layers: dict[int, _Rows] = defaultdict(_Rows)
    requests: dict[str, int] = {}
    k = 0
    for number, line in source.lines():
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise TraceError(f"{place} is not JSON (was the log cut off?).") from None
        if _is_meta(row):
            meta = meta or row
            k = k or source.agree("k", whole_number(meta.get("top_k"), "top_k", place))
        elif isinstance(row, dict) and row.get("type") == "route":
            own = layers[whole_number(row.get("layer"), "layer", place)]
            own.ids.extend(_chosen(row, k, place))
            own.weights.extend(_weights(row, k, place))
            own.tokens.append(whole_number(row.get("token_idx"), "token_idx", place))
            own.requests.append(requests.setdefault(str(row.get("req_id")), len(requests)))
    if not layers:
        raise TraceError(f'{path} has no line of type "route".')
    if "num_experts" in meta:
        stated = whole_number(meta["num_experts"], "num_experts", str(path))
        experts = source.agree("experts", stated)
    else:
        experts = source.require("experts")
    indices = sorted(layers)
    counts = [len(layers[i].tokens) for i in indices]
    tokens = min(counts)
    notes = [f"cut to the {tokens} tokens that every layer has"] if tokens < max(counts) else []
    first = layers[indices[0]]
    rows = first.requests[:tokens], first.tokens[:tokens]
    for layer in indices:
        if (layers[layer].requests[:tokens], layers[layer].tokens[:tokens]) != rows:
            raise TraceError(
                f"{path}: layers {indices[0]} and {layer} name other tokens (req_id, token_idx), "
                "so which rows belong together is unknown."
            )
    starts = [0, *_restarts(first, tokens), tokens]
    forwards = len(starts) > 2
    notes.append(
        "token_idx starts anew: a batch is a forward of that log"
        if forwards
        else "token_idx counts on: where a forward ends is unknown"
    )

    def table(name: str) -> npt.NDArray[Any]:
        found = [np.asarray(getattr(layers[i], name)).reshape(-1, k)[:tokens] for i in indices]
        return np.stack(found)

    weighed = all(len(own.weights) == len(own.ids) for own in layers.values())
    return from_choices(
        source, table("ids"), layer_names(indices), program="JSONL route log", experts=experts,
        starts=np.array(starts), batches="forward" if forwards else "file",
        weights=table("weights") if weighed else None,
        facts={"request": np.array(first.requests[:tokens], dtype=np.int64)},
        model=str(meta["model_id"]) if "model_id" in meta else None, notes=notes,
    )  # fmt: skip


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


def _restarts(rows: _Rows, count: int) -> list[int]:
    """Find where a forward starts: a request's token_idx falls back."""
    last: dict[int, int] = {}
    found = []
    for row in range(count):
        request, token = rows.requests[row], rows.tokens[row]
        if token <= last.get(request, -1):
            found.append(row)
            last = {}
        last[request] = token
    return found
