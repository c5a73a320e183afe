"""TensorRT-LLM's EXPERT_STATISTIC_PATH: meta_info.json and one safetensors file per rank."""

from __future__ import annotations

import json
import re

import numpy as np

from paceline.text import shortened
from paceline.traces.format import MAX_HEADER_BYTES, TraceError, read_bounded, seen
from paceline.traces.importers.source import Source
from paceline.traces.importers.to_trace import from_counts, layer_names
from paceline.traces.trace import Trace

META = "meta_info.json"
_MAX_RANK_BYTES, _MAX_TABLE = 1 << 30, 1 << 27


def matches(source: Source) -> bool:
    """Check for a folder with meta_info.json."""
    return META in source.names


def read(source: Source) -> Trace:
    """Read counts by iteration and layer, keys "{iteration}_{layer}", summed over ranks.

    Raises:
        TraceError: if a file is missing, or not of this form.
    """
    from safetensors import SafetensorError, safe_open

    folder = source.path
    try:
        meta = json.loads(read_bounded(folder / META, MAX_HEADER_BYTES))
        experts, k = meta["num_experts"], meta["num_experts_per_token"]
        if type(experts) is not int or type(k) is not int or not 1 <= k <= experts <= 1 << 20:
            raise KeyError(seen(meta))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(
            f"{folder / META}: expected num_experts and num_experts_per_token."
        ) from None
    source.agree("experts", experts)
    source.agree("k", k)
    ranks = sorted(folder.glob("rank*.safetensors"))
    if not ranks:
        raise TraceError(f"{folder} has no rank*.safetensors beside {META}.")
    total: dict[tuple[int, int], np.ndarray] = {}
    for path in ranks:
        if not path.is_file() or path.stat().st_size > _MAX_RANK_BYTES:
            raise TraceError(f"{path} is no plain file of at most {_MAX_RANK_BYTES} bytes.")
        try:
            with safe_open(path, framework="np") as stored:
                for key in stored.keys():  # noqa: SIM118 - not a mapping
                    match = re.fullmatch(r"(\d{1,9})_(\d{1,6})", key)
                    tensor = stored.get_slice(key)
                    if not match or tensor.get_shape() != [experts]:
                        raise TraceError(
                            f"{path}: {seen(key)} has shape {tensor.get_shape()}: expected "
                            f"ITERATION_LAYER with [{experts}]."
                        )
                    place = int(match[1]), int(match[2])
                    total[place] = total.get(place, 0) + stored.get_tensor(key)
        except SafetensorError as error:
            raise TraceError(
                f"{path} is no safetensors file: {shortened(str(error), 200)}."
            ) from None
    iterations = sorted({iteration for iteration, _ in total})
    layers = sorted({layer for _, layer in total})
    if not total or len(iterations) * len(layers) * experts > _MAX_TABLE:
        raise TraceError(
            f"{folder} has {len(total)} tables of {experts} experts: none, or too many."
        )
    table = np.zeros((len(iterations), len(layers), experts), dtype=np.int64)
    for (iteration, layer), counts in total.items():
        table[iterations.index(iteration), layers.index(layer)] = counts
    return from_counts(
        source, table, layer_names(layers), program="TensorRT-LLM expert statistic",
        batches="forward", k=k, notes=[f"the sum of {len(ranks)} ranks"],
    )  # fmt: skip
