"""Load tables of a trace, some batches at a time: the loads of every expert in every batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.traces.chunk import Chunk
from paceline.traces.format import MODALITIES, PHASES, UNKNOWN, Header
from paceline.traces.trace import Trace

Array = npt.NDArray[Any]
Group = tuple[str, str]
"""Names of a phase and a modality; "unknown" where it wasn't recorded."""


_MOST_CELLS = 1 << 23
"""Largest number of cells of a table: a small file may name many batches, layers and experts."""


@dataclass(frozen=True, eq=False)
class LoadTable:
    """Loads of some batches.

    Attributes:
        counts: [batches, layers, experts] int64 assignments, or float64 shares.
        tokens: [batches, layers] int64 valid tokens, None where unknown.
        groups: phase and modality -> [batches, layers, experts], of these rows alone.
        group_tokens: phase and modality -> [layers] int64 tokens, empty where unknown.
    """

    counts: Array
    tokens: Array | None
    groups: dict[Group, Array]
    group_tokens: dict[Group, Array]


def load_tables(trace: Trace) -> Iterator[LoadTable]:
    """Yield the loads of every batch, some batches at a time; experts past a layer's own are 0.

    >>> from paceline.traces import sample
    >>> [table.counts.shape for table in load_tables(sample("gpt_oss_20b_decode"))]
    [(64, 6, 32)]
    """
    header = trace.header
    at_once = max(1, _MOST_CELLS // (len(header.layers) * header.experts))
    for chunk in trace.chunks:
        if chunk.ids is None:
            yield _of_counts(chunk, header)
            continue
        for first in range(0, chunk.batches, at_once):
            yield _of_choices(chunk.part(first, min(first + at_once, chunk.batches)), header)


def _of_choices(chunk: Chunk, header: Header) -> LoadTable:
    assert chunk.ids is not None
    starts = chunk.starts.numpy()
    batches, layers, experts = chunk.batches, len(header.layers), header.experts
    batch_of = np.repeat(np.arange(batches), np.diff(starts))
    counts = np.zeros((batches, layers, experts), dtype=np.int64)
    tokens = np.zeros((batches, layers), dtype=np.int64)
    groups: dict[Group, Array] = {}
    group_tokens: dict[Group, Array] = {}
    for layer, described in enumerate(header.layers):
        ids = chunk.ids[layer, :, : described.k].numpy().astype(np.int64)
        valid = _fact(chunk, "valid", layer)
        live = slice(None) if valid is None else valid
        ids, batch = ids[live], batch_of[live]
        offered = (ids >= 0) & (ids < described.experts)
        place = np.where(offered, ids + (batch * experts)[:, None], batches * experts)
        found = np.bincount(place.ravel(), minlength=batches * experts + 1)[:-1]
        counts[:, layer] = found.reshape(batches, experts)
        tokens[:, layer] = np.bincount(batch, minlength=batches)
        codes = _codes(chunk, layer)[live]
        for code in np.unique(codes).tolist():
            group, own = group_name(code >> 8, code & 255), codes == code
            if group not in groups:
                groups[group] = np.zeros((batches, layers, experts), dtype=np.int64)
                group_tokens[group] = np.zeros(layers, dtype=np.int64)
            found = np.bincount(place[own].ravel(), minlength=batches * experts + 1)[:-1]
            groups[group][:, layer] = found.reshape(batches, experts)
            group_tokens[group][layer] = int(own.sum())
    return LoadTable(counts, tokens, groups, group_tokens)


def _of_counts(chunk: Chunk, header: Header) -> LoadTable:
    assert chunk.counts is not None
    assert chunk.group_codes is not None
    shares = chunk.counts.is_floating_point()
    counts = chunk.counts.numpy().astype(np.float64 if shares else np.int64)
    rows = None if chunk.rows is None else chunk.rows.numpy()
    tokens = None if rows is None else rows.sum(2)
    if rows is None and not shares and all(layer.k is not None for layer in header.layers):
        tokens = counts.sum((2, 3)) // np.array([layer.k for layer in header.layers])
    groups: dict[Group, Array] = {}
    group_tokens: dict[Group, Array] = {}
    for index, (phase, modality) in enumerate(chunk.group_codes.tolist()):
        group = group_name(phase, modality)
        groups[group] = counts[:, :, index]
        if rows is not None:
            group_tokens[group] = rows[:, :, index].sum(0)
    return LoadTable(counts.sum(2), tokens, groups, group_tokens)


def group_name(phase: int, modality: int) -> Group:
    """Return the names of two codes."""
    return (
        "unknown" if phase == UNKNOWN else PHASES[phase],
        "unknown" if modality == UNKNOWN else MODALITIES[modality],
    )


def _codes(chunk: Chunk, layer: int) -> Array:
    """Combine phase * 256 + modality, [tokens]."""
    parts = [_fact(chunk, name, layer) for name in ("phase", "modality")]
    phase, modality = (
        np.full(chunk.tokens, UNKNOWN) if part is None else part.astype(np.int64) for part in parts
    )
    codes: Array = phase * 256 + modality
    return codes


def _fact(chunk: Chunk, name: str, layer: int) -> Array | None:
    fact = chunk.fact(name, layer)
    return None if fact is None else fact.numpy()
