"""The experts of emulated devices in a decode step: what a call costs, and devices in turn."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import torch
from decode_models import Row, results

from paceline import CapacityPolicy, ExpertPlacement, route
from paceline.bench.emulated import split_by_device
from paceline.bench.timing import spread, turns
from paceline.bench.workload import Shape, build_experts, skewed_workload

DEVICES = 8


def devices_of(shape: Shape, dtype: torch.dtype) -> list[torch.nn.Module]:
    """Build the experts of each emulated device, a module of its own as on a real one."""
    hosted = shape.experts // DEVICES
    return [build_experts(shape, hosted, seed=device).to(dtype) for device in range(DEVICES)]


def calls(shape: Shape, dtype: torch.dtype, _: list[int], rounds: int) -> list[Row]:
    """Time a device's experts by how many have how many rows; devices take turns."""
    devices = devices_of(shape, dtype)
    hosted = shape.experts // DEVICES
    cells = [(0, 1), *((n, 1) for n in (1, 2, 4, 8)), *((8, n) for n in (2, 3, 4, 8, 16))]
    spent: dict[str, list[float]] = {f"{experts} {rows}": [] for experts, rows in cells}
    with torch.inference_mode():
        for number, (name, counts) in enumerate(turns(spent, rounds)):
            experts, rows = map(int, name.split())
            # the id one past the last is no expert
            ids = torch.randperm(hosted)[:experts] if experts else torch.tensor([hosted])
            ids = ids.repeat_interleave(rows).unsqueeze(1)
            hidden = torch.randn(len(ids), shape.hidden, dtype=dtype)
            device = devices[number % DEVICES]
            start = time.thread_time()
            device(hidden, ids, torch.ones_like(hidden[:, :1]))
            if counts:
                spent[name].append(time.thread_time() - start)
    return [
        {"experts": experts, "rows": rows, "seconds": spread(spent[f"{experts} {rows}"])}
        for experts, rows in cells
    ]


def devices_in_turn(shape: Shape, dtype: torch.dtype, batches: list[int], rounds: int) -> list[Row]:
    """Time every device of a layer in turn, so that none finds its weights in a core's cache."""
    devices = devices_of(shape, dtype)
    placement = ExpertPlacement.contiguous(shape.experts, DEVICES)
    hosted, rows = shape.experts // DEVICES, []
    for batch in batches:
        load = skewed_workload(shape, batch, 1.3, placement)
        inputs = load.gate(load.hidden)
        work, active = {}, {}
        for most in [None, *sorted({hosted * 3 // 4, hosted // 2, max(1, hosted // 4)})[::-1]]:
            name = "none" if most is None else f"max_active={most}"
            policy = CapacityPolicy(max_active=most, mode="enforce" if most else "observe")
            a = route(inputs, policy, placement)
            weights = a.topk_weights.to(dtype)
            split = split_by_device(load.hidden.to(dtype), a.topk_ids, weights, placement)
            work[name] = [replace(w, ids=w.ids - i * hosted) for i, w in enumerate(split)]
            active[name] = float(a.active_after.max())
        played: dict[str, list[list[float]]] = {name: [] for name in work}
        with torch.inference_mode():
            for name, counts in turns(work, rounds):
                each = zip(work[name], devices, strict=True)
                took = [device.run(experts)[1] for device, experts in each]
                if counts:
                    played[name].append(took)
        seconds = {name: slowest_of(rounds_of) for name, rounds_of in played.items()}
        rows += results("none", seconds, active, active, batch)
    return rows


def slowest_of(played: list[list[float]]) -> list[float]:
    """Return the [rounds] seconds of the device that mostly takes longest, of [rounds, devices].

    The longest of each round would be whichever device another program held up.
    """
    by_device = list(zip(*played, strict=True))
    return list(max(by_device, key=statistics.median))
