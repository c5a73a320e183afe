"""vLLM's CPU experts on the kept (token, expert) pairs alone, so that a dropped pair costs no row.

The kernel cannot skip an id: neither a dropped slot nor, under expert parallelism, an expert of
another rank may reach it. If every slot stays, the kernel is called as vLLM calls it. Otherwise it
gets one row per kept pair: inputs are gathered, and the outputs of a token's pairs are summed. Per
pair that takes about as long as a fixed number of columns of an expert's width, whatever the hidden
size, since both grow with it. So it saves time only if enough pairs are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAIR_COST = {"amx": 200, "vec": 64}
"""Kernel -> columns of an expert's width that take as long as to gather a pair and to add it up.
benchmarks/vllm_kernel.py measured, where both ways take equally long, 45 to 90 in float32 (vec) and
80 to 260 in bfloat16 (amx), with experts of width 64 to 1,024 on one core of a Xeon."""

LITTLE_WORK = 1 << 23
"""Multiply-adds of a matrix that a layer's experts do in about half a millisecond: below it both
ways take equally long, and the rows computed may as well be the rows counted."""


@dataclass(frozen=True)
class ExpertCost:
    """Cost of a layer's experts in a CPU's kernel.

    Attributes:
        hidden: size of a token.
        width: of an expert in this process.

    >>> ExpertCost(512, 1024).skipping_pays(dropped=1000, assignments=8192)
    True
    >>> ExpertCost(192, 64).skipping_pays(dropped=1000, assignments=8192)
    False
    """

    hidden: int
    width: int
    isa: str = "vec"

    @property
    def pair_cost(self) -> int:
        """Entry of `PAIR_COST`, that of "vec" for a kernel that was never measured."""
        return PAIR_COST.get(self.isa, PAIR_COST["vec"])

    @property
    def share_that_pays(self) -> float:
        """Share of dropped pairs above which to skip them saves time.

        >>> round(ExpertCost(512, 1024).share_that_pays, 3)
        0.059
        """
        return self.pair_cost / (self.pair_cost + self.width)

    def skipping_pays(self, dropped: int, assignments: int) -> bool:
        """Return True if the kernel is quicker, or hardly slower, on the kept pairs alone.

        Args:
            dropped: number of dropped assignments.
            assignments: number of assignments of the forward.
        """
        if assignments * self.hidden * self.width <= LITTLE_WORK:
            return True
        return dropped * self.width > (assignments - dropped) * self.pair_cost


_scratch: dict[tuple[str, torch.dtype], Tensor] = {}


def fused_experts(
    output: Tensor,
    hidden: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    expert_map: Tensor | None,
    activation: str,
    isa: str,
    weighs_inputs: bool,
) -> None:
    """Write the experts' weighted sums to `output`, exact zeros for a token without kept pairs.

    Args:
        output: [tokens, hidden].
        hidden: [tokens, hidden].
        w13, w2, w13_bias, w2_bias: weights of the local experts, packed for the kernel.
        weights: [tokens, slots] float32.
        ids: [tokens, slots] int32 experts; negative: dropped.
        expert_map: [experts] int32 local id of each expert, negative for another rank's; None:
            all are local.
        activation, isa: names for the kernel.
        weighs_inputs: True if the inputs are multiplied by the weights already.
    """

    def kernel(output: Tensor, hidden: Tensor, weights: Tensor, ids: Tensor) -> None:
        torch.ops._C.cpu_fused_moe(
            output, hidden, w13, w2, w13_bias, w2_bias, weights.contiguous(), ids.contiguous(),
            weighs_inputs, activation, isa,
        )  # fmt: skip

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
        kernel(output, hidden, weights, ids)
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
    kernel(results, inputs, weights, ids)
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
