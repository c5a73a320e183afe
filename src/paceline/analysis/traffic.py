"""A trace's batches: small pieces to fit a placement on, whole batches to judge it on.

A piece is a part of a batch, of at most 64 tokens where the trace holds each token's choice; else a
whole batch. Memory is bounded: many pieces are merged with their neighbours, and batches are
streamed; only the few that are routed again and again are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from paceline.analysis.expert_map import ExpertMap, Loads
from paceline.analysis.placement_search import MAX_PIECES, PIECE_TOKENS
from paceline.balance import Sample, sample_of
from paceline.placement import ExpertPlacement
from paceline.progress import Progress
from paceline.traces import Trace
from paceline.traces.chunk import Chunk
from paceline.traces.tables import load_tables
from paceline.traces.trace import Chunks

BATCH_TOKENS = 1024
"""Tokens per batch to judge on, where the trace's own batches were no forwards."""

MAX_BATCHES = 32
"""Batches that are routed again and again at most, evenly spaced where there are more."""


@dataclass(frozen=True)
class Part:
    """Consecutive batches of a trace.

    Attributes:
        first: number of the first one.
        end: number after the last one.
    """

    first: int
    end: int


def batches_of(trace: Trace, batch_tokens: int | None) -> Trace:
    """Cut a trace into the batches to judge on: its own forwards, or so many tokens each.

    Raises:
        ValueError: if counts of whole batches are to be cut.

    >>> from paceline.traces import sample
    >>> sum(chunk.batches for chunk in batches_of(sample("esft_v2lite_law"), None).chunks)
    4
    """
    if batch_tokens is None and (trace.header.batches == "forward" or not trace.header.per_token):
        return trace
    return trace.regrouped(BATCH_TOKENS if batch_tokens is None else batch_tokens)


def count_batches(trace: Trace) -> int:
    """Count the batches of a trace."""
    return sum(chunk.batches for chunk in trace.chunks)


def pieces_of(trace: Trace, part: Part, progress: Progress | None = None) -> list[Loads]:
    """Cut some batches into pieces to fit placements on: [layers] tables [pieces, experts].

    Progress is called with the chunks read, of about how many.
    """
    kept: list[Loads] = []
    merged = 1  # pieces summed up in each table that is kept
    waiting: list[Loads] = []
    cut = Trace(trace.header, _Cut(trace.chunks, part), trace.where)
    for done, counts in enumerate(_counts(cut), start=1):
        if progress is not None:
            progress(done, max(done, len(cut.chunks)), "loads to place by")
        for table in counts:
            waiting.append(table)
            if len(waiting) == merged:
                kept.append(np.sum(waiting, axis=0))
                waiting = []
            if len(kept) == 2 * MAX_PIECES:
                kept = [kept[i] + kept[i + 1] for i in range(0, len(kept), 2)]
                merged *= 2
    if waiting:
        kept.append(np.sum(waiting, axis=0))
    if not kept:
        raise ValueError(f"{trace.where} has no batch to place experts by.")
    whole = np.stack(kept)
    return [
        whole[:, layer, : described.experts] for layer, described in enumerate(trace.header.layers)
    ]


def batch_loads(trace: Trace, part: Part) -> Iterator[tuple[list[Loads], Loads]]:
    """Yield some batches at a time: ([layers] tables [batches, experts], [batches] tokens)."""
    start = 0
    k = np.array([layer.k or 1 for layer in trace.header.layers])
    for table in load_tables(trace):
        count = len(table.counts)
        chosen = slice(max(0, part.first - start), max(0, min(count, part.end - start)))
        start += count
        counts = table.counts[chosen].astype(np.float64)
        if not len(counts):
            continue
        known = None if table.tokens is None else table.tokens[chosen]
        tokens = counts.sum(2) / k if known is None else known.astype(np.float64)
        loads = [
            counts[:, layer, : described.experts]
            for layer, described in enumerate(trace.header.layers)
        ]
        yield loads, tokens.max(1)


def sample(trace: Trace, part: Part, devices: int) -> Sample | None:
    """Describe the tokens of some batches; None where the trace holds shares, not counts."""
    layer = trace.header.layers[0]
    if trace.header.content == "shares" or layer.k is None:
        return None
    tokens = sum(int(each.sum()) for _, each in batch_loads(trace, part))
    sizes = ExpertPlacement.contiguous(layer.experts, devices).sizes
    return sample_of(tokens, part.end - part.first, layer.k, sizes)


