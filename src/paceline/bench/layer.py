"""Time one expert-parallel MoE layer under several policies, stage by stage.

Emulated: one process plays the devices in turn; the slowest device's experts count, and nothing is
sent. On ranks: each process is a device, rows really travel, and a layer lasts until its last
rank is done. The speed-up is set beside the bound that the loads give:

    bound = T / (T - X + X * busiest load with the policy / busiest load without)

for T the time of the layer without a cap and X that of the busiest device's experts within it. What
doesn't depend on expert load (gate, and the part of dispatch and combine) counts in full. Emulated
devices are timed in processor time of their one thread, which other programs of the machine hardly
change; ranks, which wait for each other, in wall time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from paceline.analysis.emulate import split_by_device
from paceline.bench.spread import ratios, shuffled, spread
from paceline.bench.workload import Workload
from paceline.engines.transformers.expert_parallel import sum_by_token
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing import RoutingInputs, route

_FIELDS = ("hidden", "ids", "weights")
STAGES = ("gate", "route", "dispatch", "experts", "combine")
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
Choice = tuple[Tensor, Tensor]
Decide = Callable[[RoutingInputs, CapacityPolicy | None], Choice]


@dataclass
class Measured:
    """Timings of one policy, a value a round.

    Attributes:
        stages: seconds of each stage on the busiest device, [stages][rounds].
        total: seconds of the layer, [rounds].
        loads: rows that each device computes, [devices].
        dropped: share of assignments dropped.
        gate_mass: share of the gate scores kept.
        bytes_sent: by all ranks in one layer, None where nothing is sent.
    """

    stages: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in STAGES})
    total: list[float] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    dropped: float = 0.0
    gate_mass: float = 1.0
    bytes_sent: int | None = None


def without_cap(inputs: RoutingInputs) -> Choice:
    """[tokens, k] ids and weights as the model chose them."""
    return inputs.topk_ids, inputs.topk_weights


def decider(placement: ExpertPlacement, source: int) -> Decide:
    """How one device decides for its own tokens, which all live on `source`."""

    def decide(inputs: RoutingInputs, policy: CapacityPolicy | None) -> Choice:
        if policy is None:
            return without_cap(inputs)
        if policy.pool == "source" or policy.expand == "own_device":
            sources = torch.full(inputs.topk_ids.shape[:1], source, device=inputs.topk_ids.device)
            inputs = replace(inputs, token_source=sources)
        assignment = route(inputs, policy, placement)
        return assignment.topk_ids, assignment.topk_weights

    return decide


# -- emulated devices ------------------------------------------------------------------------------


def emulate_layer(
    workloads: list[Workload],
    experts: Experts,
    placement: ExpertPlacement,
    policies: Mapping[str, CapacityPolicy | None],
    rounds: int,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Measured]:
    """Time the layer with every device of `placement` played in turn.

    Args:
        workloads: the tokens of each source device.
        experts: all experts, on global ids.
        placement: expert -> device.
        policies: label -> policy; None is no cap.
        rounds: each runs every policy once.
        progress: called after each policy of each round.
    """
    results = {name: Measured() for name in policies}
    work: dict[str, list[tuple[Tensor, ...]]] = {}
    with torch.inference_mode():
        for name, policy in policies.items():
            parts, result = [], results[name]
            kept = total = 0
            mass = torch.zeros(2, dtype=torch.float64)
            for source, load in enumerate(workloads):
                inputs = load.gate(load.hidden)
                ids, weights = decider(placement, source)(inputs, policy)
                parts.append(split_by_device(load.hidden, ids, weights, placement.expert_to_device))
                kept += int((ids[:, : load.shape.k] < placement.num_experts).sum())
                total += inputs.topk_ids.numel()
                mass += _mass(inputs, ids, placement.num_experts)
            work[name] = [
                tuple(torch.cat([getattr(p[d], f) for p in parts]) for f in _FIELDS)
                for d in range(placement.num_devices)
            ]
            result.loads = [len(device[1]) for device in work[name]]
            result.dropped, result.gate_mass = 1 - kept / total, float(mass[1] / mass[0])
        for name in policies:  # touch code and memory once
            _slowest(experts, work[name])
        for turn in range(rounds):
            for name in shuffled(list(policies), turn):
                _emulated_round(
                    workloads[0], experts, placement, policies[name], work[name], results[name]
                )
                progress()
    return results


def _emulated_round(
    load: Workload,
    experts: Experts,
    placement: ExpertPlacement,
    policy: CapacityPolicy | None,
    work: list[tuple[Tensor, ...]],
    result: Measured,
) -> None:
    """One device's gate, route, dispatch and combine, and the slowest device's experts."""
    decide, marks = decider(placement, 0), [time.thread_time()]
    inputs = load.gate(load.hidden)
    marks.append(time.thread_time())
    ids, weights = decide(inputs, policy)
    marks.append(time.thread_time())
    flat = ids.reshape(-1)
    order = torch.argsort(flat)
    count = int((flat < placement.num_experts).sum())
    order = order[:count]
    rows = load.hidden[order // ids.shape[1]]
    marks.append(time.thread_time())
    slowest = _slowest(experts, work)
    again = time.thread_time()
    rows.mul_(weights.reshape(-1)[order].unsqueeze(1))
    sum_by_token(rows, order, ids < placement.num_experts)
    combine = time.thread_time() - again
    times = [b - a for a, b in pairwise(marks)] + [slowest, combine]
    for stage, seconds in zip(STAGES, times, strict=True):
        result.stages[stage].append(seconds)
    result.total.append(sum(times))


def _slowest(experts: Experts, work: list[tuple[Tensor, ...]]) -> float:
    """Seconds of the slower of the two devices with most rows.

    Not of all: the slowest of many equal devices on one noisy core is noise more than work.
    """
    slowest = 0.0
    for hidden, ids, weights in sorted(work, key=lambda device: -len(device[1]))[:2]:
        if len(ids):
            start = time.thread_time()
            experts(hidden, ids, weights)
            slowest = max(slowest, time.thread_time() - start)
    return slowest


def _mass(inputs: RoutingInputs, ids: Tensor, num_experts: int) -> Tensor:
    """[2] float64 gate mass of all genuine assignments and of those kept."""
    k = inputs.topk_ids.shape[1]
    scores = (
        inputs.topk_weights if inputs.scores is None else inputs.scores.gather(1, inputs.topk_ids)
    )
    kept = ids[:, :k] < num_experts
    return torch.stack([scores.sum().double(), (scores * kept).sum().double()])


# -- reporting -------------------------------------------------------------------------------------


def summary(
    results: Mapping[str, Measured], policies: Mapping[str, CapacityPolicy | None]
) -> list[dict[str, Any]]:
    """One JSON-able row a policy, compared with the first one, which has no cap."""
    base = next(iter(results.values()))
    whole = spread(base.total)["median"]
    expert_time = spread(base.stages["experts"])["median"]
    rows = []
    for name, result in results.items():
        share = max(result.loads) / max(base.loads)
        bound = whole / (whole - expert_time + expert_time * share)
        faster = ratios(base.total, result.total)
        mean = sum(base.loads) / len(base.loads)
        rows.append(
            {
                "policy": name,
                "busiest_load": max(result.loads),
                "busiest_share": max(result.loads) / max(1, sum(result.loads)),
                "peak_to_mean": max(result.loads) / mean if mean else 1.0,
                "loads": result.loads,
                "dropped_share": result.dropped,
                "gate_mass_kept": result.gate_mass,
                "bytes_sent": result.bytes_sent,
                "seconds": spread(result.total),
                "stages": {stage: spread(times) for stage, times in result.stages.items()},
                "load_bound": max(base.loads) / max(1, max(result.loads)),
                "bound": bound,
                "speedup": faster,
                "share_of_bound": {key: value / bound for key, value in faster.items()},
                "experts_speedup": ratios(base.stages["experts"], result.stages["experts"]),
            }
        )
    return rows
