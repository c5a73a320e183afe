"""Rows that repeat: dummy rows of an engine look like tokens, and so does a shared prompt.

Three public route logs were 31 to 87% one dummy row, while 27% of a real trace repeats too (a
prompt template). So nothing is dropped unasked: what repeats is counted, and a trace without it can
be had.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from paceline.traces.chunk import Chunk
from paceline.traces.trace import Chunks, Trace

Array = npt.NDArray[Any]
Without = Literal["commonest", "repeats"]


@dataclass(frozen=True, eq=False)
class Repeats:
    """How many tokens chose what another token chose, in every layer.

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
    """Find the rows of a trace that repeat; takes some 40 bytes of memory a token.

    Raises:
        ValueError: if the trace doesn't say what each token chose.

    >>> from paceline.traces import sample
    >>> found = repeats(sample("esft_v2lite_intent"))
    >>> found.tokens, found.repeated > 0
    (4096, True)
    """
    if not trace.header.per_token:
        raise ValueError(f"{trace.where} holds {trace.header.content}, not what each token chose.")
    parts = [_hashes(chunk) for chunk in trace.chunks]
    hashes = np.concatenate([part for part, _ in parts])
    valid = np.concatenate([live for _, live in parts])
    is_repeated, is_commonest = np.zeros(len(hashes), bool), np.zeros(len(hashes), bool)
    rows = np.flatnonzero(valid)
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
    """The trace with some rows made padding: every row of the commonest choice, or all repeats.

    >>> from paceline.traces import sample
    >>> trace = sample("esft_v2lite_intent")
    >>> rest = without(trace, "repeats", repeats(trace))
    >>> repeats(rest).repeated
    0
    """
    gone = found.is_commonest if which == "commonest" else found.is_repeated
    return Trace(trace.header, _Masked(trace.chunks, gone), trace.where)


class _Masked:
    """Chunks with some rows made padding."""

    def __init__(self, chunks: Chunks, gone: Array) -> None:
        self._chunks, self._gone = chunks, torch.from_numpy(gone)

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        start = 0
        for chunk in self._chunks:
            stay = ~self._gone[start : start + chunk.tokens]
            start += chunk.tokens
            yield replace(chunk, valid=stay if chunk.valid is None else chunk.valid & stay)


def _hashes(chunk: Chunk) -> tuple[Array, Array]:
    """[tokens] uint64 of all a token's ids, and [tokens] bool whether it is valid anywhere."""
    assert chunk.ids is not None
    layers, tokens, k = chunk.ids.shape
    factors = np.random.default_rng(0).integers(1, 1 << 63, (layers, k), dtype=np.uint64) * 2 + 1
    total = np.zeros(tokens, dtype=np.uint64)
    for layer in range(layers):
        ids = chunk.ids[layer].numpy().astype(np.uint64)
        total += (ids * factors[layer]).sum(1, dtype=np.uint64)
    if chunk.valid is None:
        return total, np.ones(tokens, bool)
    valid = chunk.valid if chunk.valid.dim() == 1 else chunk.valid.any(0)
    return total, valid.numpy()
