"""Time one expert-parallel MoE layer under several policies, stage by stage.

Emulated: one process plays the devices in turn; the slowest device's experts count, and nothing is
sent. On ranks: each process is a device, rows really travel, and a layer lasts
until its last rank is done. The speed-up is set beside the bound that the loads give:

    bound = T / (T - X + X * busiest load with the policy / busiest load without)

for T the time of the layer without a cap and X that of the busiest device's experts within it. What
doesn't depend on expert load (gate, and the part of dispatch and combine) counts in full. Emulated
devices are timed in processor time of their one thread, which other programs of the machine hardly
change; ranks, which wait for each other, in wall time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from paceline.balance import share
from paceline.bench.emulated import Experts, slowest_device, split_by_device
from paceline.bench.timing import Spread, ratios, share_of, spread, turns
from paceline.bench.workload import Workload
from paceline.engines.transformers.expert_parallel.collectives import RankGroup
from paceline.engines.transformers.expert_parallel.implementation import (
    ExpertParallel,
    sum_by_token,
)
from paceline.engines.transformers.expert_parallel.routing import policy_for_share, route_on_rank
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing import Assignment, RoutingInputs, route

STAGES = ("gate", "route", "dispatch", "experts", "combine")
NO_CAP = CapacityPolicy(mode="observe")
UNTOUCHED = "untouched"
"""Label of Transformers' own expert parallelism on ranks, with no part of Paceline in it."""

_NO_EXPERT = "the workload must have at least one token with an expert, got none."


@dataclass
class LayerTimings:
    """Timings of one policy, a value per round.

    Attributes:
        stages: seconds of each stage on the busiest device, [stages][rounds].
        total: seconds of the layer, [rounds].
        rows: rows that each device computes, [devices].
        dropped: share of assignments dropped.
        gate_mass: share of the gate scores kept.
        bytes_sent: by all ranks in one layer, None where nothing is sent.
    """

    stages: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in STAGES})
    total: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    dropped: float = 0.0
    gate_mass: float = 1.0
    bytes_sent: int | None = None


class LayerRow(BaseModel):
    """Result of one policy beside no cap; times in seconds, `loads` are rows per device."""

    policy: str
    busiest_load: int
    busiest_share: float
    peak_to_mean: float
    loads: list[int]
    dropped_share: float
    gate_mass_kept: float
    bytes_sent: int | None
    seconds: Spread
    stages: dict[str, Spread]
    load_bound: float
    bound: float
    speedup: Spread
    share_of_bound: Spread
    experts_speedup: Spread | None


def tokens_of_all(parts: Sequence[RoutingInputs]) -> RoutingInputs:
    """Join the routing of all devices' tokens: the tokens of part i are on device i."""
    device = parts[0].topk_ids.device
    sizes = torch.tensor([len(part.topk_ids) for part in parts], device=device)
    sources = torch.arange(len(parts), device=device).repeat_interleave(sizes)

    def joined(name: str) -> Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        if name == "valid" and any(tensor is not None for tensor in tensors):
            every = [torch.ones(len(part.topk_ids), dtype=torch.bool) for part in parts]
            tensors = [a if t is None else t for t, a in zip(tensors, every, strict=True)]
        return None if any(tensor is None for tensor in tensors) else torch.cat(tensors)

    return replace(
        parts[0],
        topk_ids=torch.cat([part.topk_ids for part in parts]),
        topk_weights=torch.cat([part.topk_weights for part in parts]),
        scores=joined("scores"),
        topk_scores=joined("topk_scores"),
        valid=joined("valid"),
        token_request=joined("token_request"),
        token_source=sources,
    )


def emulate_layer(
    workloads: Sequence[Workload],
    experts: Experts,
    placement: ExpertPlacement,
    policies: Mapping[str, CapacityPolicy | None],
    rounds: int,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, LayerTimings]:
    """Time the layer under each policy with every device of `placement` played in turn.

    `workloads` are the tokens of each device, or one for all devices; `experts` are all experts, on
    global ids. `progress` is called after each policy of each round.

    Raises:
        ValueError: if no token has an expert, or a policy needs what the workload doesn't know.
    """
    results = {name: LayerTimings() for name in policies}
    assignments: dict[str, Assignment] = {}
    work = {}
    with torch.inference_mode():
        together = tokens_of_all([load.gate(load.hidden) for load in workloads])
        hidden = torch.cat([load.hidden for load in workloads])
        for name, policy in policies.items():
            chosen = assignments[name] = route(together, policy or NO_CAP, placement)
            work[name] = split_by_device(hidden, chosen.topk_ids, chosen.topk_weights, placement)
            offered = int(chosen.expert_loads_before.sum())
            if not offered:
                raise ValueError(_NO_EXPERT)
            result = results[name]
            result.rows = [device.rows for device in work[name]]
            result.dropped = int(chosen.dropped) / offered
            result.gate_mass = float(chosen.gate_mass_kept)
        for name in policies:  # touch code and memory once
            slowest_device(experts, work[name])
        for name, _ in turns(policies, rounds, warm_up=0):
            run = partial(slowest_device, experts, work[name])
            stages = _first_device(
                workloads[0], together, policies[name], placement, assignments[name], run
            )
            for stage, seconds in zip(STAGES, stages, strict=True):
                results[name].stages[stage].append(seconds)
            results[name].total.append(sum(stages))
            progress()
    return results


