"""Medians with their minimum and maximum, and a machine set up so that timings mean something."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from paceline.analysis.emulate import keep_freed_memory


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum.

    Raises:
        ValueError: if there is no value.
    """
    if not values:
        raise ValueError("no value was measured")
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def ratios(base: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Spread of base / other, round by round: above 1, other is faster."""
    return spread([a / b for a, b in zip(base, other, strict=True)])


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


def shuffled(names: Sequence[str], turn: int) -> list[str]:
    """The names in an order of this turn's own, alike on all ranks.

    What ran before leaves caches warm or cold and cores hot, so nothing may always follow the same.
    """
    return random.Random(turn).sample(list(names), len(names))
