"""A trace: a header and chunks that can be gone through again and again, on disk or in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.traces.chunk import Chunk, joined
from paceline.traces.format import Header

CHUNK_TOKENS = 1 << 16
"""Tokens that a chunk made in memory has, or those of one batch."""


class Chunks(Protocol):
    """Chunks that can be gone through again and again; len is about how many, for progress."""

    def __iter__(self) -> Iterator[Chunk]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Trace:
    """What a model's layers chose, batch by batch.

    Attributes:
        header: what was recorded of which layers.
        chunks: some whole batches each, in order; gone through as often as wanted.
        where: file or folder, for messages.
    """

    header: Header
    chunks: Chunks
    where: str = "trace"

    def regrouped(self, tokens: int) -> Trace:
        """The same tokens in batches of `tokens`, the last one with what is left.

        Padding is left out: it takes no place and counts in no batch. Batches of the trace are run
        together, so that this suits traces whose batches were no forwards.

        Raises:
            ValueError: for counts, which can't be cut, or fewer than 1 token.

        >>> from paceline.traces import sample
        >>> [chunk.batches for chunk in sample("esft_v2lite_law").regrouped(256).chunks]
        [16]
        """
        if tokens < 1:
            raise ValueError(f"tokens={tokens} is not allowed: a batch has at least 1.")
        if not self.header.per_token:
            raise ValueError(
                f"{self.where} holds {self.header.content} of whole batches: they can't be cut "
                "into others."
            )
        header = self.header.model_copy(update={"batches": "window"})
        return Trace(header, _Regrouped(self.chunks, tokens), self.where)

    def narrowed(self, layers: Iterable[int]) -> Trace:
        """Only some layers, by index among those of the trace.

        >>> from paceline.traces import sample
        >>> [layer.name for layer in sample("esft_v2lite_law").narrowed([1]).header.layers]
        ['layer 6']
        """
        chosen = list(layers)
        kept = tuple(self.header.layers[layer] for layer in chosen)
        header = self.header.model_copy(update={"layers": kept})
        return Trace(header, _Narrowed(self.chunks, chosen), self.where)


class _Regrouped:
    """Chunks whose batches have so many tokens each."""

    def __init__(self, chunks: Chunks, tokens: int) -> None:
        self._chunks, self._tokens = chunks, tokens

    def __len__(self) -> int:
        return len(self._chunks) + 1

    def __iter__(self) -> Iterator[Chunk]:
        rest: list[Chunk] = []
        waiting = 0
        for chunk in self._chunks:
            part = without_padding(chunk)
            rest.append(part)
            waiting += part.tokens
            if waiting >= self._tokens:
                whole = joined(rest)
                ready = waiting // self._tokens * self._tokens
                most = max(1, CHUNK_TOKENS // self._tokens) * self._tokens
                for start in range(0, ready, most):
                    rows = slice(start, min(ready, start + most))
                    ends = torch.arange(0, rows.stop - rows.start + 1, self._tokens)
                    yield whole.take(rows, ends)
                waiting -= ready
                rest = [whole.take(slice(ready, None), torch.tensor([0, waiting]))]
        if waiting:
            yield joined(rest).take(slice(None), torch.tensor([0, waiting]))


class _Narrowed:
    """Chunks with some of their layers."""

    def __init__(self, chunks: Chunks, layers: list[int]) -> None:
        self._chunks, self._layers = chunks, torch.tensor(layers, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self._chunks:
            yield chunk.of_layers(self._layers)


def without_padding(chunk: Chunk) -> Chunk:
    """The chunk without rows that are padding in every layer."""
    if chunk.valid is None:
        return chunk
    real = chunk.valid if chunk.valid.dim() == 1 else chunk.valid.any(0)
    if bool(real.all()):
        return chunk
    before: Tensor = torch.cat([torch.zeros(1, dtype=torch.int64), real.long().cumsum(0)])
    return chunk.take(real.nonzero().flatten(), before[chunk.starts])
