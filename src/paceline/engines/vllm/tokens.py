"""The tokens of a forward from vLLM's forward context, read once per forward on the host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

_KEY = "paceline"


@dataclass(eq=False)
class Batch:
    """Tokens of one forward, in the rows that the MoE layers see.

    Attributes:
        rows: number of rows of every layer's input.
        real: False for a profile run, a warm-up or the dummy forward of an idle rank.
        valid: [rows] bool, False for padding; None: every row is a token.
        tokens: number of real tokens among the rows.
        everywhere: number of tokens of all data-parallel ranks together.
        metadata: of vLLM's attention layers, which tells the requests.
    """

    rows: int
    real: bool
    valid: Tensor | None = None
    tokens: int = 0
    everywhere: int = 0
    metadata: Any = None

    @cached_property
    def _starts_and_computed(self) -> tuple[Tensor, Tensor] | None:
        layers = self.metadata.values() if isinstance(self.metadata, dict) else ()
        for layer in layers:
            starts = getattr(layer, "query_start_loc", None)
            lengths = getattr(layer, "seq_lens", None)
            if isinstance(starts, Tensor) and isinstance(lengths, Tensor):
                starts = starts.long()
                return starts, lengths.long()[: len(starts) - 1] - starts.diff()
        return None

    def _requests(self) -> tuple[Tensor, Tensor]:
        """Return [requests + 1] first rows and the end, and [requests] tokens computed earlier.

        Raises:
            RuntimeError: if no attention layer has them.
        """
        if self._starts_and_computed is None:
            raise RuntimeError(
                "paceline: this policy needs the requests, which vLLM's attention metadata lacks."
            )
        return self._starts_and_computed

    @property
    def requests(self) -> int:
        """Number of requests in the forward, 0 if it is unknown."""
        known = self._starts_and_computed
        return 0 if known is None else len(known[0]) - 1

    @cached_property
    def request(self) -> Tensor:
        """[rows] int64 index of each token's request; padding has the last one's."""
        index = torch.searchsorted(self._requests()[0][1:], torch.arange(self.rows), right=True)
        return index.clamp(max=max(self.requests - 1, 0))

    @cached_property
    def position(self) -> Tensor:
        """[rows] int64 position of each token in its sequence."""
        starts, computed = self._requests()
        return computed[self.request] + torch.arange(self.rows) - starts[self.request]

    def decode(self, prompt_lengths: Tensor) -> Tensor:
        """Return [rows] bool, True for tokens of requests that have computed their whole prompt.

        Args:
            prompt_lengths: [requests] int64.
        """
        return (self._requests()[1] >= prompt_lengths)[self.request]


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
    return Batch(rows, tokens > 0, valid, tokens, everywhere, metadata)
