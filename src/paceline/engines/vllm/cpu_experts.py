"""vLLM's CPU experts on the kept (token, expert) pairs alone, so that a dropped one costs no row.

The kernel knows no id to skip: a dropped slot, and under expert parallelism one of another rank's
experts, must not reach it. Where every slot stays, the kernel is called as vLLM would.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    """Write what the experts give to `output`, exact zeros for a token that keeps none.

    Args:
        output: [tokens, hidden].
        hidden: [tokens, hidden].
        w13, w2, w13_bias, w2_bias: of the local experts, as the kernel wants them.
        weights: [tokens, slots] float32.
        ids: [tokens, slots] int32 experts; negative: dropped.
        expert_map: [experts] int32 local id of each expert, negative for another rank's; None:
            all are local.
        activation, isa: names for the kernel.
        weighs_inputs: whether the inputs carry the weights already.
    """
    if expert_map is not None:
        # a dropped slot looks up any expert, and stays dropped
        local = expert_map[ids.clamp(min=0)].to(ids.dtype)
        ids = torch.where(ids < 0, ids, local)
    kept = ids.numpy() >= 0
    whole = kept.all()
    if not whole:
        slots = kept.any(0)
        if slots.any() and not slots.all():  # places for extras that nobody took
            used = int(slots.nonzero()[0][-1]) + 1
            if used < ids.shape[1]:
                ids, weights, kept = ids[:, :used], weights[:, :used], kept[:, :used]
                whole = kept.all()
    if whole:
        _kernel(output, hidden, w13, w2, w13_bias, w2_bias, weights, ids,
                activation, isa, weighs_inputs)  # fmt: skip
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
    _kernel(results, inputs, w13, w2, w13_bias, w2_bias,
            weights.reshape(-1)[index].unsqueeze(1), ids.reshape(-1)[index].unsqueeze(1),
            activation, isa, weighs_inputs)  # fmt: skip
    starts = torch.zeros(rows, dtype=torch.int64)
    starts[1:] = torch.from_numpy(kept.sum(1)).cumsum(0)[:-1]
    summed = torch.nn.functional.embedding_bag(torch.arange(pairs), results, starts, mode="sum")
    output.copy_(summed)


def _kernel(
    output: Tensor,
    hidden: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    activation: str,
    isa: str,
    weighs_inputs: bool,
) -> None:
    weights, ids = weights.contiguous(), ids.contiguous()
    torch.ops._C.cpu_fused_moe(
        output, hidden, w13, w2, w13_bias, w2_bias, weights, ids, weighs_inputs, activation, isa
    )


def _buffer(name: str, shape: tuple[int, int], like: Tensor) -> Tensor:
    """Memory that is kept: pages that come and go with every layer cost more than they hold."""
    size = shape[0] * shape[1]
    held = _scratch.get((name, like.dtype))
    if held is None or held.numel() < size:
        with torch.inference_mode(False):  # so that it can be written to outside of it too
            held = _scratch[name, like.dtype] = torch.empty(size, dtype=like.dtype)
    return held[:size].view(shape)
