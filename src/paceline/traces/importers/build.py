"""From arrays of other programs to a trace: what padding, dense layers and odd rows mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.traces.chunk import Chunk
from paceline.traces.format import UNKNOWN, BatchIs, Header, Layer, TraceError
from paceline.traces.importers.asked import Asked
from paceline.traces.trace import Trace

Array = npt.NDArray[Any]
MAX_COUNT = 1 << 53
"""Counts above this are no counts."""


def from_counts(
    counts: Array,
    names: Sequence[str],
    *,
    where: str,
    source: str,
    batches: BatchIs,
    k: int | None = None,
    asked: Asked | None = None,
    shares: bool = False,
    model: str | None = None,
    notes: Sequence[str] = (),
) -> Trace:
    """A trace of load tables.

    Layers without any count are dense ones and left out; the notes say so.

    Args:
        counts: [batches, layers, experts] of assignments, or of shares.
        names: of the layers.
        where: file, for errors.
        source: program and format.
        batches: what a batch is.
        k: experts a token, where known.
        asked: whose world_size divides the counts.
        shares: that the table has shares, not numbers.
        model: name.
        notes: what was done so far.

    Raises:
        TraceError: if a count is negative, no whole number, or too large.
    """
    said = list(notes)
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
        said.append(f"{dense}: all zero, so taken as dense and left out")
    table = table[:, used]
    kept = [name for name, any_ in zip(names, used, strict=True) if any_]
    if asked is not None and asked.world_size not in (None, 1):
        if shares or (table % asked.world_size).any():
            raise TraceError(
                f"{where}: world_size={asked.world_size} is not allowed: not every count is a "
                "multiple of it."
            )
        table = table // asked.world_size
        said.append(f"counts divided by world_size={asked.world_size}")
    if k is not None and not shares:
        uneven = table.sum(2) % k
        if uneven.any():
            said.append(f"some tables are no multiple of k={k}: counts of dropped or cut tokens")
    layers = tuple(Layer(name=name, experts=table.shape[2], k=k) for name in kept)
    header = Header(
        content="shares" if shares else "counts", layers=layers, batches=batches, model=model,
        source=source, notes=tuple(said), chunks=1,
    )  # fmt: skip
    chunk = Chunk(
        starts=torch.arange(table.shape[0] + 1),
        counts=torch.from_numpy(np.ascontiguousarray(table[:, :, None, :])),
        group_codes=torch.tensor([[UNKNOWN, UNKNOWN]], dtype=torch.uint8),
    )
    return Trace(header, (chunk,), where)


def from_choices(
    ids: Array,
    names: Sequence[str],
    *,
    where: str,
    source: str,
    experts: int,
    starts: Array,
    batches: BatchIs,
    weights: Array | None = None,
    scores_are_weights: bool = False,
    k: int | None = None,
    facts: dict[str, Array] | None = None,
    model: str | None = None,
    notes: Sequence[str] = (),
) -> Trace:
    """A trace of each token's experts, after the rules for rows that are none.

    A token without ids in every layer is padding. A layer whose rows never name two experts is
    dense and left out; single such rows were not captured and don't count in that layer. Columns
    that are -1 throughout are padding of k.

    Args:
        ids: [layers, tokens, k] integers, -1 for none.
        names: of the layers.
        where: file, for errors.
        source: program and format.
        experts: of each layer.
        starts: [batches + 1] first token of each batch, and the end.
        batches: what a batch is.
        weights: [layers, tokens, k] floats.
        scores_are_weights: whether gate scores of the chosen are the weights.
        k: experts a token that the user said.
        facts: name -> [tokens], see `paceline.traces.chunk.FACTS`.
        model: name.
        notes: what was done so far.

    Raises:
        TraceError: if an id is no expert, a row names one twice, or nothing is left.
    """
    said, table = list(notes), np.asarray(ids)
    if table.ndim != 3 or table.dtype.kind not in "iu":
        raise TraceError(f"{where}: ids have shape {list(table.shape)}, not [layers, tokens, k].")
    if not table.size:
        raise TraceError(f"{where} has no tokens.")
    most = max(int(table[layer].max()) for layer in range(len(table)))
    if most >= experts or int(table.min()) < -1:
        wrong = most if most >= experts else int(table.min())
        raise TraceError(
            f"{where} names expert {wrong}: allowed is 0 to {experts - 1}, or -1 for none."
        )
    present = table >= 0
    columns = np.flatnonzero(present.any((0, 1)))
    width = int(columns[-1]) + 1 if columns.size else 0
    if width == 0:
        raise TraceError(f"{where} has no ids: all of them are -1.")
    if width < table.shape[2]:
        said.append(f"columns {width} to {table.shape[2] - 1} are -1 throughout: k is {width}")
        table, present = table[:, :, :width], present[:, :, :width]
        weights = None if weights is None else weights[:, :, :width]
    if k is not None and k != width:
        raise TraceError(f"{where} has k={width}, but k={k} was said.")
    blank = ~present.any(2)
    alike = present.all(2) & (table == table[:, :, :1]).all(2) if width > 1 else blank & False
    empty = alike | blank
    padding = blank.all(0)
    dense = np.asarray((empty | padding).all(1))
    if dense.all():
        raise TraceError(f"{where} has no row that names {width} experts: nothing was captured.")
    if dense.any():
        dropped = ", ".join(name for name, is_dense in zip(names, dense, strict=True) if is_dense)
        said.append(f"{dropped}: no row names two experts, so taken as dense and left out")
    kept: Array = ~dense
    table, present, empty = table[kept], present[kept], empty[kept]
    weights = None if weights is None else weights[kept]
    if padding.any():
        said.append(f"{int(padding.sum())} of {padding.size} tokens have no ids and don't count")
    lost = empty & ~padding
    if lost.any():
        said.append(
            f"{int(lost.sum())} rows of a layer name one expert {width} times or none: not "
            "captured, so they don't count in that layer"
        )
    if weights is not None and not np.isfinite(weights[present]).all():
        layer, token, _ = (int(i) for i in np.argwhere(~np.isfinite(weights) & present)[0])
        raise TraceError(
            f"{where}: token {token} has weights {weights[layer, token].tolist()}: allowed are "
            "finite numbers."
        )
    _check_repeats(table, present & ~empty[:, :, None], where)
    real = ~empty
    real = real[0] if (real == real[:1]).all() else real
    tensors: dict[str, Any] = {} if real.all() else {"valid": torch.from_numpy(real.copy())}
    for name, values in (facts or {}).items():
        tensors[name] = torch.from_numpy(np.array(values, order="C"))
    layers = tuple(
        Layer(name=name, experts=experts, k=width)
        for name, is_kept in zip(names, kept, strict=True)
        if is_kept
    )
    header = Header(
        content="choices", layers=layers, batches=batches, model=model, source=source,
        scores_are_weights=scores_are_weights, notes=tuple(said), chunks=1,
    )  # fmt: skip
    stored = np.where(present, table, experts).astype(id_dtype(experts))
    chunk = Chunk(
        starts=torch.from_numpy(np.asarray(starts, dtype=np.int64)),
        ids=torch.from_numpy(stored),
        weights=None if weights is None else torch.from_numpy(np.array(weights, order="C")),
        **tensors,
    )
    return Trace(header, (chunk,), where)


def id_dtype(experts: int) -> npt.DTypeLike:
    """The smallest integers that hold every expert and `experts` itself, which means none."""
    return np.uint8 if experts < 1 << 8 else np.int16 if experts < 1 << 15 else np.int32


def _check_repeats(table: Array, present: Array, where: str) -> None:
    """Refuse a row that names an expert twice: no router does that."""
    width = table.shape[2]
    for a in range(width):
        for b in range(a + 1, width):
            twice = (table[:, :, a] == table[:, :, b]) & present[:, :, a] & present[:, :, b]
            if twice.any():
                layer, token = (int(i) for i in np.argwhere(twice)[0])
                raise TraceError(
                    f"{where}: token {token} names expert {int(table[layer, token, a])} twice in "
                    f"one row (layer {layer} of those with experts): a router names each once."
                )


def layer_names(indices: Sequence[int] | range) -> list[str]:
    """Names of layers known by number."""
    return [f"layer {index}" for index in indices]
