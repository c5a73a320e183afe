"""Experts on the kept (token, expert) pairs alone, for kernels that skip no id."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_scratch: dict[tuple[str, torch.dtype], Tensor] = {}


def run_pairs(
    experts: Callable[[Tensor, Tensor, Tensor, Tensor], None],
    output: Tensor,
    hidden: Tensor,
    weights: Tensor,
    ids: Tensor,
    expert_map: Tensor | None,
) -> None:
    """Run experts on one row per kept pair, or as the engine does if every slot stays.

    Args:
        experts: called with output, hidden, weights and local ids, none of them negative.
        output: [tokens, hidden], written to; exact zeros for a token without kept pairs.
        hidden: [tokens, hidden].
        weights: [tokens, slots] float32.
        ids: [tokens, slots] int32 experts; negative: dropped.
        expert_map: [experts] int32 local id of each expert, negative for another rank's; None:
            all are local.
    """
    if expert_map is not None:
        # a dropped slot looks up expert 0, and stays dropped
        local = expert_map[ids.clamp(min=0)].to(ids.dtype)
        ids = torch.where(ids < 0, ids, local)
    kept = ids.numpy() >= 0
    whole = kept.all()
    if not whole:
        slots = kept.any(0)
        if slots.any() and not slots.all():  # room for extras that nobody took
            used = int(slots.nonzero()[0][-1]) + 1
            if used < ids.shape[1]:
                ids, weights, kept = ids[:, :used], weights[:, :used], kept[:, :used]
                whole = kept.all()
    if whole:
        experts(output, hidden, weights, ids)
        return
    index = torch.from_numpy(kept.ravel().nonzero()[0])
    rows, pairs = hidden.shape[0], len(index)
    if pairs == 0:
        output.zero_()
        return
    token = torch.div(index, ids.shape[1], rounding_mode="floor")
    inputs = _buffer("inputs", (pairs, hidden.shape[1]), hidden)
    torch.index_select(hidden, 0, token, out=inputs)
    results = _buffer("results", (pairs, output.shape[1]), output)
    weights, ids = weights.reshape(-1)[index].unsqueeze(1), ids.reshape(-1)[index].unsqueeze(1)
    experts(results, inputs, weights, ids)
    starts = torch.zeros(rows, dtype=torch.int64)
    starts[1:] = torch.from_numpy(kept.sum(1)).cumsum(0)[:-1]
    summed = torch.nn.functional.embedding_bag(torch.arange(pairs), results, starts, mode="sum")
    output.copy_(summed)


def _buffer(name: str, shape: tuple[int, int], like: Tensor) -> Tensor:
    """Return memory that is kept: to map pages anew for every layer costs more than the copy."""
    size = shape[0] * shape[1]
    held = _scratch.get((name, like.dtype))
    if held is None or held.numel() < size:
        with torch.inference_mode(False):  # so that it can be written to outside of it too
            held = _scratch[name, like.dtype] = torch.empty(size, dtype=like.dtype)
    return held[:size].view(shape)
