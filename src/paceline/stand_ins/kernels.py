# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
"""Stand-ins on CUDA tensors: dropped pairs alone, sorted by expert; static shapes, no host sync.

Enough programs are started for the largest number of pairs; those without a pair end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _STEP = 32, 64  # pairs of one expert, and hidden units, that a program takes at once


@triton.jit
def _expert_of(first, block, own, OWN: tl.constexpr):
    """Find the expert of a block; `first` [own + 1] are the indices of experts' first blocks."""
    each = tl.arange(0, OWN)
    ends = tl.load(first + 1 + each, mask=each < own, other=2147483647)
    return tl.sum((ends <= block).to(tl.int32))


@triton.jit
def _pairs_of(order, first, start, block, expert, slots, ROWS: tl.constexpr):
    """Return [rows] each: a block's pairs in the sorted order, their presence, their tokens."""
    at = tl.load(start + expert) + (block - tl.load(first + expert)) * ROWS + tl.arange(0, ROWS)
    there = at < tl.load(start + expert + 1)
    return at, there, tl.load(order + at, mask=there, other=0) // slots


@triton.jit
def inner(
    x, down, shift, order, first, start, seen, hidden, slots, own, rank,
    OWN: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write seen [pairs, rank] float32, in the sorted order: down (x - mean) of each pair."""
    block = tl.program_id(0)
    expert = _expert_of(first, block, own, OWN)
    if expert < own:
        at, there, token = _pairs_of(order, first, start, block, expert, slots, ROWS)
        r = tl.arange(0, RANK)
        total = tl.zeros([ROWS, RANK], tl.float32)
        for begin in range(0, hidden, STEP):
            h = begin + tl.arange(0, STEP)
            inside = h < hidden
            rows = tl.load(
                x + token[:, None] * hidden + h[None, :],
                mask=there[:, None] & inside[None, :], other=0,
            )  # fmt: skip
            weight = tl.load(
                down + (expert.to(tl.int64) * rank + r[None, :]) * hidden + h[:, None],
                mask=(r[None, :] < rank) & inside[:, None], other=0,
            )  # fmt: skip
            total += tl.dot(rows, weight, input_precision="ieee")
        moved = total - tl.load(shift + expert * rank + r, mask=r < rank, other=0)[None, :]
        tl.store(
            seen + at[:, None].to(tl.int64) * rank + r[None, :],
            moved, mask=there[:, None] & (r[None, :] < rank),
        )  # fmt: skip


@triton.jit
def outer(
    scaled, share, up, bias, order, first, start, total, hidden, slots, own, rank,
    OWN: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Add share bias + up scaled of each pair to its token's row of total [tokens, hidden]."""
    block = tl.program_id(0)
    expert = _expert_of(first, block, own, OWN)
    if expert < own:
        at, there, token = _pairs_of(order, first, start, block, expert, slots, ROWS)
        r = tl.arange(0, RANK)
        h = tl.program_id(1) * STEP + tl.arange(0, STEP)
        inside = h < hidden
        rows = tl.load(
            scaled + at[:, None].to(tl.int64) * rank + r[None, :],
            mask=there[:, None] & (r[None, :] < rank), other=0,
        )  # fmt: skip
        weight = tl.load(
            up + (expert.to(tl.int64) * rank + r[:, None]) * hidden + h[None, :],
            mask=(r[:, None] < rank) & inside[None, :], other=0,
        )  # fmt: skip
        left = tl.dot(rows, weight, input_precision="ieee")
        constant = tl.load(bias + expert.to(tl.int64) * hidden + h, mask=inside, other=0)
        weights = tl.load(share + at, mask=there, other=0)
        left += weights[:, None] * constant.to(tl.float32)[None, :]
        tl.atomic_add(
            total + token[:, None] * hidden + h[None, :],
            left, mask=there[:, None] & inside[None, :],
        )  # fmt: skip


def sum_stand_ins(
    x: Tensor, local: Tensor, weights: Tensor, down: Tensor, up: Tensor, bias: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the stand-ins' outputs of dropped pairs by token.

    Where a token lost three assignments or more, the last bits depend on the order of addition.

    Args:
        x: [tokens, hidden].
        local: [tokens, k] int64 index of the stand-in; `own` for no stand-in.
        weights: [tokens, k].
        down: [own, rank, hidden] of x's dtype.
        up: [own, rank, hidden], likewise.
        bias: [own, hidden], likewise.
        shift: [own, rank] float32.

    Returns:
        [tokens, hidden] float32 sums; [pairs, rank], sorted by expert, what each stand-in saw (0
        for none); and [pairs] the stand-in's index.
    """
    (tokens, slots), (own, rank, hidden) = local.shape, down.shape
    expert, order = local.flatten().sort(stable=True)
    counts = torch.zeros(own + 1, dtype=torch.int64, device=x.device)
    counts = counts.scatter_add(0, expert, torch.ones_like(expert))[:own]
    start = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    first = torch.nn.functional.pad(((counts + _ROWS - 1) // _ROWS).cumsum(0), (1, 0)).int()
    blocks = triton.cdiv(tokens * slots, _ROWS) + own
    seen = torch.zeros((tokens * slots, rank), dtype=torch.float32, device=x.device)
    total = torch.zeros((tokens, hidden), dtype=torch.float32, device=x.device)
    sizes = {
        "OWN": triton.next_power_of_2(own), "RANK": max(16, triton.next_power_of_2(rank)),
        "ROWS": _ROWS, "STEP": _STEP,
    }  # fmt: skip
    with torch.cuda.device_of(x):
        inner[(blocks,)](
            x.contiguous(), down, shift, order, first, start, seen, hidden, slots, own, rank,
            **sizes,
        )  # fmt: skip
        share = weights.flatten()[order].float()
        scaled = (seen * share.unsqueeze(1)).to(x.dtype)
        outer[(blocks, triton.cdiv(hidden, _STEP))](
            scaled, share, up, bias, order, first, start, total, hidden, slots, own, rank, **sizes
        )
    return total, seen, expert
