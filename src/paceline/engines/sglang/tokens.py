"""The tokens of a forward from SGLang's forward batch, read once per forward on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.engines.serving.batch import Batch

NEVER = torch.iinfo(torch.int64).max
"""Prompt length of a request of which it is known that all tokens of the forward are prompt."""


@dataclass
class _Running:
    """Forward that runs in this process: SGLang runs one at a time, on one thread."""

    forward: Any = None
    batch: Batch | None = None


_running = _Running()


@contextmanager
def running(forward: Any) -> Iterator[None]:
    """Make a ForwardBatch the one that layers read, as long as it runs."""
    before = _running.forward, _running.batch
    _running.forward, _running.batch = forward, None
    try:
        yield
    finally:
        _running.forward, _running.batch = before


def current_batch(rows: int) -> Batch:
    """Return the batch of the running forward.

    Args:
        rows: number of rows of the calling layer.

    Raises:
        RuntimeError: if the layer has another number of rows than the forward.
    """
    forward = _running.forward
    if forward is None or forward.forward_mode.is_idle():
        return Batch(rows, real=False)
    if _running.batch is None:
        _running.batch = _read(forward)
    if _running.batch.rows != rows:
        raise RuntimeError(
            f"paceline: a layer has {rows} rows in a forward of {_running.batch.rows}: it computes "
            "a part of them."
        )
    return _running.batch


def prompt_lengths(requests: int) -> Tensor:
    """Return [requests] int64: 0 for those that generate, `NEVER` for those in their prompts."""
    decodes = _running.forward is not None and _running.forward.forward_mode.is_decode()
    return torch.full((requests,), 0 if decodes else NEVER, dtype=torch.int64)


def request_ids() -> list[str] | None:
    """Return SGLang's names of the running forward's requests, None if it has none."""
    names = getattr(_running.forward, "rids", None)
    return None if names is None else list(names)


def _read(forward: Any) -> Batch:
    rows = len(forward.input_ids) if forward.input_embeds is None else len(forward.input_embeds)
    real = getattr(forward, "num_token_non_padded", None)
    tokens = rows if real is None else min(int(real), rows)
    valid = None if tokens == rows else torch.arange(rows) < tokens
    return Batch(rows, tokens > 0, valid, tokens, tokens, partial(_requests, forward))


def _requests(forward: Any) -> tuple[Tensor, Tensor] | None:
    """Return first rows of the requests and the end, and tokens computed earlier, if known."""
    if forward.forward_mode.is_decode():  # a row per request
        lengths = forward.seq_lens.long()
        return torch.arange(len(lengths) + 1), lengths - 1
    lengths, computed = forward.extend_seq_lens, forward.extend_prefix_lens
    if lengths is None or computed is None:
        return None
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    starts[1:] = lengths.long().cumsum(0)
    return starts, computed.long()
