"""Counter of the rows that vLLM's CPU kernel computes, below the plugin and the engine.

Imported, it takes the kernel's place in torch's dispatcher and passes every call on. As a worker
extension (`--worker-extension-cls kernel_rows.RowCounter`) its counts can be asked for over RPC.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm._custom_ops  # noqa: F401  # registers the kernel
from torch.library import Library, get_kernel
from vllm.platforms import current_platform

current_platform.import_kernels()
_KERNEL = get_kernel(torch.ops._C.cpu_fused_moe.default, "CPU")
_LIBRARY = Library("_C", "IMPL")

CALLS: list[list[int]] = []
"""Rows of each local expert, one entry per call."""


def _counted(
    output: Any, hidden: Any, w13: Any, w2: Any, b13: Any, b2: Any, weights: Any, ids: Any,
    skip: bool, act: str, isa: str,
) -> None:  # fmt: skip
    experts = w13.shape[0]
    flat = ids.reshape(-1).long()
    if not bool(((flat >= 0) & (flat < experts)).all()):
        raise AssertionError(f"the kernel was given experts {flat.unique().tolist()} of {experts}")
    CALLS.append(torch.bincount(flat, minlength=experts).tolist())
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    _KERNEL.call_boxed(keys, output, hidden, w13, w2, b13, b2, weights, ids, skip, act, isa)


_LIBRARY.impl("cpu_fused_moe", _counted, "CPU", allow_override=True)


def rows() -> int:
    """Return the rows so far."""
    return sum(map(sum, CALLS))


class RowCounter:
    """Methods of a worker."""

    def counted_rows(self) -> int:
        """Return the rows that this worker computed."""
        return rows()

    def forget_rows(self) -> None:
        """Reset the counter."""
        CALLS.clear()
