"""Routing in NumPy's .npz and .npy files: topk_ids of all layers, or an array per request.

The sample traces of the package are kept as topk_ids. Sizes are bounded before anything of them is
allocated.
"""

from __future__ import annotations

import ast
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from paceline.text import shortened
from paceline.traces.format import PHASES, BatchIs, TraceError
from paceline.traces.importers.source import ZIP_FAULTS, Source, check_zip
from paceline.traces.importers.to_trace import (
    check_ids,
    from_choices,
    from_requests,
    layer_names,
)  # fmt: skip
from paceline.traces.trace import Trace

Array = npt.NDArray[Any]
MAGIC = b"\x93NUMPY"
MAX_ARRAY_BYTES = 1 << 32
"""Of all arrays of a file: a million tokens of 26 layers in wide integers and floats are 1.3 GB."""
_BLOCK, _MAX_DICT = 1 << 24, 1 << 16
_KINDS = "iufbU"


def matches(source: Source) -> bool:
    """Check for an .npy file, or a zip file that holds such files alone."""
    names = source.zip_names
    return source.start.startswith(MAGIC) or (
        bool(names) and all(name.endswith(".npy") for name in names)
    )


def read(source: Source) -> Trace:
    """Read topk_ids, or an array [tokens, layers, k] per request.

    Raises:
        TraceError: if the file is no array, or larger than allowed, or shapes don't fit.
    """
    path = source.path
    if source.start.startswith(MAGIC):
        with path.open("rb") as file:
            array = read_npy(file, path.stat().st_size, source.where)
        return _requests({path.stem: array}, source)
    arrays = _read_npz(path)
    return _all_layers(arrays, source) if "topk_ids" in arrays else _requests(arrays, source)


def read_npy(file: IO[bytes], size: int, where: str) -> Array:
    """Read one array of `size` bytes in all.

    Raises:
        TraceError: if it is no array of numbers (or short texts), or another size than it states.
    """
    start = file.read(8)
    if len(start) < 8 or start[:6] != MAGIC or start[6] not in (1, 2, 3):
        raise TraceError(f"{where} is no .npy array.")
    width = 2 if start[6] == 1 else 4
    length = int.from_bytes(file.read(width), "little")
    if length > _MAX_DICT:
        raise TraceError(f"{where} is no .npy array: its header is too long.")
    try:
        header = ast.literal_eval(file.read(length).decode("latin1"))
        shape, order = header["shape"], header["fortran_order"]
        dtype, sizes = np.dtype(header["descr"]), tuple(shape)
        counts = all(type(n) is int and n >= 0 for n in sizes)
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        raise TraceError(f"{where} is no .npy array: its header can't be read.") from None
    if not counts or len(sizes) > 8 or dtype.kind not in _KINDS or dtype.hasobject:
        raise TraceError(f"{where} has dtype {dtype} and shape {shape}: expected numbers.")
    stated, there = math.prod(sizes) * dtype.itemsize, size - 8 - width - length
    if stated != there or stated > MAX_ARRAY_BYTES:
        raise TraceError(
            f"{where} states {stated} bytes of data and has {there}: they must be the same, at "
            f"most {MAX_ARRAY_BYTES}."
        )
    data = bytearray(stated)  # and not bytes, which can't be written to
    view, filled = memoryview(data), 0
    while filled < stated and (block := file.read(min(_BLOCK, stated - filled))):
        view[filled : filled + len(block)] = block
        filled += len(block)
    if filled != stated:
        raise TraceError(f"{where} is cut off.")
    array = np.frombuffer(data, dtype).reshape(sizes, order="F" if order else "C")
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def _read_npz(path: Path) -> dict[str, Array]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            check_zip(members, str(path), MAX_ARRAY_BYTES)
            found = {}
            for member in members:
                with archive.open(member) as file:
                    name = member.filename.removesuffix(".npy")
                    found[name] = read_npy(file, member.file_size, f"{path}: {name!r}")
            return found
    except ZIP_FAULTS as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(
            f"{path} is no zip file that can be read: {shortened(str(error), 200)}."
        ) from None


