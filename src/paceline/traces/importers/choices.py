"""From each token's experts, as other programs write them, to a trace: what odd rows mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.traces.chunk import Chunk
from paceline.traces.format import BatchIs, Header, Layer, TraceError
from paceline.traces.trace import CHUNK_TOKENS, Trace

Array = npt.NDArray[Any]


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
    facts: Mapping[str, Array] | None = None,
    model: str | None = None,
    notes: Sequence[str] = (),
) -> Trace:
    """A trace of each token's experts, after the rules for rows that are none.

    A token without ids in every layer is padding. A layer whose rows never name two experts is
    dense and left out; single such rows were not captured and don't count in that layer. Columns
    that are -1 throughout are padding of k. Layers are gone through one by one: a long trace in
    wide integers would not fit twice.

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
    width = _width(table, experts, where)
    if width < table.shape[2]:
        said.append(f"columns {width} to {table.shape[2] - 1} are -1 throughout: k is {width}")
    if k is not None and k != width:
        raise TraceError(f"{where} has k={width}, but k={k} was said.")
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
        said.append(f"{left_out}: no row names two experts, so taken as dense and left out")
    if padding.any():
        said.append(f"{int(padding.sum())} of {padding.size} tokens have no ids and don't count")
    kept = np.flatnonzero(~dense).tolist()
    empty = empty[kept]
    lost = empty & ~padding
    if lost.any():
        said.append(
            f"{int(lost.sum())} rows of a layer name one expert {width} times or none: not "
            "captured, so they don't count in that layer"
        )
    stored = np.empty((len(kept), *table.shape[1:]), dtype=id_dtype(experts))
    for index, layer in enumerate(kept):
        rows = table[layer]
        present = (rows >= 0) & ~empty[index][:, None]
        _check_repeats(rows, present, names[layer], where)
        if weights is not None:
            _check_weights(weights[layer], present, names[layer], where)
        stored[index] = np.where(rows >= 0, rows, experts)
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
        batches=batches, model=model, source=source, scores_are_weights=scores_are_weights,
        notes=tuple(said),
    )  # fmt: skip
    whole = Chunk(
        starts=torch.from_numpy(np.asarray(starts, dtype=np.int64)),
        ids=torch.from_numpy(stored),
        **tensors,
    )
    chunks = tuple(_parts(whole))
    return Trace(header.model_copy(update={"chunks": len(chunks)}), chunks, where)


def id_dtype(experts: int) -> npt.DTypeLike:
    """The smallest integers that hold every expert and `experts` itself, which means none."""
    return np.uint8 if experts < 1 << 8 else np.int16 if experts < 1 << 15 else np.int32


def _width(table: Array, experts: int, where: str) -> int:
    """Columns up to the last that has an id.

    Raises:
        TraceError: if the array has no tokens or ids, or one that is no expert.
    """
    if table.ndim != 3 or table.dtype.kind not in "iu":
        raise TraceError(f"{where}: ids have shape {list(table.shape)}, not [layers, tokens, k].")
    if not table.size:
        raise TraceError(f"{where} has no tokens.")
    for wrong in (int(table.max()), int(table.min())):
        if not -1 <= wrong < experts:
            raise TraceError(
                f"{where} names expert {wrong}: allowed is 0 to {experts - 1}, or -1 for none."
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
            f"{where}: token {token} has weights {weights[token].tolist()} in {name}: allowed are "
            "finite numbers."
        )


def _parts(whole: Chunk) -> Iterator[Chunk]:
    """The chunk in parts of whole batches, each a view, so that work on one stays small."""
    starts = whole.starts
    first = 0
    while first < whole.batches:
        end = int(torch.searchsorted(starts, starts[first] + CHUNK_TOKENS, right=True)) - 1
        end = max(first + 1, min(end, whole.batches))
        rows = slice(int(starts[first]), int(starts[end]))
        yield whole.take(rows, starts[first : end + 1] - starts[first])
        first = end
