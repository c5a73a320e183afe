"""Time the busiest of several EMULATED devices: each device's rows through the experts alone.

One process plays all devices in turn. Each gets exactly the assignments that its experts have
to compute, one row each, and the layer's real experts module runs on them; dropped assignments
and those of other devices are not there. A synchronous layer is done when its slowest device
is, so the slowest counts. Communication is not part of it.
"""

from __future__ import annotations

import ctypes
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]

REPEATS = 2
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # names of glibc's malloc.h


@dataclass(frozen=True)
class DeviceWork:
    """What one emulated device computes, one row per assignment.

    Attributes:
        hidden: input of each assignment, [rows, hidden].
        ids: its expert, [rows, 1] int64.
        weights: its combine weight, [rows, 1].
    """

    hidden: Tensor
    ids: Tensor
    weights: Tensor

    @property
    def rows(self) -> int:
        return self.ids.shape[0]


@dataclass(frozen=True)
class Ratios:
    """Ratios of paired timings (no cap / policy) over the rounds: above 1 is faster."""

    median: float
    minimum: float
    maximum: float


def split_by_device(
    hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, expert_to_device: Sequence[int]
) -> list[DeviceWork]:
    """Deal the assignments of a layer to its devices; ids outside [0, E) are nobody's.

    Args:
        hidden: [tokens, hidden].
        topk_ids: [tokens, slots] integer; dropped or unused slots hold E.
        topk_weights: [tokens, slots].
        expert_to_device: device of each expert, [experts].
    """
    experts = len(expert_to_device)
    lookup = torch.tensor([*expert_to_device, -1], device=topk_ids.device)
    inside = (topk_ids >= 0) & (topk_ids < experts)
    device_of = lookup[torch.where(inside, topk_ids, experts).long()]
    work = []
    for device in range(max(expert_to_device) + 1):
        token, slot = torch.nonzero(device_of == device, as_tuple=True)
        work.append(
            DeviceWork(
                hidden=hidden[token].contiguous(),
                ids=topk_ids[token, slot].long().unsqueeze(1),
                weights=topk_weights[token, slot].unsqueeze(1),
            )
        )
    return work


def slowest_device(experts: Experts, work: Sequence[DeviceWork], repeats: int = REPEATS) -> float:
    """Seconds that the slowest of the emulated devices needs for its rows.

    Each device runs `repeats` times and its fastest run counts: the slowest of many devices
    would otherwise be whichever the machine interrupted.
    """
    return max((_fastest(experts, part, repeats) for part in work if part.rows), default=0.0)


def _fastest(experts: Experts, part: DeviceWork, repeats: int) -> float:
    fastest = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        experts(part.hidden, part.ids, part.weights)
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def time_policies(
    experts: Experts, work: Mapping[str, Sequence[DeviceWork]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of the slowest emulated device per policy and round, [policies][rounds].

    All policies run in every round, each time starting with another one, so that a slow moment
    of the machine falls on all of them alike.
    """
    names = list(work)
    times: dict[str, list[float]] = {name: [] for name in names}
    with torch.inference_mode():
        for name in names:  # touch the memory and the code once, untimed
            slowest_device(experts, work[name], repeats=1)
        for turn in range(rounds):
            shift = turn * max(1, len(names) // max(1, rounds)) % len(names)
            for name in names[shift:] + names[:shift]:
                times[name].append(slowest_device(experts, work[name]))
    return times


def paired_ratios(base: Sequence[float], other: Sequence[float]) -> Ratios:
    """Ratios base / other, round by round: median, minimum and maximum.

    Raises:
        ValueError: if the rounds don't pair up or a time is not positive.
    """
    if not base or len(base) != len(other) or min(*base, *other) <= 0:
        raise ValueError("base and other must hold the same number of positive times")
    ratios = [a / b for a, b in zip(base, other, strict=True)]
    return Ratios(statistics.median(ratios), min(ratios), max(ratios))


def keep_freed_memory() -> bool:
    """Let glibc keep freed buffers; otherwise page faults dominate the timings of big layers.

    Returns False where the C library is another one (timings are then noisier, not wrong).
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    # The effect of MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_, in a running process.
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