def _first_device(
    load: Workload,
    together: RoutingInputs,
    policy: CapacityPolicy | None,
    placement: ExpertPlacement,
    assignment: Assignment,
    run_experts: Callable[[], float],
) -> list[float]:
    """Time STAGES: gate, route, dispatch and combine of the first device, experts of the slowest.

    Every device routes a pool of all tokens for all of them, any other pool for its own alone.
    """
    marks = [time.thread_time()]
    inputs = load.gate(load.hidden)
    marks.append(time.thread_time())
    count = len(load.hidden)
    if policy is not None:
        if policy.pool == "batch":
            route(together, policy, placement)
        else:
            source = None if together.token_source is None else together.token_source[:count]
            own = policy_for_share(policy, placement.num_devices, inputs.topk_ids.device.type)
            route(replace(inputs, token_source=source), own, placement)
    marks.append(time.thread_time())
    ids, weights = assignment.topk_ids[:count], assignment.topk_weights[:count]
    kept = ids < placement.num_experts
    order = torch.argsort(ids.reshape(-1))[: int(kept.sum())]
    rows = load.hidden[order // ids.shape[1]]
    marks.append(time.thread_time())
    slowest = run_experts()
    again = time.thread_time()
    rows.mul_(weights.reshape(-1)[order].unsqueeze(1))
    sum_by_token(rows, order, kept)
    combine = time.thread_time() - again
    return [b - a for a, b in pairwise(marks)] + [slowest, combine]


# -- real ranks ------------------------------------------------------------------------------------


def _stock_layer(experts: nn.Module, shares_batch: bool) -> Callable[..., Tensor]:
    """Wrap local experts in Transformers' own exchange of tokens between ranks."""
    from transformers.distributed.expert_parallel import AllReduceEP, AllToAllEP

    size = dist.get_world_size()
    mesh = init_device_mesh(
        "cpu" if not torch.cuda.is_available() else "cuda", (size, 1), mesh_dim_names=("ep", "one")
    )
    tensor_parallel = mesh["ep"] if shares_batch else mesh["one"]
    stock: Callable[..., Tensor] = (AllReduceEP if shares_batch else AllToAllEP)(
        experts, mesh["ep"], tensor_parallel
    )
    return stock


def time_layer_on_ranks(
    workload: Workload,
    experts: nn.Module,
    placement: ExpertPlacement,
    policies: Mapping[str, CapacityPolicy | None],
    rounds: int,
    *,
    shares_batch: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, LayerTimings]:
    """Time the layer on all ranks; every rank must call it alike, and all get the same result.

    `workload` are this rank's tokens (with `shares_batch`, the same on all ranks), `experts` this
    rank's, on local ids. Where Transformers can run the layer, its own exchange is timed too.
    """
    group = RankGroup()
    parallel = ExpertParallel(experts.forward, placement, group, shares_batch)
    stock = _stock_layer(experts, shares_batch) if _stock_can(workload, placement) else None
    names = [*policies, *([UNTOUCHED] if stock is not None else [])]
    results = {name: LayerTimings() for name in names}
    with torch.inference_mode():
        for name in names:  # touch code, memory and connections once
            _count_rows(name, workload, parallel, placement, policies, results[name])
            _rank_round(name, workload, parallel, stock, policies, LayerTimings())
        for name, _ in turns(names, rounds, warm_up=0):
            _rank_round(name, workload, parallel, stock, policies, results[name])
            progress()
    return results


def _route_own(
    inputs: RoutingInputs, policy: CapacityPolicy | None, parallel: ExpertParallel
) -> Assignment:
    """Return this rank's assignment, as an attached model routes."""
    if not parallel.shares_batch:
        source = torch.full_like(inputs.topk_ids[:, 0], parallel.group.rank, dtype=torch.int64)
        inputs = replace(inputs, token_source=source)
    return route_on_rank(inputs, policy or NO_CAP, parallel)


def _rank_round(
    name: str,
    workload: Workload,
    parallel: ExpertParallel,
    stock: Callable[..., Tensor] | None,
    policies: Mapping[str, CapacityPolicy | None],
    result: LayerTimings,
) -> None:
    times = dict.fromkeys(STAGES, 0.0)
    hidden = workload.hidden
    dist.barrier()
    start = last = time.perf_counter()

    def tick(stage: str) -> None:
        nonlocal last
        now = time.perf_counter()
        times[stage] += now - last
        last = now

    inputs = workload.gate(hidden)
    tick("gate")
    if name == UNTOUCHED and stock is not None:
        stock(hidden, inputs.topk_ids, inputs.topk_weights)
        tick("experts")
    else:
        policy, ids, weights = policies[name], inputs.topk_ids, inputs.topk_weights
        if policy is not None:
            assigned = _route_own(inputs, policy, parallel)
            ids, weights = assigned.topk_ids, assigned.topk_weights
        tick("route")
        parallel.clock = tick
        parallel(hidden, ids, weights)
        parallel.clock = None
    spent = torch.tensor([*times.values(), time.perf_counter() - start], dtype=torch.float64)
    everyone = [torch.empty_like(spent) for _ in range(parallel.group.size)]
    dist.all_gather(everyone, spent)
    table = torch.stack(everyone)
    # a layer lasts until its last rank is done; the stages are of the rank that computes longest
    busiest = table[int(table[:, STAGES.index("experts")].argmax())]
    for index, stage in enumerate(STAGES):
        result.stages[stage].append(float(busiest[index]))
    result.total.append(float(table[:, -1].max()))


def _count_rows(
    name: str,
    workload: Workload,
    parallel: ExpertParallel,
    placement: ExpertPlacement,
    policies: Mapping[str, CapacityPolicy | None],
    result: LayerTimings,
) -> None:
    """Count loads, drops and bytes of one layer, over all ranks."""
    before = parallel.bytes_sent
    assigned = _route_own(workload.gate(workload.hidden), policies.get(name), parallel)
    device = torch.tensor([*placement.expert_to_device, placement.num_devices])
    rows = torch.bincount(
        device[assigned.topk_ids.reshape(-1)], minlength=placement.num_devices + 1
    )
    genuine = torch.stack([assigned.expert_loads_before.sum(), assigned.dropped])
    parallel(workload.hidden, assigned.topk_ids, assigned.topk_weights)
    sent = parallel.bytes_sent - before
    totals = torch.cat([rows[:-1].double(), genuine.double(), assigned.gate_mass])
    totals = torch.cat([totals, totals.new_tensor([sent])])
    dist.all_reduce(totals)
    counts: list[Any] = totals.tolist()
    ranks = parallel.group.size if parallel.shares_batch else 1
    *per_device, offered, dropped, whole, kept, sent = counts
    if not offered:
        raise ValueError(_NO_EXPERT)
    result.rows = [int(count / ranks) for count in per_device]
    result.bytes_sent = int(sent) if name != UNTOUCHED else None
    result.gate_mass = kept / whole if whole else 1.0
    result.dropped = dropped / offered


def _stock_can(workload: Workload, placement: ExpertPlacement) -> bool:
    """Check that Transformers can run this: equal blocks in order, an expert in every slot.

    Every rank must call it, and all get the same answer.
    """
    ids = workload.gate(workload.hidden).topk_ids
    full = (ids < placement.num_experts).all().long()
    dist.all_reduce(full, op=dist.ReduceOp.MIN)
    experts, devices = placement.num_experts, placement.num_devices
    return (
        bool(full)
        and experts % devices == 0
        and placement == ExpertPlacement.contiguous(experts, devices)
    )


# -- results ---------------------------------------------------------------------------------------


def compare_layers(results: Mapping[str, LayerTimings]) -> list[LayerRow]:
    """Compare every policy with the first one, which has no cap."""
    base = next(iter(results.values()))
    whole = spread(base.total)["median"]
    expert_time = spread(base.stages["experts"])["median"]
    rows = []
    for name, result in results.items():
        busiest, experts = max(result.rows), result.stages["experts"]
        bound = whole / (whole - expert_time + expert_time * busiest / max(base.rows))
        faster = ratios(base.total, result.total)
        rows.append(
            LayerRow(
                policy=name,
                busiest_load=busiest,
                busiest_share=share(busiest, sum(result.rows)),
                peak_to_mean=busiest * len(base.rows) / sum(base.rows),
                loads=result.rows,
                dropped_share=result.dropped,
                gate_mass_kept=result.gate_mass,
                bytes_sent=result.bytes_sent,
                seconds=spread(result.total),
                stages={stage: spread(times) for stage, times in result.stages.items()},
                load_bound=max(base.rows) / max(1, busiest),
                bound=bound,
                speedup=faster,
                share_of_bound=share_of(faster, bound),
                # None where the busiest device's experts got no row
                experts_speedup=ratios(base.stages["experts"], experts) if all(experts) else None,
            )
        )
    return rows
