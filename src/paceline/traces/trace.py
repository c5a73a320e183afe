"""A trace: a header and chunks that can be gone through again and again, on disk or in memory.

Also views of it: other batches, some of its layers, or without rows that repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.traces.chunk import Chunk, joined
from paceline.traces.format import Header

Array = npt.NDArray[Any]
Without = Literal["commonest", "repeats"]

CHUNK_TOKENS = 1 << 16
"""Tokens per chunk made in memory, unless a single batch has more."""


class Chunks(Protocol):
    """Chunks that can be gone through again and again; len is about how many, for progress."""

    def __iter__(self) -> Iterator[Chunk]: ...

    def __len__(self) -> int: ...


class LazyChunks:
    """Chunks that are made while they are gone through.

    Args:
        count: about how many there are.
        start: makes an iterator over them, from the first.
    """

    def __init__(self, count: int, start: Callable[[], Iterator[Chunk]]) -> None:
        self._count, self._start = count, start

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Chunk]:
        return self._start()


@dataclass(frozen=True, eq=False)
class Trace:
    """The routing of a model's layers, batch by batch.

    Attributes:
        header: what was recorded of which layers.
        chunks: some whole batches each, in order.
    """

    header: Header
    chunks: Chunks
    where: str = "trace"

    def require_choices(self) -> None:
        """Raise ValueError if the trace doesn't hold what each token chose."""
        if not self.header.per_token:
            raise ValueError(
                f"{self.where} holds {self.header.content}, not what each token chose."
            )

    def regrouped(self, tokens: int) -> Trace:
        """Cut the same tokens into batches of `tokens`, the last one with what is left.

        Padding is left out: it takes no place and counts in no batch. Batches of the trace are run
        together, so that this suits traces whose batches were no forwards.

        Raises:
            ValueError: for counts, which can't be cut, or fewer than 1 token.

        >>> from paceline.traces import sample
        >>> [chunk.batches for chunk in sample("esft_v2lite_law").regrouped(256).chunks]
        [16]
        """
        if tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {tokens}.")
        if not self.header.per_token:
            raise ValueError(
                f"{self.where} holds {self.header.content} of whole batches: they can't be cut "
                "into others."
            )
        header = self.header.model_copy(update={"batches": "window"})
        chunks = LazyChunks(len(self.chunks) + 1, lambda: _regroup(self.chunks, tokens))
        return Trace(header, chunks, self.where)

    def select_layers(self, layers: Iterable[int]) -> Trace:
        """Keep some layers alone, by index among those of the trace.

        >>> from paceline.traces import sample
        >>> [layer.name for layer in sample("esft_v2lite_law").select_layers([1]).header.layers]
        ['layer 6']
        """
        chosen = torch.tensor(list(layers), dtype=torch.int64)
        kept = tuple(self.header.layers[layer] for layer in chosen.tolist())
        header = self.header.model_copy(update={"layers": kept})
        chunks = LazyChunks(
            len(self.chunks), lambda: (chunk.of_layers(chosen) for chunk in self.chunks)
        )
        return Trace(header, chunks, self.where)


