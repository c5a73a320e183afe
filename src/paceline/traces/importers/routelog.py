"""JSONL route logs: a "meta" line, then one "route" line a token and layer.

Several public patches of vLLM write them: {"type": "meta", model_id, layers_logged, top_k} and
{"type": "route", req_id, token_idx, layer, topk_ids, topk_weights}. In some, token_idx starts anew
at every forward; in others it counts on.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from paceline.text import shortened
from paceline.traces.format import TraceError
from paceline.traces.importers.asked import Asked
from paceline.traces.importers.build import from_choices, layer_names
from paceline.traces.importers.texts import lines
from paceline.traces.trace import Trace


def is_meta(data: Any) -> bool:
    """Whether a decoded first line is that of a route log."""
    return isinstance(data, dict) and data.get("type") == "meta"


def read_route_log(path: Path, where: str, asked: Asked) -> Trace:
    """The tokens of a route log, in its order; a batch ends where token_idx falls back.

    Raises:
        TraceError: if a line can't be, or layers disagree about the tokens.
    """
    meta: dict[str, Any] = {}
    ids: dict[int, list[list[int]]] = defaultdict(list)
    weights: dict[int, list[list[float]]] = defaultdict(list)
    keys: dict[int, list[tuple[str, int]]] = defaultdict(list)
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
            continue
        if not isinstance(row, dict) or row.get("type") != "route":
            continue
        layer, token = _number(row, "layer", place), _number(row, "token_idx", place)
        chosen, given = row.get("topk_ids"), row.get("topk_weights")
        if not isinstance(chosen, list) or len(chosen) != k or not all(
            type(i) is int and -1 <= i < 1 << 31 for i in chosen
        ):  # fmt: skip
            raise TraceError(f"{place}: topk_ids={shortened(chosen)} are no {k} ids.")
        ids[layer].append(chosen)
        keys[layer].append((str(row.get("req_id")), token))
        if given is not None:
            if not isinstance(given, list) or len(given) != k or not all(
                isinstance(w, int | float) for w in given
            ):  # fmt: skip
                raise TraceError(f"{place}: topk_weights={shortened(given)} are no {k} weights.")
            weights[layer].append(given)
    if not ids:
        raise TraceError(f'{path} has no line of type "route".')
    experts = asked.experts
    if "num_experts" in meta:
        experts = asked.agrees("experts", _number(meta, "num_experts", str(path)), where)
    if experts is None:
        experts = asked.needed("experts", where, "how many experts a layer has")
    indices = sorted(ids)
    tokens = min(map(len, ids.values()))
    notes = []
    if len({len(rows) for rows in ids.values()}) > 1:
        notes.append(f"cut to the {tokens} tokens that every layer has")
    order = keys[indices[0]][:tokens]
    for layer in indices:
        if keys[layer][:tokens] != order:
            raise TraceError(
                f"{path}: layers {indices[0]} and {layer} name other tokens (req_id, token_idx), "
                "so which rows belong together is unknown."
            )
    starts = [0, *_restarts(order), tokens]
    notes.append(
        "token_idx starts anew: a batch is a forward of that log"
        if len(starts) > 2
        else "token_idx counts on: where a forward ends isn't told"
    )
    requests = {name: i for i, name in enumerate(dict.fromkeys(name for name, _ in order))}
    complete = all(len(weights[layer]) == len(ids[layer]) for layer in indices)
    return from_choices(
        np.array([ids[i][:tokens] for i in indices], dtype=np.int64), layer_names(indices),
        where=where, source="JSONL route log", experts=experts, starts=np.array(starts),
        batches="forward" if len(starts) > 2 else "file",
        weights=np.array([weights[i][:tokens] for i in indices], dtype=np.float32)
        if complete else None,
        k=k, facts={"request": np.array([requests[name] for name, _ in order])},
        model=str(meta["model_id"]) if "model_id" in meta else None, notes=notes,
    )  # fmt: skip


def _restarts(order: list[tuple[str, int]]) -> list[int]:
    """Where a forward starts: a request's token_idx doesn't go on, or falls back."""
    last: dict[str, int] = {}
    found = []
    for row, (request, token) in enumerate(order):
        if token <= last.get(request, -1):
            found.append(row)
            last = {}
        last[request] = token
    return found


def _number(row: dict[str, Any], field: str, place: str) -> int:
    value = row.get(field)
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise TraceError(f"{place}: {field}={shortened(value)} is no whole number.")
    return value
