"""The tokens of a forward from vLLM's forward context, read once per forward on the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from vllm.forward_context import get_forward_context

from paceline.engines.serving.batch import Batch

_KEY = "paceline"


def current_batch(rows: int) -> Batch:
    """Return the batch of the running forward; for CPUs, on which reading tensors is free.

    Args:
        rows: number of rows of the calling layer.

    Raises:
        RuntimeError: if the layer has another number of rows than the forward.
    """
    context = get_forward_context()
    known = context.additional_kwargs.get(_KEY)
    if known is None:
        known = context.additional_kwargs[_KEY] = _read(context, rows)
    if known.rows != rows:
        raise RuntimeError(
            f"paceline: a layer has {rows} rows in a forward of {known.rows}: sequence-parallel "
            "MoE is not supported."
        )
    return known  # type: ignore[no-any-return]


def padding_of_forward() -> Tensor | None:
    """Return [rows] bool, True for padding, in memory that a captured graph reads, if any."""
    padding: Tensor | None = get_forward_context().is_padding
    return padding


def _read(context: Any, rows: int) -> Batch:
    metadata = context.attn_metadata
    padding = context.is_padding
    if metadata is None:  # a dummy batch that measures how much memory is needed
        return Batch(rows, real=False)
    if padding is not None and len(padding) != rows:
        raise RuntimeError(
            f"paceline: vLLM's padding mask has {len(padding)} entries for {rows} rows: "
            "sequence-parallel MoE is not supported."
        )
    padded = 0 if padding is None else int(np.count_nonzero(padding.numpy()))
    tokens = rows - padded
    everywhere = tokens
    if context.dp_metadata is not None:
        everywhere = int(context.dp_metadata.num_tokens_across_dp_cpu.sum())
    valid = ~padding if padded else None
    return Batch(rows, tokens > 0, valid, tokens, everywhere, partial(_requests, metadata))


def _requests(metadata: Any) -> tuple[Tensor, Tensor] | None:
    """Read the requests from the metadata of vLLM's attention layers, if any has them."""
    layers = metadata.values() if isinstance(metadata, dict) else ()
    for layer in layers:
        starts = getattr(layer, "query_start_loc", None)
        lengths = getattr(layer, "seq_lens", None)
        if isinstance(starts, Tensor) and isinstance(lengths, Tensor):
            starts = starts.long()
            return starts, lengths.long()[: len(starts) - 1] - starts.diff()
    return None
