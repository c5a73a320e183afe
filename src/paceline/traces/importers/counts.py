"""From load tables of other programs to a trace."""

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


def layer_names(indices: Sequence[int] | range) -> list[str]:
    """Names of layers known by number."""
    return [f"layer {index}" for index in indices]
