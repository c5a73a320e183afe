"""Time and rows of vLLM's CPU kernel for experts, below the plugin, as a worker extension.

Imported, it takes the kernel's place in torch's dispatcher and passes every call on.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import vllm._custom_ops  # noqa: F401  # registers the kernel
from torch import library as torch_library
from vllm.platforms import current_platform

current_platform.import_kernels()
_TYPELESS: Any = torch_library  # its classes have no types
_KERNEL = _TYPELESS.get_kernel(torch.ops._C.cpu_fused_moe.default, "CPU")
_LIBRARY = _TYPELESS.Library("_C", "IMPL")
_CALLS: list[tuple[float, int]] = []


def _timed(*args: Any) -> None:
    start = time.perf_counter()
    _KERNEL.call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args)
    _CALLS.append((time.perf_counter() - start, args[7].numel()))


_LIBRARY.impl("cpu_fused_moe", _timed, "CPU", allow_override=True)


class KernelTimes:
    """Methods of a worker."""

    def taken_calls(self) -> str:
        """Return seconds and rows per call since the last question, as JSON."""
        found = json.dumps(_CALLS)
        _CALLS.clear()
        return found