def spread_over(part: Part, at_most: int) -> list[int]:
    """Choose the numbers of at most so many batches of a part, evenly spaced.

    >>> spread_over(Part(10, 20), at_most=3)
    [10, 13, 16]
    """
    count = part.end - part.first
    kept = min(count, at_most)
    return [part.first + i * count // kept for i in range(kept)]


def picked(trace: Trace, numbers: list[int]) -> Trace:
    """Pick some batches of a trace of choices, by ascending number; they are kept in memory."""
    return Trace(trace.header, tuple(_picked(trace.chunks, numbers)), trace.where)


def _counts(trace: Trace) -> Iterator[Loads]:
    """Yield tables [batches, layers, experts] of a chunk's batches; shares as they are."""
    for table in load_tables(trace):
        yield table.counts.astype(np.float64)


class _Cut:
    """Chunks of some batches only, each batch cut into pieces."""

    def __init__(self, chunks: Chunks, part: Part) -> None:
        self._chunks, self._part = chunks, part

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        start = 0
        for chunk in self._chunks:
            first = max(0, self._part.first - start)
            end = min(chunk.batches, self._part.end - start)
            start += chunk.batches
            if first < end:
                yield _cut(chunk, first, end)


def _picked(chunks: Chunks, numbers: list[int]) -> Iterator[Chunk]:
    """Yield chunks with some batches each."""
    start = 0
    for chunk in chunks:
        mine = [n - start for n in numbers if start <= n < start + chunk.batches]
        start += chunk.batches
        if mine:
            edges = chunk.starts.tolist()
            rows = [torch.arange(edges[n], edges[n + 1]) for n in mine]
            lengths = torch.tensor([0, *(len(part) for part in rows)])
            yield chunk.take(torch.cat(rows), lengths.cumsum(0))


def _cut(chunk: Chunk, first: int, end: int) -> Chunk:
    """Cut batches first to end of a chunk into pieces."""
    part = chunk.part(first, end)
    if part.ids is None:
        return part
    pieces = [s for a, b in pairwise(part.starts.tolist()) for s in range(a, b, PIECE_TOKENS)]
    return replace(part, starts=torch.tensor([*pieces, part.tokens]))


def with_replicas(trace: Trace, maps: Sequence[ExpertMap]) -> Trace:
    """View a trace as an engine with replicas does: slots as experts, replicas taken in turn.

    Args:
        trace: of choices.
        maps: of each layer, with equally many slots.
    """
    layers = tuple(
        layer.model_copy(update={"experts": len(own.slots)})
        for layer, own in zip(trace.header.layers, maps, strict=True)
    )
    # scores of experts that were not chosen have no slot
    content = "choices" if trace.header.content == "scores" else trace.header.content
    header = trace.header.model_copy(update={"layers": layers, "content": content})
    return Trace(header, _Replicated(trace.chunks, maps), trace.where)


class _Replicated:
    """Chunks whose ids are slots."""

    def __init__(self, chunks: Chunks, maps: Sequence[ExpertMap]) -> None:
        self._chunks = chunks
        most = max(max(own.copies) for own in maps)
        self._slots = torch.stack([_slot_table(own, most) for own in maps])
        self._copies = torch.stack([torch.tensor([*own.copies, 1]) for own in maps])

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self._chunks:
            assert chunk.ids is not None
            experts = self._copies.shape[1] - 1
            ids = chunk.ids.long()
            inside = (ids >= 0) & (ids < experts)
            safe = torch.where(inside, ids, experts)
            token = torch.arange(ids.shape[1])[:, None]
            slots = torch.stack(
                [
                    table[own, token % copies[own]]
                    for table, copies, own in zip(self._slots, self._copies, safe, strict=True)
                ]
            )
            topk = chunk.topk_scores
            if topk is None and chunk.scores is not None:
                topk = chunk.scores.gather(2, safe.clamp(max=experts - 1))
            yield replace(chunk, ids=slots, scores=None, topk_scores=topk)


def _slot_table(own: ExpertMap, most: int) -> torch.Tensor:
    """List the slots of each expert, [experts + 1, copies]; the sentinel has none."""
    table = torch.full((own.num_experts + 1, most), len(own.slots), dtype=torch.int64)
    taken = [0] * own.num_experts
    for slot, expert in enumerate(own.slots):
        table[expert, taken[expert]] = slot
        taken[expert] += 1
    return table
