"""Count the rows that SGLang's experts compute, below the plugin, as a plugin of its own.

A line of JSON per forward in the file PACELINE_TEST_COUNTS-<rank>: its mode, its tokens, those of
each request, and the rows of each expert by layer.
"""

from __future__ import annotations

import json
import os
from functools import wraps
from typing import Any

import torch

ROWS: list[list[int]] = []
"""Of the running forward, by layer."""


def register() -> None:
    """Take the place of the function that computes experts, before any hook wraps it."""
    folder = os.environ.get("PACELINE_TEST_COUNTS")
    if folder is None:
        return
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    native = fused_moe_native.moe_forward_native

    @wraps(native)  # the plugin checks its parameters
    def counted(layer: Any, x: Any, topk_output: Any, *args: Any, **kwargs: Any) -> Any:
        ids = topk_output.topk_ids.flatten().long()
        ROWS.append(torch.bincount(ids, minlength=layer.num_experts).tolist())
        return native(layer, x, topk_output, *args, **kwargs)

    def forward(stock: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        ROWS.clear()
        out = stock(runner, batch, *args, **kwargs)
        lengths = batch.extend_seq_lens
        seen = {
            "mode": batch.forward_mode.name,
            "tokens": len(batch.input_ids),
            "requests": None if lengths is None else lengths.tolist(),
            "rows": list(ROWS),
        }
        with open(f"{folder}-{runner.gpu_id}", "a") as file:
            file.write(json.dumps(seen) + "\n")
        return out

    fused_moe_native.moe_forward_native = counted
    target = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
    HookRegistry.register(target, forward, HookType.AROUND)
