"""EMULATED devices: one process plays them in turn, and nothing is sent.

Each device gets exactly the assignments that its experts have to compute, one row each, and the
layer's real experts run on them; dropped assignments and those of other devices are not there. A
layer is done when its slowest device is. Time is processor time of the one thread, which other
programs of the machine hardly change. Communication is not part of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import TypedDict

from paceline.bench.timing import Spread, keep_freed_memory, ratios, turns
from paceline.bench.workload import capture
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing import route
from paceline.stand_ins.calibration_file import Calibration
from paceline.stand_ins.compensation import Compensation

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [rows, hidden], ids [rows, 1], weights [rows, 1]) -> [rows, hidden]."""

CLOCK = "processor time of one thread"
_TIMED = 2  # devices; of many equal ones the slowest is whichever the machine interrupted


@dataclass(frozen=True)
class DeviceWork:
    """Work of one emulated device, one row per assignment.

    Attributes:
        hidden: input of each assignment, [rows, hidden].
        ids: its expert, [rows, 1] int64.
        weights: its combine weight, [rows, 1].
        token: the token it belongs to, [rows] int64.
    """

    hidden: Tensor
    ids: Tensor
    weights: Tensor
    token: Tensor

    @property
    def rows(self) -> int:
        """Assignments of this device."""
        return self.token.shape[0]

    def run(self, experts: Experts) -> tuple[Tensor, float]:
        """Run the experts on these rows: their output, [rows, hidden], and seconds."""
        if not self.rows:
            return self.hidden, 0.0
        start = time.thread_time()
        out = experts(self.hidden, self.ids, self.weights)
        return out, time.thread_time() - start


def split_by_device(
    hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, placement: ExpertPlacement
) -> list[DeviceWork]:
    """Divide the assignments of a layer among its devices; ids outside [0, E) are left out.

    Args:
        hidden: [tokens, hidden].
        topk_ids: [tokens, slots] integer; dropped or unused slots hold E.
        topk_weights: [tokens, slots].
        placement: of the experts; devices without experts or rows are in the result too.
    """
    experts = placement.num_experts
    device_of_expert = torch.tensor([*placement.expert_to_device, -1], device=topk_ids.device)
    ids = topk_ids.long()
    device_of = device_of_expert[torch.where((ids >= 0) & (ids < experts), ids, experts)]
    work = []
    for device in range(placement.num_devices):
        token, slot = torch.nonzero(device_of == device, as_tuple=True)
        work.append(
            DeviceWork(
                hidden=hidden[token],
                ids=ids[token, slot].unsqueeze(1),
                weights=topk_weights[token, slot].unsqueeze(1),
                token=token,
            )
        )
    return work


def slowest_device(experts: Experts, work: Sequence[DeviceWork], repeats: int = 1) -> float:
    """Time the two devices with most rows: seconds of the slower one, each at its fastest.

    >>> slowest_device(lambda hidden, ids, weights: hidden, [])
    0.0
    """
    slowest = 0.0
    for device in sorted(work, key=lambda device: -device.rows)[:_TIMED]:
        fastest = min((device.run(experts)[1] for _ in range(repeats)), default=math.inf)
        slowest = max(slowest, fastest)
    return slowest


def time_in_turn(
    experts: Experts,
    work: Mapping[str, Sequence[DeviceWork]],
    rounds: int,
    repeats: int = 1,
    spread: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, list[float]]:
    """Time the slowest device under several policies, in another order every round.

    Args:
        work: policy -> [devices].
        rounds: each runs every policy.
        repeats: runs of a device in a round, the fastest of which counts.
        spread: policy -> further work, divided equally among the devices.
    """
    further = spread or {}

    def seconds_of(name: str) -> float:
        slowest = slowest_device(experts, work[name], repeats)
        if name not in further:
            return slowest
        return slowest + min(_seconds(further[name]) for _ in range(repeats)) / len(work[name])

    seconds: dict[str, list[float]] = {name: [] for name in work}
    with torch.inference_mode():
        for name, devices in work.items():  # touch the memory and the code once, untimed
            slowest_device(experts, devices)
            if name in further:
                further[name]()
        for name, _ in turns(work, rounds, warm_up=0):
            seconds[name].append(seconds_of(name))
    return seconds


