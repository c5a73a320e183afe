"""Recordings of several ranks as one trace: their tokens side by side, forward by forward.

Under data parallelism every rank sees its own tokens, and a layer with expert parallelism computes
those of all ranks at once: batch b of the whole is batch b of every rank. Under tensor parallelism
all ranks see the same tokens and record them again and again: such copies count once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.traces.chunk import PER_CHOICE, Chunk, joined
from paceline.traces.format import UNKNOWN, TraceError
from paceline.traces.trace import Chunks, LazyChunks, Trace


@dataclass(frozen=True, eq=False)
class _Rank:
    """One recording, read once.

    Attributes:
        batches: digest of the choices of each batch.
        held: names of the tensors that every chunk has.
    """

    trace: Trace
    batches: tuple[bytes, ...]
    held: frozenset[str]


def combined(traces: Sequence[Trace]) -> Trace:
    """Join traces: whole files one after the other, recordings of forwards side by side.

    A file that doesn't tell forwards apart, such as a table of counts per kind of traffic, is a
    batch of its own. Recordings of forwards are those of the ranks of one run (`merged`).

    Raises:
        TraceError: if they are not of one model and content, or can't be joined.

    >>> from paceline.traces import sample
    >>> combined([sample("esft_v2lite_law")]).header.batches
    'sample'
    """
    if len(traces) == 1:
        return traces[0]
    if not traces or any(trace.header.batches == "forward" for trace in traces):
        return merged(traces)
    for trace in traces[1:]:
        _check_alike(traces[0], trace)
    first, parts = traces[0].header, [trace.chunks for trace in traces]
    notes = list(dict.fromkeys(note for trace in traces for note in trace.header.notes))
    notes.append(f"{len(traces)} files one after the other, each with batches of its own")
    count = sum(map(len, parts))
    return Trace(
        first.model_copy(update={"notes": tuple(notes), "chunks": count}),
        LazyChunks(count, lambda: chain.from_iterable(parts)),
        f"{len(traces)} files, {traces[0].where} and on",
    )


def merged(traces: Sequence[Trace]) -> Trace:
    """Merge the recordings of several ranks of one run into one trace.

    A token without a recorded source device gets the number of its rank. Memory holds
    a chunk of each, and 16 bytes per batch.

    Args:
        traces: of the ranks, in order; read again and again.

    Raises:
        TraceError: if they are not of one model and content, or can't be put side by side.

    >>> from paceline.traces import sample
    >>> trace = sample("gpt_oss_20b_decode")
    >>> merged([trace, trace]).header.notes[-1][:52]
    '1 of 2 recordings repeat another one to the id, as r'
    """
    if not traces:
        raise TraceError("there is no recording to merge.")
    first = traces[0].header
    for trace in traces[1:]:
        _check_alike(traces[0], trace)
    if first.content == "shares":
        raise TraceError(f"{traces[0].where} holds shares without totals: they can't be added up.")
    ranks = [_read(trace) for trace in traces]
    kept: list[_Rank] = []
    for rank in sorted(ranks, key=lambda rank: -len(rank.batches)):
        # of copies that a crash cut off the longest one counts
        if not any(rank.batches == other.batches[: len(rank.batches)] for other in kept):
            kept.append(rank)
    kept.sort(key=ranks.index)
    notes = list(dict.fromkeys(note for trace in traces for note in trace.header.notes))
    if copies := len(ranks) - len(kept):
        notes.append(
            f"{copies} of {len(ranks)} recordings repeat another one to the id, as ranks of tensor "
            "parallelism do: counted once"
        )
    if len(kept) == 1:
        header = first.model_copy(update={"notes": tuple(notes)})
        return Trace(header, kept[0].trace.chunks, kept[0].trace.where)
    notes += _notes(kept)
    held = frozenset.intersection(*(rank.held for rank in kept))
    batches = min(len(rank.batches) for rank in kept)
    header = first.model_copy(update={"notes": tuple(notes)})
    where = f"{len(traces)} recordings, {traces[0].where} and on"
    chunks = [rank.trace.chunks for rank in kept]
    most = max(map(len, chunks))
    return Trace(header, LazyChunks(most, lambda: _side_by_side(chunks, held, batches)), where)


def _check_alike(one: Trace, other: Trace) -> None:
    """Refuse recordings that are not of the same layers, content and meaning."""
    for name in ("content", "layers", "batches", "scores_are_weights"):
        ours, theirs = getattr(one.header, name), getattr(other.header, name)
        if ours != theirs:
            found = (
                f"{len(theirs)} layers like {theirs[0].name!r}, not {len(ours)} like "
                f"{ours[0].name!r}, or of other sizes"
                if name == "layers"
                else f"{name}={theirs!r}, not {ours!r}"
            )
            raise TraceError(f"{other.where} has {found}: ranks of one run are alike.")


def _read(trace: Trace) -> _Rank:
    batches: list[bytes] = []
    held: frozenset[str] | None = None
    for chunk in trace.chunks:
        names = frozenset(chunk.tensors())
        held = names if held is None else held & names
        batches += _digests(chunk)
    if not batches:
        raise TraceError(f"{trace.where} has no batches.")
    return _Rank(trace, tuple(batches), held or frozenset())


def _digests(chunk: Chunk) -> Iterator[bytes]:
    """Hash the choices of each batch of a chunk, whatever dtype they are kept in."""
    if chunk.ids is None:
        assert chunk.counts is not None
        for table in chunk.counts:
            yield _digest(table.sum(1).numpy())
        return
    tokens = chunk.ids.transpose(0, 1).contiguous().numpy()
    for start, end in pairwise(chunk.starts.tolist()):
        yield _digest(tokens[start:end])


def _digest(array: npt.NDArray[Any]) -> bytes:
    return hashlib.blake2b(array.astype(np.int64).tobytes(), digest_size=16).digest()


def _notes(kept: Sequence[_Rank]) -> list[str]:
    """Describe how recordings that differ are merged."""
    counts = [len(rank.batches) for rank in kept]
    notes = [f"{len(kept)} recordings side by side: batch by batch, each with its own tokens"]
    if len(set(counts)) > 1:
        notes.append(
            f"the recordings have {min(counts)} to {max(counts)} batches: what goes beyond the "
            "shortest is left out"
        )
    for index, one in enumerate(kept):
        for other in kept[index + 1 :]:
            pairs = list(zip(one.batches, other.batches, strict=False))
            alike = sum(a == b for a, b in pairs)
            if 2 * alike >= len(pairs):
                notes.append(
                    f"{alike} of {len(pairs)} batches of {one.trace.where} and {other.trace.where} "
                    "are the same: if they are copies of one another, import one of them alone"
                )
    return notes


def _side_by_side(ranks: Sequence[Chunks], held: frozenset[str], batches: int) -> Iterator[Chunk]:
    """Iterate over chunks whose batches hold those of all ranks."""
    streams = [iter(chunks) for chunks in ranks]
    waiting: list[Chunk | None] = [None] * len(streams)
    while batches:
        ready = []
        for rank, stream in enumerate(streams):
            part = waiting[rank]
            while part is None or not part.batches:
                part = next(stream)
            ready.append(part)
        count = min(batches, *(part.batches for part in ready))
        taken = [part.part(0, count) for part in ready]
        waiting = [part.part(count, part.batches) for part in ready]
        batches -= count
        yield _added(taken) if taken[0].ids is None else _interleaved(taken, held)


def _interleaved(parts: Sequence[Chunk], held: frozenset[str]) -> Chunk:
    """Put batch b of every rank side by side, with the tensors that all ranks have."""
    lacking: dict[str, Any] = {name: None for name in PER_CHOICE if name not in held}
    ranks = len(parts)
    whole = joined(
        [
            replace(
                part,
                # labels of several ranks are not to meet
                request=None if part.request is None else part.request * ranks + rank,
                source=torch.full((part.tokens,), rank, dtype=torch.int32)
                if part.source is None
                else part.source,
                **lacking,
            )
            for rank, part in enumerate(parts)
        ]
    )
    # joined: all batches of rank 0, then all of rank 1; here: batch 0 of all ranks, ...
    edges, batches = whole.starts.tolist(), parts[0].batches
    order = [rank * batches + b for b in range(batches) for rank in range(ranks)]
    rows = torch.cat([torch.arange(edges[o], edges[o + 1]) for o in order])
    sizes = sum(part.starts.diff() for part in parts)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.as_tensor(sizes).cumsum(0)])
    return whole.take(rows, starts)


def _added(parts: Sequence[Chunk]) -> Chunk:
    """Add up counts, group by group."""
    codes = sorted({tuple(code) for part in parts for code in _codes(part)})
    first = parts[0].counts
    assert first is not None
    shape = (*first.shape[:2], len(codes), first.shape[3])
    counts = torch.zeros(shape, dtype=torch.int64)
    known = all(part.rows is not None for part in parts)
    rows = torch.zeros(shape[:3], dtype=torch.int64) if known else None
    for part in parts:
        at = torch.tensor([codes.index(tuple(code)) for code in _codes(part)])
        assert part.counts is not None
        counts.index_add_(2, at, part.counts.long())
        if rows is not None and part.rows is not None:
            rows.index_add_(2, at, part.rows)
    return Chunk(
        starts=parts[0].starts,
        counts=counts,
        group_codes=torch.tensor(codes, dtype=torch.uint8),
        rows=rows,
    )


def _codes(chunk: Chunk) -> list[list[int]]:
    codes = chunk.group_codes
    return [[UNKNOWN, UNKNOWN]] if codes is None else codes.tolist()
