"""Traces in .npz: topk_ids and topk_weights of all layers, as the sample traces are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.traces.format import PHASES, TraceError
from paceline.traces.importers.asked import Asked
from paceline.traces.importers.choices import from_choices
from paceline.traces.importers.counts import layer_names
from paceline.traces.trace import Trace

Array = npt.NDArray[Any]


def read_arrays(arrays: Mapping[str, Array], where: str, asked: Asked) -> Trace:
    """topk_ids [layers, tokens, k], or [layers, sequences, steps, k] of generated tokens.

    Beside them topk_weights, sample_lengths [samples], layers [layers] (indices in the model),
    num_experts and model, each where known. A step of all sequences is a forward.

    Raises:
        TraceError: if shapes don't fit, or the number of experts is unknown.
    """
    ids, weights = arrays["topk_ids"], arrays.get("topk_weights")
    if ids.dtype.kind not in "iu":
        raise TraceError(f"{where}: topk_ids are {ids.dtype}: allowed is an integer dtype.")
    if ids.ndim not in (3, 4) or not ids.size:
        raise TraceError(
            f"{where}: topk_ids has shape {list(ids.shape)}: expected is [layers, tokens, k] or "
            "[layers, sequences, steps, k]."
        )
    if weights is not None and (weights.shape != ids.shape or weights.dtype.kind != "f"):
        raise TraceError(f"{where}: topk_weights are no floats of shape {list(ids.shape)}.")
    experts = asked.experts
    if "num_experts" in arrays and arrays["num_experts"].size == 1:
        experts = asked.agrees("experts", int(arrays["num_experts"].reshape(())), where)
    if experts is None:
        experts = asked.needed("experts", where, "how many experts a layer has")
    facts: dict[str, Array] = {}
    if ids.ndim == 4:
        sequences, steps = ids.shape[1:3]
        ids = _by_step(ids)
        weights = None if weights is None else _by_step(weights)
        starts = np.arange(steps + 1) * sequences
        facts["request"] = np.tile(np.arange(sequences), steps)
        facts["phase"] = np.full(sequences * steps, PHASES.index("decode"), dtype=np.uint8)
        unit = "forward"
    else:
        tokens = ids.shape[1]
        lengths = arrays.get("sample_lengths", np.array([tokens]))
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or lengths.sum() != tokens or (
            lengths < 0
        ).any():  # fmt: skip
            raise TraceError(f"{where}: sample_lengths don't add up to the {tokens} tokens.")
        starts = np.cumsum([0, *lengths])
        unit = "file"
        if "sample_lengths" in arrays:
            facts["request"] = np.repeat(np.arange(len(lengths)), lengths)
            unit = "sample"
    if "token_request" in arrays:
        labels = arrays["token_request"]
        if labels.shape != ids.shape[1:2] or labels.dtype.kind not in "iu":
            raise TraceError(
                f"{where}: token_request is {labels.dtype} {list(labels.shape)}: allowed is a "
                f"whole number for each of the {ids.shape[1]} tokens."
            )
        facts["request"] = labels.astype(np.int64)
    indices = arrays.get("layers", np.arange(len(ids)))
    if indices.shape != (len(ids),) or indices.dtype.kind not in "iu":
        raise TraceError(f"{where}: layers has shape {list(indices.shape)}, not [{len(ids)}].")
    model = str(arrays["model"]) if "model" in arrays and arrays["model"].ndim == 0 else None
    return from_choices(
        ids, layer_names(indices.tolist()), where=where,
        source="arrays topk_ids", experts=experts, starts=starts,
        batches="forward" if unit == "forward" else "sample" if unit == "sample" else "file",
        weights=weights, scores_are_weights=True, k=asked.k, facts=facts, model=model,
        notes=["gate scores are taken to be the weights"] if weights is not None else [],
    )  # fmt: skip


def _by_step(array: Array) -> Array:
    """[layers, sequences, steps, k] -> [layers, steps * sequences, k]."""
    layers, _, _, k = array.shape
    steps: Array = array.swapaxes(1, 2).reshape(layers, -1, k)
    return steps
