"""Time a layer on real ranks: Paceline's expert parallelism beside Transformers' own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from paceline.bench.layer_timing import NO_CAP, NO_EXPERT, STAGES, LayerTimings
from paceline.bench.timing import turns
from paceline.bench.workload import Workload
from paceline.engines.transformers.expert_parallel.collectives import RankGroup
from paceline.engines.transformers.expert_parallel.implementation import ExpertParallel
from paceline.engines.transformers.expert_parallel.routing import route_on_rank
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing import Assignment, RoutingInputs

UNTOUCHED = "untouched"
"""Label of Transformers' own expert parallelism, with no part of Paceline in it."""


def stock_layer(experts: nn.Module, shares_batch: bool) -> Callable[..., Tensor]:
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


def time_layer(
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

    Args:
        workload: this rank's tokens (with `shares_batch`, the same on all ranks).
        experts: this rank's experts, on local ids.
        placement: expert -> rank.
        policies: label -> policy; None is no cap.
        rounds: each runs every policy once, and the untouched layer.
        shares_batch: True if all ranks hold the same tokens.
        progress: called after each policy of each round.
    """
    group = RankGroup()
    parallel = ExpertParallel(experts.forward, placement, group, shares_batch)
    stock = stock_layer(experts, shares_batch) if _stock_can(workload, placement) else None
    names = [*policies, *([UNTOUCHED] if stock is not None else [])]
    results = {name: LayerTimings() for name in names}
    with torch.inference_mode():
        for name in names:  # touch code, memory and connections once
            _count(name, workload, parallel, placement, policies, results[name])
            _round(name, workload, parallel, stock, policies, LayerTimings())
        for name, _ in turns(names, rounds, warm_up=0):
            _round(name, workload, parallel, stock, policies, results[name])
            progress()
    return results


def _decide(
    inputs: RoutingInputs, policy: CapacityPolicy | None, parallel: ExpertParallel
) -> Assignment:
    """Return this rank's assignment, as an attached model routes."""
    if not parallel.shares_batch:
        source = torch.full_like(inputs.topk_ids[:, 0], parallel.group.rank, dtype=torch.int64)
        inputs = replace(inputs, token_source=source)
    return route_on_rank(inputs, policy or NO_CAP, parallel)


def _round(
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
            decided = _decide(inputs, policy, parallel)
            ids, weights = decided.topk_ids, decided.topk_weights
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


def _count(
    name: str,
    workload: Workload,
    parallel: ExpertParallel,
    placement: ExpertPlacement,
    policies: Mapping[str, CapacityPolicy | None],
    result: LayerTimings,
) -> None:
    """Count loads, drops and bytes of one layer, over all ranks."""
    before = parallel.bytes_sent
    decided = _decide(workload.gate(workload.hidden), policies.get(name), parallel)
    device = torch.tensor([*placement.expert_to_device, placement.num_devices])
    rows = torch.bincount(device[decided.topk_ids.reshape(-1)], minlength=placement.num_devices + 1)
    genuine = torch.stack([decided.expert_loads_before.sum(), decided.dropped])
    parallel(workload.hidden, decided.topk_ids, decided.topk_weights)
    sent = parallel.bytes_sent - before
    totals = torch.cat([rows[:-1].double(), genuine.double(), decided.gate_mass])
    totals = torch.cat([totals, totals.new_tensor([sent])])
    dist.all_reduce(totals)
    counts: list[Any] = totals.tolist()
    ranks = parallel.group.size if parallel.shares_batch else 1
    *per_device, offered, dropped, whole, kept, sent = counts
    if not offered:
        raise ValueError(NO_EXPERT)
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
