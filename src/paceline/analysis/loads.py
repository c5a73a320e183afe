"""Balance figures from load tables: peak-to-mean, straggler loss, percentiles over layers.

A load is a number of (token, expert) assignments that a unit (an expert or a device) computes.
Everything here is plain arithmetic on Python numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.balance import straggler_loss as straggler_loss


@dataclass(frozen=True)
class Busiest:
    """The most loaded unit relative to its mean."""

    index: int
    load: float
    peak_to_mean: float


def unit_means(total: float, sizes: Sequence[int]) -> list[float]:
    """Mean load of each unit: ``total * n_u / E`` for a unit hosting ``n_u`` of the E experts.

    Raises:
        ValueError: if no unit hosts an expert.
    """
    experts = sum(sizes)
    if experts <= 0:
        raise ValueError(f"sizes must hold at least one expert, got {list(sizes)}")
    return [total * size / experts for size in sizes]


def busiest(loads: Sequence[float], sizes: Sequence[int] | None = None) -> Busiest:
    """The unit with the highest load relative to its mean (the smaller index on a tie).

    Args:
        loads: load of each unit, [units].
        sizes: experts hosted by each unit, [units]; None: all the same.

    Raises:
        ValueError: if loads is empty, negative or of another length than sizes.
    """
    sizes = [1] * len(loads) if sizes is None else sizes
    if not loads or len(loads) != len(sizes):
        raise ValueError(f"loads must have one entry per unit, got {len(loads)} for {len(sizes)}")
    if min(loads) < 0:
        raise ValueError(f"loads must not be negative, got {min(loads)}")
    means = unit_means(sum(loads), sizes)
    ratios = [load / mean if mean > 0 else 0.0 for load, mean in zip(loads, means, strict=True)]
    index = max(range(len(ratios)), key=lambda unit: ratios[unit])
    # Without any load every unit is trivially at its mean.
    return Busiest(index, loads[index], ratios[index] if sum(loads) > 0 else 1.0)


def peak_to_mean(loads: Sequence[float], sizes: Sequence[int] | None = None) -> float:
    """Largest load / mean over the units; 1.0 is perfect balance. See `busiest`."""
    return busiest(loads, sizes).peak_to_mean


def combine_peaks(peaks: Sequence[float], assignments: Sequence[float]) -> float:
    """Peak-to-mean of several layers or batches that run one after the other.

    Sum of the busiest unit's loads / sum of the mean loads: a mean weighted by assignments.

    Raises:
        ValueError: if the lengths differ or there is nothing to combine.
    """
    if not peaks or len(peaks) != len(assignments):
        raise ValueError(f"need one weight per peak, got {len(peaks)} and {len(assignments)}")
    total = math.fsum(assignments)
    if total <= 0:
        return 1.0
    return math.fsum(p * a for p, a in zip(peaks, assignments, strict=True)) / total


def device_loads(
    expert_loads: Sequence[float], expert_to_device: Sequence[int], num_devices: int
) -> list[float]:
    """Loads of the devices from those of their experts, [experts] -> [devices].

    Raises:
        ValueError: if the two sequences differ in length.
    """
    if len(expert_loads) != len(expert_to_device):
        raise ValueError(
            f"expert_loads must have {len(expert_to_device)} entries, got {len(expert_loads)}"
        )
    loads = [0.0] * num_devices
    for load, device in zip(expert_loads, expert_to_device, strict=True):
        loads[device] += load
    return loads


def add_loads(tables: Iterable[Sequence[float]]) -> list[float]:
    """Element-wise sum of load tables of one length, e.g. over batches."""
    return [math.fsum(column) for column in zip(*tables, strict=True)]


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation, e.g. over layers.

    Raises:
        ValueError: if values is empty or percent is outside [0, 100].
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"need values and a percent in [0, 100], got {len(values)}, {percent}")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
