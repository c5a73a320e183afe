"""Fair timings: a prepared machine, policies in turn, and ratios with their range."""

from __future__ import annotations

import ctypes
import os
import platform
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from typing_extensions import TypedDict

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # names of glibc's malloc.h


class Spread(TypedDict):
    """Minimum, median and maximum of some rounds."""

    min: float
    median: float
    max: float


def spread(values: Sequence[float]) -> Spread:
    """Return minimum, median and maximum.

    Raises:
        ValueError: if there is no value.

    >>> spread([3.0, 1.0, 2.0])
    {'min': 1.0, 'median': 2.0, 'max': 3.0}
    """
    if not values:
        raise ValueError("values must be at least one number, got none.")
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def ratios(base: Sequence[float], other: Sequence[float]) -> Spread:
    """Return the spread of base / other, seconds of [rounds]: above 1, other is faster.

    Raises:
        ValueError: if the rounds don't pair up, or a time is not positive.

    >>> ratios([2.0, 4.0], [1.0, 1.0])
    {'min': 2.0, 'median': 3.0, 'max': 4.0}
    """
    if len(base) != len(other):
        raise ValueError(f"other must have {len(base)} rounds, as base has, got {len(other)}.")
    if any(not seconds > 0 for seconds in (*base, *other)):
        raise ValueError(f"times must be positive, got base={base} and other={other}.")
    return spread([a / b for a, b in zip(base, other, strict=True)])


def share_of(found: Spread, bound: float) -> Spread:
    """Divide each figure of a spread by a bound.

    >>> share_of({"min": 1.0, "median": 1.5, "max": 2.0}, bound=2.0)
    {'min': 0.5, 'median': 0.75, 'max': 1.0}
    """
    return {
        "min": found["min"] / bound, "median": found["median"] / bound, "max": found["max"] / bound
    }  # fmt: skip


def shuffled(names: Sequence[str], turn: int) -> list[str]:
    """Order the names for a turn, differently in every turn and alike on all ranks.

    The run before leaves caches warm or cold and cores hot, so nothing may always follow the same.

    >>> shuffled("ab", turn=0) == shuffled("ab", turn=0)
    True
    """
    return random.Random(turn).sample(list(names), len(names))


def turns(names: Iterable[str], rounds: int, warm_up: int = 1) -> Iterator[tuple[str, bool]]:
    """Iterate over rounds in which every name has one turn: (name, True if it counts).

    Args:
        names: of policies, or of other things to compare.
        rounds: that count.
        warm_up: rounds before them, which touch code and memory for the first time.

    >>> sorted(turns(["a"], rounds=1))
    [('a', False), ('a', True)]
    """
    for turn in range(-warm_up, rounds):
        for name in shuffled(list(names), turn):
            yield name, turn >= 0


def prepare_machine(local_rank: int = 0, local_ranks: int = 1, threads: int = 1) -> dict[str, Any]:
    """Set this process up for timings: cores of its own, fixed threads, freed memory kept.

    Returns:
        The changes made, for the report.
    """
    torch.set_num_threads(threads)
    pinned = False
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        pinned = len(cores) >= local_ranks * threads
        if pinned:
            os.sched_setaffinity(0, cores[local_rank * threads : (local_rank + 1) * threads])
    return {"threads": threads, "pinned": pinned, "freed_memory_kept": keep_freed_memory()}


def keep_freed_memory() -> bool:
    """Let glibc keep freed buffers; otherwise page faults dominate the timings of big layers.

    Returns:
        False where the C library is another one; timings are then noisier, not wrong.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    # The effect of MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_, in a running process.
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
