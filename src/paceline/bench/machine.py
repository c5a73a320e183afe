"""A machine set up so that timings mean something: cores, threads, freed memory."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # names of glibc's malloc.h


def prepare_machine(local_rank: int = 0, local_ranks: int = 1, threads: int = 1) -> dict[str, Any]:
    """Pin this process to cores of its own, fix its threads, and let it keep freed memory.

    Freed buffers that go back to the system make page faults dominate big layers.

    Args:
        local_rank: of this process on its machine.
        local_ranks: processes on this machine.
        threads: of this process.

    Returns:
        What was done, for the report.
    """
    torch.set_num_threads(threads)
    pinned: list[int] | None = None
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= local_ranks * threads:
            pinned = cores[local_rank * threads : (local_rank + 1) * threads]
            os.sched_setaffinity(0, pinned)
    return {
        "threads": threads,
        "pinned": pinned is not None,
        "freed_memory_kept": keep_freed_memory(),
    }


def keep_freed_memory() -> bool:
    """Let glibc keep freed buffers; otherwise page faults dominate the timings of big layers.

    Returns False where the C library is another one (timings are then noisier, not wrong).
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    # The effect of MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_, in a running process.
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
