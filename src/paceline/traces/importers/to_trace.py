"""Traces from tables of counts and of each token's experts; what odd rows of them mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.traces.chunk import Chunk, id_dtype
from paceline.traces.format import UNKNOWN, BatchIs, Header, Layer, TraceError
from paceline.traces.importers.source import Source
from paceline.traces.trace import CHUNK_TOKENS, Trace

Array = npt.NDArray[Any]
MAX_COUNT = 1 << 53
"""Counts above this are refused."""


def layer_names(indices: Sequence[int] | range) -> list[str]:
    """Name layers that are known by number."""
    return [f"layer {index}" for index in indices]


def from_counts(
    source: Source,
    counts: Array,
    names: Sequence[str],
    *,
    program: str,
    batches: BatchIs,
    k: int | None = None,
    shares: bool = False,
    model: str | None = None,
    notes: Sequence[str] = (),
) -> Trace:
    """Make a trace of load tables [batches, layers, experts] of assignments, or of shares.

    Layers without any count are dense ones and left out; the notes say so. Counts are divided by
    the world size that the user gave. `program` names the file's writer and its format; k is the
    user's where the file doesn't state it.

    Raises:
        TraceError: if a count is negative, no whole number, or too large.
    """
    where, remarks, k = source.where, [*source.remarks, *notes], k or source.options.k
    table = np.asarray(counts, dtype=np.float64 if shares else None)
    if not shares:
        if not np.isfinite(table).all() or (table != np.round(table)).any():
            raise TraceError(f"{where} has counts that are no whole numbers.")
        if table.size and (table.min() < 0 or table.max() > MAX_COUNT):
            raise TraceError(f"{where} has a count outside 0 to {MAX_COUNT}.")
        table = table.astype(np.int64)
    elif not np.isfinite(table).all() or (table.size and table.min() < 0):
        raise TraceError(f"{where} has a share that is negative or no number.")
    used = np.asarray(table.any(axis=(0, 2)) if table.size else np.zeros(len(names), bool))
    if not used.any():
        raise TraceError(f"{where} has no counts: all of it is zero.")
    if not used.all():
        dense = ", ".join(name for name, any_ in zip(names, used, strict=True) if not any_)
        remarks.append(f"{dense}: all zero, so taken as dense and left out")
    table = table[:, used]
    world_size = source.options.world_size or 1
    if world_size > 1 and not shares:  # shares are what they are however often they were counted
        if (table % world_size).any():
            raise TraceError(
                f"{where}: world_size must divide every count, got world_size={world_size}."
            )
        table = table // world_size
        remarks.append(f"counts divided by world_size={world_size}")
    if k is not None and not shares and (table.sum(2) % k).any():
        remarks.append(f"some tables are no multiple of k={k}: counts of dropped or cut tokens")
    kept = [name for name, any_ in zip(names, used, strict=True) if any_]
    header = Header(
        content="shares" if shares else "counts",
        layers=tuple(Layer(name=name, experts=table.shape[2], k=k) for name in kept),
        batches=batches, model=model, source=program, notes=tuple(remarks), chunks=1,
    )  # fmt: skip
    chunk = Chunk(
        starts=torch.arange(table.shape[0] + 1),
        counts=torch.from_numpy(np.ascontiguousarray(table[:, :, None, :])),
        group_codes=torch.tensor([[UNKNOWN, UNKNOWN]], dtype=torch.uint8),
    )
    return Trace(header, (chunk,), where)


def from_choices(
    source: Source,
    ids: Array,
    names: Sequence[str],
    *,
    program: str,
    experts: int,
    starts: Array,
    batches: BatchIs,
    weights: Array | None = None,
    scores_are_weights: bool = False,
    facts: Mapping[str, Array] | None = None,
    model: str | None = None,
    notes: Sequence[str] = (),
) -> Trace:
    """Make a trace of each token's experts.

    A token without ids in every layer is padding. A layer whose rows never name two experts is
    dense and left out; single such rows were not captured and don't count in that layer. Columns
    that are -1 throughout are padding of k. Layers are gone through one by one: a long trace in
    wide integers would not fit twice.

    Args:
        source: file or folder; where its user gave k, the table must have it.
        ids: [layers, tokens, k] integers, -1 for none.
        program: that wrote the file, and its format.
        experts: per layer.
        starts: [batches + 1] first token of each batch, and the end.
        batches: meaning of a batch.
        weights: [layers, tokens, k] floats.
        scores_are_weights: gate scores of the chosen experts are the weights.
        facts: name -> [tokens], see `paceline.traces.chunk.FACTS`.
        notes: on what was done so far.

    Raises:
        TraceError: if an id is no expert, a row names one twice, or nothing is left.
    """
    where, remarks, table = source.where, [*source.remarks, *notes], np.asarray(ids)
    width = _width(table, experts, where)
    if width < table.shape[2]:
        remarks.append(f"columns {width} to {table.shape[2] - 1} are -1 throughout: k is {width}")
    source.agree("k", width)
    table = table[:, :, :width]
    weights = None if weights is None else weights[:, :, :width]
    blank, alike = np.zeros((2, *table.shape[:2]), dtype=bool)
    for layer, rows in enumerate(table):
        blank[layer] = (rows < 0).all(1)
        alike[layer] = (width > 1) & (rows >= 0).all(1) & (rows == rows[:, :1]).all(1)
    empty = alike | blank
    padding = blank.all(0)
    dense = np.asarray((empty | padding).all(1))
    if dense.all():
        raise TraceError(f"{where} has no row that names {width} experts: nothing was captured.")
    if dense.any():
        left_out = ", ".join(name for name, is_dense in zip(names, dense, strict=True) if is_dense)
        remarks.append(f"{left_out}: no row names two experts, so taken as dense and left out")
    if padding.any():
        remarks.append(f"{int(padding.sum())} of {padding.size} tokens have no ids and don't count")
    kept = np.flatnonzero(~dense).tolist()
    empty = empty[kept]
    lost = empty & ~padding
    if lost.any():
        remarks.append(
            f"{int(lost.sum())} rows of a layer name one expert {width} times or none: they don't "
            "count in that layer"
        )
    stored = torch.empty((len(kept), *table.shape[1:]), dtype=id_dtype(experts))
    for index, layer in enumerate(kept):
        rows = table[layer]
        present = (rows >= 0) & ~empty[index][:, None]
        _check_repeats(rows, present, names[layer], where)
        if weights is not None:
            _check_weights(weights[layer], present, names[layer], where)
        stored[index] = torch.from_numpy(np.where(rows >= 0, rows, experts).astype(np.int64))
    real = ~empty
    real = real[0] if (real == real[:1]).all() else real
    tensors: dict[str, Any] = {} if real.all() else {"valid": torch.from_numpy(real.copy())}
    for name, values in (facts or {}).items():
        tensors[name] = torch.from_numpy(np.array(values, order="C"))
    if weights is not None:  # the largest array: not copied where it may stay
        chosen = weights if len(kept) == len(weights) else weights[kept]
        tensors["weights"] = torch.from_numpy(np.ascontiguousarray(chosen))
    header = Header(
        content="choices",
        layers=tuple(Layer(name=names[layer], experts=experts, k=width) for layer in kept),
        batches=batches, model=model, source=program, scores_are_weights=scores_are_weights,
        notes=tuple(remarks),
    )  # fmt: skip
    whole = Chunk(
        starts=torch.from_numpy(np.asarray(starts, dtype=np.int64)),
        ids=stored,
        **tensors,
    )
    chunks = tuple(_parts(whole))
    return Trace(header.model_copy(update={"chunks": len(chunks)}), chunks, where)


def even(rows: Mapping[int, Sequence[Any]], k: int) -> tuple[Array, list[str]]:
    """Stack the ids of layers that may have different numbers of rows.

    Engines compute a last layer for output tokens alone, and logs lose rows. Shorter layers are
    filled up with -1, so that every layer is counted with all the rows that it has.

    Args:
        rows: layer -> flat ids [tokens x k].

    Returns:
        [layers, tokens, k] ids in the order of the layers' numbers, and notes.
    """
    indices = sorted(rows)
    lengths = [len(rows[index]) // k for index in indices]
    table = np.full((len(indices), max(lengths), k), -1, dtype=np.int64)
    for own, index, length in zip(table, indices, lengths, strict=True):
        own[:length] = np.asarray(rows[index]).reshape(-1, k)
    if len(set(lengths)) == 1:
        return table, []
    return table, [
        f"layers have {min(lengths)} to {max(lengths)} rows: each is counted with all of its own, "
        "and rows of different layers are not of one token"
    ]


def from_requests(
    source: Source,
    parts: Sequence[Array],
    *,
    program: str,
    experts: int,
    phases: Sequence[Array] | None = None,
    notes: Sequence[str] = (),
) -> Trace:
    """Make a trace of ids [tokens, layers, k] and phases [tokens] per request, each a batch.

    Raises:
        TraceError: if the arrays differ in layers or k, or as `from_choices` does.
    """
    if len(shapes := {part.shape[1:] for part in parts}) != 1:
        raise TraceError(f"{source.where} has ids of several shapes [layers, k]: {shapes}.")
    lengths = [len(part) for part in parts]
    facts: dict[str, Array] = {"request": np.repeat(np.arange(len(parts)), lengths)}
    if phases is not None:
        facts["phase"] = np.concatenate(phases)
    return from_choices(
        source, np.concatenate(parts).swapaxes(0, 1), layer_names(range(parts[0].shape[1])),
        program=program, experts=experts, starts=np.cumsum([0, *lengths]), batches="request",
        facts=facts, notes=["logical ids before the engine's replication; no weights", *notes],
    )  # fmt: skip


def check_ids(array: Array, what: str) -> Array:
    """Return ids [tokens, layers, k] as int64.

    Raises:
        TraceError: if the array has other axes, or holds no integers.
    """
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise TraceError(
            f"{what} has shape {list(array.shape)} and dtype {array.dtype}, expected ids [tokens, "
            "layers, k]."
        )
    return array.astype(np.int64)


def _width(table: Array, experts: int, where: str) -> int:
    """Count the columns up to the last that has an id, and check the ids."""
    if table.ndim != 3 or table.dtype.kind not in "iu":
        raise TraceError(f"{where}: ids have shape {list(table.shape)}, not [layers, tokens, k].")
    if not table.size:
        raise TraceError(f"{where} has no tokens.")
    for wrong in (int(table.max()), int(table.min())):
        if not -1 <= wrong < experts:
            raise TraceError(
                f"{where} names expert {wrong}: ids must be 0 to {experts - 1}, or -1 for none."
            )
    columns = np.flatnonzero(table.max((0, 1)) >= 0)
    if not columns.size:
        raise TraceError(f"{where} has no ids: all of them are -1.")
    return int(columns[-1]) + 1


def _check_repeats(rows: Array, present: Array, name: str, where: str) -> None:
    """Refuse a row that names an expert twice: no router does that."""
    for a in range(rows.shape[1]):
        for b in range(a + 1, rows.shape[1]):
            twice = (rows[:, a] == rows[:, b]) & present[:, a] & present[:, b]
            if twice.any():
                token = int(twice.argmax())
                raise TraceError(
                    f"{where}: token {token} names expert {int(rows[token, a])} twice in {name}: a "
                    "router names each once."
                )


def _check_weights(weights: Array, present: Array, name: str, where: str) -> None:
    """Refuse a weight of an expert that is no finite number."""
    wrong = (~np.isfinite(weights) & present).any(1)
    if wrong.any():
        token = int(wrong.argmax())
        raise TraceError(
            f"{where}: token {token} has weights {weights[token].tolist()} in {name}: they must be "
            "finite numbers."
        )


def _parts(whole: Chunk) -> Iterator[Chunk]:
    """Cut a chunk into parts of whole batches, each a view, so that work on one stays small."""
    starts = whole.starts
    first = 0
    while first < whole.batches:
        end = int(torch.searchsorted(starts, starts[first] + CHUNK_TOKENS, right=True)) - 1
        end = max(first + 1, min(end, whole.batches))
        rows = slice(int(starts[first]), int(starts[end]))
        yield whole.take(rows, starts[first : end + 1] - starts[first])
        first = end