def _regroup(chunks: Chunks, tokens: int) -> Iterator[Chunk]:
    rest: list[Chunk] = []
    waiting = 0
    for chunk in chunks:
        part = without_padding(chunk)
        rest.append(part)
        waiting += part.tokens
        if waiting >= tokens:
            whole = joined(rest)
            ready = waiting // tokens * tokens
            most = max(1, CHUNK_TOKENS // tokens) * tokens
            for start in range(0, ready, most):
                rows = slice(start, min(ready, start + most))
                ends = torch.arange(0, rows.stop - rows.start + 1, tokens)
                yield whole.take(rows, ends)
            waiting -= ready
            rest = [whole.take(slice(ready, None), torch.tensor([0, waiting]))]
    if waiting:
        yield joined(rest).take(slice(None), torch.tensor([0, waiting]))


def without_padding(chunk: Chunk) -> Chunk:
    """Remove the rows that are padding in every layer."""
    real = _live(chunk)
    if bool(real.all()):
        return chunk
    before: Tensor = torch.cat([torch.zeros(1, dtype=torch.int64), real.long().cumsum(0)])
    return chunk.take(real.nonzero().flatten(), before[chunk.starts])


def _live(chunk: Chunk) -> Tensor:
    """Mark the rows [tokens] bool that are tokens in some layer."""
    if chunk.valid is None:
        return torch.ones(chunk.tokens, dtype=torch.bool)
    return chunk.valid if chunk.valid.dim() == 1 else chunk.valid.any(0)


# -- rows that repeat ------------------------------------------------------------------------------
# Three public route logs were 31 to 87% one dummy row, while 27% of a real trace repeats too (a
# prompt template). So nothing is dropped unasked: repeats are counted, and can be masked.


@dataclass(frozen=True, eq=False)
class Repeats:
    """Tokens that chose what another token chose, in every layer.

    Attributes:
        tokens: valid ones.
        commonest: how many of them share the commonest choice.
        repeated: how many of them repeat an earlier one.
        is_commonest: [rows] bool, of the trace's rows, padding included.
        is_repeated: [rows] bool.
    """

    tokens: int
    commonest: int
    repeated: int
    is_commonest: Array
    is_repeated: Array


def repeats(trace: Trace) -> Repeats:
    """Find the rows of a trace that repeat; takes some 40 bytes of memory per token.

    Raises:
        ValueError: if the trace doesn't hold what each token chose.

    >>> from paceline.traces import sample
    >>> found = repeats(sample("esft_v2lite_intent"))
    >>> found.tokens, found.repeated > 0
    (4096, True)
    """
    trace.require_choices()
    parts = [(_hashes(chunk), _live(chunk).numpy()) for chunk in trace.chunks]
    hashes = np.concatenate([part for part, _ in parts])
    rows = np.flatnonzero(np.concatenate([live for _, live in parts]))
    is_repeated, is_commonest = np.zeros(len(hashes), bool), np.zeros(len(hashes), bool)
    if not len(rows):
        return Repeats(0, 0, 0, is_commonest, is_repeated)
    values, first, counts = np.unique(hashes[rows], return_index=True, return_counts=True)
    is_repeated[rows] = True
    is_repeated[rows[first]] = False
    # of several as common, the first in the trace
    most = max(np.flatnonzero(counts == counts.max()), key=lambda i: -int(first[i]))
    is_commonest[rows] = hashes[rows] == values[most]
    return Repeats(
        len(rows), int(counts[most]), int(is_repeated.sum()), is_commonest, is_repeated
    )  # fmt: skip


def without(trace: Trace, which: Without, found: Repeats) -> Trace:
    """Make some rows padding: every row of the commonest choice, or all repeats.

    >>> from paceline.traces import sample
    >>> trace = sample("esft_v2lite_intent")
    >>> rest = without(trace, "repeats", repeats(trace))
    >>> repeats(rest).repeated
    0
    """
    gone = torch.from_numpy(found.is_commonest if which == "commonest" else found.is_repeated)
    chunks = LazyChunks(len(trace.chunks), lambda: _mask(trace.chunks, gone))
    return Trace(trace.header, chunks, trace.where)


def _mask(chunks: Chunks, gone: Tensor) -> Iterator[Chunk]:
    start = 0
    for chunk in chunks:
        stay = ~gone[start : start + chunk.tokens]
        start += chunk.tokens
        yield replace(chunk, valid=stay if chunk.valid is None else chunk.valid & stay)


def _hashes(chunk: Chunk) -> Array:
    """Hash all ids of each token, [tokens] uint64."""
    assert chunk.ids is not None
    layers, tokens, k = chunk.ids.shape
    factors = np.random.default_rng(0).integers(1, 1 << 63, (layers, k), dtype=np.uint64) * 2 + 1
    total = np.zeros(tokens, dtype=np.uint64)
    for layer in range(layers):
        ids = chunk.ids[layer].numpy().astype(np.uint64)
        total += (ids * factors[layer]).sum(1, dtype=np.uint64)
    return total
