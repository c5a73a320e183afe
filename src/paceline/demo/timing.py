"""Measure the demo model's expert time on 8 emulated devices, under every policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from paceline.batches import Batch
from paceline.bench.captured import capture
from paceline.bench.emulated import split_by_device, time_in_turn
from paceline.bench.timing import keep_freed_memory, ratios
from paceline.demo.plan import DEVICES, Entry
from paceline.placement import ExpertPlacement
from paceline.routing import route
from paceline.stand_ins.compensation import Compensation
from paceline.stand_ins.file import Calibration

REPEATS = 2
"""Runs of a device in a round, the fastest of which counts."""


@dataclass
class Timing:
    """Seconds of the slowest emulated device in every round, and rows of the busiest one."""

    seconds: list[float]
    busiest_rows: int

    def __add__(self, other: Timing) -> Timing:
        seconds = [a + b for a, b in zip(self.seconds, other.seconds, strict=True)]
        return Timing(seconds, self.busiest_rows + other.busiest_rows)


def time_batch(
    model: Any, batch: Batch, entries: Sequence[Entry], calibration: Calibration, rounds: int
) -> dict[str, Timing]:
    """Time the slowest emulated device, summed over the layers, under every policy.

    Every layer gets the rows that the uncapped model gives it, so all policies compute the same
    kind of rows and only their number differs. Stand-ins are computed where tokens live, a device
    its share of them.
    """
    totals = {entry.key: Timing([0.0] * rounds, 0) for entry in entries}
    layers = capture(model, batch.ids, DEVICES)
    for layer, found in zip(layers, calibration.layers, strict=True):
        stand_ins = Compensation(found, None, layer.hidden[:0])
        in_order = ExpertPlacement.contiguous(len(found.experts), DEVICES)
        work, spread = {}, {}
        for entry in entries:
            placement = ExpertPlacement.explicit(found.placement) if entry.placed else in_order
            inputs = layer.inputs
            if entry.policy.keep == "contribution":
                norms = stand_ins.norms(layer.hidden, entry.policy.compensate)
                inputs = replace(inputs, expert_norms=norms)
            assignment = route(inputs, entry.policy, placement)
            work[entry.key] = split_by_device(
                layer.hidden, assignment.topk_ids, assignment.topk_weights, placement
            )
            if entry.policy.compensate:
                spread[entry.key] = partial(
                    stand_ins,
                    torch.zeros_like(layer.hidden),
                    layer.hidden,
                    layer.inputs.topk_ids,
                    layer.inputs.topk_weights,
                    assignment.dropped_slots,
                )
        timed = time_in_turn(layer.experts, work, rounds, REPEATS, spread)
        for key, seconds in timed.items():
            totals[key] += Timing(seconds, max(part.rows for part in work[key]))
    return totals


def time_batches(
    model: Any,
    batches: Sequence[Batch],
    entries: Sequence[Entry],
    calibration: Calibration,
    rounds: int,
    step: Callable[[], None],
) -> dict[str, dict[str, Any]]:
    """`time_batch` on one thread, times and rows summed over several batches.

    Returns, per policy: `seconds` of every round, `speedup` (no cap / policy within each round:
    minimum, median, maximum), `busiest_device_rows`, and `bound`, the speed-up that the loads
    allow: rows of the busiest device without a cap / with the policy.
    """
    keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    totals = {entry.key: Timing([0.0] * rounds, 0) for entry in entries}
    try:
        for batch in batches:
            for key, timing in time_batch(model, batch, entries, calibration, rounds).items():
                totals[key] += timing
            step()
    finally:
        torch.set_num_threads(threads)
    base = totals[entries[0].key]
    return {
        key: {
            "seconds": timing.seconds,
            "speedup": ratios(base.seconds, timing.seconds),
            "busiest_device_rows": timing.busiest_rows,
            "bound": base.busiest_rows / timing.busiest_rows,
        }
        for key, timing in totals.items()
    }