def _seconds(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


@dataclass(frozen=True)
class Played:
    """One forward of one layer, device by device.

    Attributes:
        seconds: of each device, [devices].
        rows: of each device, [devices].
    """

    seconds: list[float]
    rows: list[int]


def play(
    experts: Experts, hidden: Tensor, ids: Tensor, weights: Tensor, placement: ExpertPlacement
) -> tuple[Tensor, Played]:
    """Run a layer's experts device by device, each timed, and add up their outputs.

    Args:
        hidden: [..., hidden], as the result.
        ids: [tokens, slots] integer; ids outside [0, E) are left out.
        weights: [tokens, slots].
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    out = torch.zeros_like(flat)
    seconds, rows = [], []
    for device in split_by_device(flat, ids, weights, placement):
        part, spent = device.run(experts)
        out.index_add_(0, device.token, part.to(out.dtype))
        seconds.append(spent)
        rows.append(device.rows)
    return out.view(hidden.shape), Played(seconds, rows)


# -- policies on a model's layers ------------------------------------------------------------------


class ExpertTime(TypedDict):
    """Expert time of the slowest emulated device under one policy, summed over layers and batches.

    Attributes:
        seconds: of every round, [rounds].
        speedup: no cap / policy, within each round.
        busiest_device_rows: rows of the busiest device, summed.
        bound: the speed-up that the loads allow: busiest_device_rows without a cap / with it.
    """

    seconds: list[float]
    speedup: Spread
    busiest_device_rows: int
    bound: float


def time_policies(
    model: Any,
    batches: Sequence[Tensor],
    policies: Mapping[str, tuple[CapacityPolicy, Sequence[ExpertPlacement]]],
    calibration: Calibration,
    rounds: int,
    repeats: int = 1,
    step: Callable[[], None] = lambda: None,
) -> dict[str, ExpertTime]:
    """Time the experts of every layer of a model under several policies, on one thread.

    Every layer gets the rows that the uncapped model gives it, so all policies compute the same
    kind of rows and only their number differs. Stand-ins are computed where tokens live, by every
    device its share of them.

    Args:
        model: a Mixture-of-Experts model in evaluation mode.
        batches: [rows, length] int64 token ids each.
        policies: name -> policy and placement of each layer; the first is no cap.
        calibration: of the model, for policies that compensate or keep by contribution.
        rounds: each runs every policy.
        repeats: runs of a device in a round, the fastest of which counts.
    """
    keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = {name: [0.0] * rounds for name in policies}
    rows = dict.fromkeys(policies, 0)
    try:
        for ids in batches:
            _time_batch(model, ids, policies, calibration, repeats, seconds, rows)
            step()
    finally:
        torch.set_num_threads(threads)
    base = next(iter(policies))
    return {
        name: ExpertTime(
            seconds=seconds[name],
            speedup=ratios(seconds[base], seconds[name]),
            busiest_device_rows=rows[name],
            bound=rows[base] / rows[name],
        )
        for name in policies
    }


def _time_batch(
    model: Any,
    ids: Tensor,
    policies: Mapping[str, tuple[CapacityPolicy, Sequence[ExpertPlacement]]],
    calibration: Calibration,
    repeats: int,
    seconds: dict[str, list[float]],
    rows: dict[str, int],
) -> None:
    """Add the seconds of every round and the rows of one batch."""
    (_, placements), *_ = policies.values()
    rounds = len(next(iter(seconds.values())))
    layers = capture(model, ids, placements[0].num_devices)
    for index, (layer, fitted) in enumerate(zip(layers, calibration.layers, strict=True)):
        stand_ins = Compensation(fitted, None, layer.hidden[:0])
        work, shared = {}, {}
        for name, (policy, placements) in policies.items():
            inputs = layer.inputs
            if policy.keep == "contribution":
                norms = stand_ins.norms(layer.hidden, policy.compensate)
                inputs = replace(inputs, expert_norms=norms)
            chosen = route(inputs, policy, placements[index])
            work[name] = split_by_device(
                layer.hidden, chosen.topk_ids, chosen.topk_weights, placements[index]
            )
            rows[name] += max(part.rows for part in work[name])
            if policy.compensate:
                shared[name] = partial(
                    stand_ins,
                    torch.zeros_like(layer.hidden),
                    layer.hidden,
                    layer.inputs.topk_ids,
                    layer.inputs.topk_weights,
                    chosen.dropped_slots,
                )
        timed = time_in_turn(layer.experts, work, rounds, repeats, shared)
        for name, found in timed.items():
            seconds[name] = [a + b for a, b in zip(seconds[name], found, strict=True)]