def _all_layers(arrays: Mapping[str, Array], source: Source) -> Trace:
    """Read topk_ids [layers, tokens, k], or [layers, sequences, steps, k] of generated tokens.

    Beside them topk_weights, sample_lengths [samples], layers [layers] (indices in the model),
    num_experts and model, each where known. A step of all sequences is a forward.
    """
    where, ids, weights = source.where, arrays["topk_ids"], arrays.get("topk_weights")
    if ids.dtype.kind not in "iu":
        raise TraceError(f"{where}: topk_ids must be integers, got {ids.dtype}.")
    if ids.ndim not in (3, 4) or not ids.size:
        raise TraceError(
            f"{where}: topk_ids has shape {list(ids.shape)}: expected [layers, tokens, k] or "
            "[layers, sequences, steps, k]."
        )
    if weights is not None and (weights.shape != ids.shape or weights.dtype.kind != "f"):
        raise TraceError(f"{where}: topk_weights are no floats of shape {list(ids.shape)}.")
    stated = arrays.get("num_experts", np.array([]))
    experts = (
        source.agree("experts", int(stated.reshape(()))) if stated.size == 1
        else source.require("experts")
    )  # fmt: skip
    facts: dict[str, Array] = {}
    unit: BatchIs = "file"
    if ids.ndim == 4:
        sequences, steps = ids.shape[1:3]
        ids, weights = _by_step(ids), None if weights is None else _by_step(weights)
        starts, unit = np.arange(steps + 1) * sequences, "forward"
        facts["request"] = np.tile(np.arange(sequences), steps)
        facts["phase"] = np.full(sequences * steps, PHASES.index("decode"), dtype=np.uint8)
    else:
        tokens = ids.shape[1]
        lengths = arrays.get("sample_lengths", np.array([tokens]))
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or lengths.sum() != tokens or (
            lengths < 0
        ).any():  # fmt: skip
            raise TraceError(f"{where}: sample_lengths don't add up to the {tokens} tokens.")
        starts = np.cumsum([0, *lengths])
        if "sample_lengths" in arrays:
            facts["request"], unit = np.repeat(np.arange(len(lengths)), lengths), "sample"
    if "token_request" in arrays:
        labels = arrays["token_request"]
        if labels.shape != ids.shape[1:2] or labels.dtype.kind not in "iu":
            raise TraceError(
                f"{where}: token_request is {labels.dtype} {list(labels.shape)}, expected a "
                f"whole number for each of the {ids.shape[1]} tokens."
            )
        facts["request"] = labels.astype(np.int64)
    indices = arrays.get("layers", np.arange(len(ids)))
    if indices.shape != (len(ids),) or indices.dtype.kind not in "iu":
        raise TraceError(f"{where}: layers has shape {list(indices.shape)}, not [{len(ids)}].")
    model = arrays.get("model", np.array([]))
    return from_choices(
        source, ids, layer_names(indices.tolist()), program="arrays topk_ids", experts=experts,
        starts=starts, batches=unit, weights=weights, scores_are_weights=True, facts=facts,
        model=str(model) if model.ndim == 0 else None,
        notes=["gate scores are taken to be the weights"] if weights is not None else [],
    )  # fmt: skip


def _by_step(array: Array) -> Array:
    """[layers, sequences, steps, k] -> [layers, steps * sequences, k]."""
    layers, _, _, k = array.shape
    steps: Array = array.swapaxes(1, 2).reshape(layers, -1, k)
    return steps


def _requests(arrays: Mapping[str, Array], source: Source) -> Trace:
    """Read an array [tokens, layers, k] per request, as kept from vLLM's `CompletionOutput`."""
    experts = source.require("experts")
    return from_requests(
        source, [check_ids(array, f"{source.where}: {name!r}") for name, array in arrays.items()],
        program="arrays of routed experts, one a request", experts=experts,
        notes=["phases are unknown"],
    )  # fmt: skip
