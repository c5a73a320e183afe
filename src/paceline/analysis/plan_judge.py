"""Modelled cost of plans on a trace: every batch routed as an engine would, then the cost model.

Placements and caps are judged on batches that took no part in choosing them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch

from paceline.analysis.cost import STAGES, LayerShape, layer_cost
from paceline.analysis.expert_map import ExpertMap, Loads, maps_in_order, replica_bytes
from paceline.analysis.hardware import BYTES, Hardware
from paceline.analysis.placing import SearchedMaps, layer_plan
from paceline.analysis.plan_goal import Goal
from paceline.analysis.results import (
    ActivePoint,
    FrontierPoint,
    JudgedPlan,
    ReplicaCost,
    StepCost,
    Variant,
    loss,
)
from paceline.analysis.traffic import count_batches, with_replicas
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.progress import Progress, Steps
from paceline.routing import Assignment
from paceline.traces import Trace
from paceline.traces.policy_support import supported_keeps, supported_pools
from paceline.traces.simulate import simulate

Chosen = Mapping[str, Mapping[float, list[CapacityPolicy]]]
"""Placement ("in_order" or "placed") -> budget of gate mass -> policy of each layer."""

AnyCost = TypeVar("AnyCost", bound=StepCost)


@dataclass
class Costs:
    """Cost of one plan, layer by layer, as means over batches.

    Attributes:
        seconds: [layers] of a layer.
        stages: stage -> [layers] seconds.
        balanced: [layers] seconds if all devices had the mean's work.
        bytes: [layers] bytes that all devices send.
        receive_bytes: [layers] most bytes that a device ever receives in a dispatch.
        lost: [layers] share of the gate mass dropped; of the assignments, where it is unknown.
        most_active: experts with a row on the device with the most, mean over batches and layers.
        dropped_share: over layers and batches.
        gate_mass_lost: likewise; None: unknown.
    """

    seconds: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in STAGES})
    balanced: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)
    receive_bytes: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    most_active: float = 0.0
    dropped_share: float = 0.0
    gate_mass_lost: float | None = None

    def step(self, base: float, kind: type[AnyCost], **more: Any) -> AnyCost:
        """Sum up a step through all layers.

        Args:
            base: seconds of a step with nothing done, to which the gain refers.
            more: its further fields.
        """
        return kind(
            microseconds=sum(self.seconds) * 1e6,
            stages={name: sum(each) * 1e6 for name, each in self.stages.items()},
            bytes_sent=sum(self.bytes),
            receive_buffer_bytes=max(self.receive_bytes),
            most_active_experts=self.most_active,
            dropped_share=self.dropped_share,
            gate_mass_lost=self.gate_mass_lost,
            layers=[seconds * 1e6 for seconds in self.seconds],
            gain=base / sum(self.seconds) - 1,
            **more,
        )


@dataclass
class _Routed:
    """Routing of one layer under one plan, a row per batch."""

    loads: list[Loads] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    received: list[list[int]] = field(default_factory=list)


def plan_costs(
    trace: Trace,
    plans: Mapping[str, Plan],
    shape: LayerShape,
    hardware: Hardware,
    progress: Progress | None = None,
) -> dict[str, Costs]:
    """Compute the cost of each plan on a trace.

    Args:
        trace: of choices; a layer computes one of its batches at a time.
        plans: name -> policies and placements; every plan has a placement.
        shape: of each layer; its experts are those of the trace.
        progress: called with the layers done, and their number.

    Raises:
        ValueError: as `paceline.traces.simulate` does.
    """
    layers = len(trace.header.layers)
    placements = {
        name: [_placement(plan, layer, shape.experts) for layer in range(layers)]
        for name, plan in plans.items()
    }
    device_of = {
        name: [torch.tensor([*m.placement.expert_to_device, m.num_devices]) for m in maps]
        for name, maps in placements.items()
    }
    seen = {name: [_Routed() for _ in range(layers)] for name in plans}

    def watch(name: str, layer: int, step: int, routed: Assignment) -> None:
        ids, row = routed.bounded_ids, seen[name][layer]
        devices = placements[name][layer].num_devices
        hosts = device_of[name][layer][ids.clamp(max=shape.experts)]
        row.loads.append(routed.expert_loads_after.numpy().astype(np.float64))
        row.tokens.append(int(routed.pools.total))
        row.received.append([int((hosts == d).any(1).sum()) for d in range(devices)])

    simulated = simulate(trace, plans, watch=watch, progress=progress)
    out = {}
    for name in plans:
        costs, result = Costs(), simulated.plans[name]
        for layer, row in enumerate(seen[name]):
            cost = layer_cost(
                np.stack(row.loads),
                row.tokens,
                placements[name][layer],
                shape,
                hardware,
                np.array(row.received),
            )
            costs.seconds.append(float(cost.total.mean()))
            costs.balanced.append(float(cost.balanced.mean()))
            costs.bytes.append(float(cost.bytes.mean()))
            costs.receive_bytes.append(float(cost.busiest_bytes.max()))
            costs.lost.append(loss(result.layers[layer]))
            for stage in STAGES:
                costs.stages[stage].append(float(cost.seconds[stage].mean()))
        costs.most_active = result.overall.most_active_experts
        costs.dropped_share = result.overall.dropped_share
        costs.gate_mass_lost = result.overall.gate_mass_lost
        out[name] = costs
    return out


def _placement(plan: Plan, layer: int, experts: int) -> ExpertMap:
    placement = plan.placement_of(layer)
    if placement is None:
        raise ValueError("a plan must have placements to have a cost")
    if isinstance(placement, int):
        return ExpertMap.contiguous(experts, placement)
    return ExpertMap.of_placement(placement)


def judge_plans(
    trace: Trace,
    found: SearchedMaps,
    chosen: Chosen,
    allowed: Sequence[CapacityPolicy],
    goal: Goal,
    steps: Steps,
) -> JudgedPlan:
    """Compute the cost of every option on batches that took no part in choosing it.

    `add_caps` adds the ways with caps, once it is known which of the frontier's are taken. "active"
    has each max_active among the `allowed` policies, the same in all layers.
    """
    maps = {"in_order": maps_in_order(found.alone), "placed": found.alone}
    plans = {base: layer_plan(trace, own, []) for base, own in maps.items()}
    points = [(base, budget) for base in maps for budget in sorted(chosen[base])]
    plans |= {f"{b} {x}": layer_plan(trace, maps[b], chosen[b][x]) for b, x in points}
    actives = [
        (b, policy, policy.max_active)
        for b in maps
        for policy in allowed
        if policy.max_active is not None and policy.factor is None
    ]
    plans |= {f"{b} {most} active": layer_plan(trace, maps[b], [p]) for b, p, most in actives}
    costs = plan_costs(trace, plans, goal.shape, goal.hardware, steps.next("judged"))
    base = sum(costs["in_order"].seconds)
    ways: dict[str, StepCost | ReplicaCost] = {
        "nothing": costs["in_order"].step(base, StepCost),
        "place": costs["placed"].step(base, StepCost),
    }
    if goal.spec.replicas:
        ways["replicas"] = _replica_cost(trace, found.replicated, goal, base, steps)
    return JudgedPlan(
        batches=count_batches(trace),
        ways=ways,
        frontier=[
            costs[f"{b} {x}"].step(base, FrontierPoint, placement=b, budget=x) for b, x in points
        ],
        active=[
            costs[f"{b} {most} active"].step(base, ActivePoint, placement=b, max_active=most)
            for b, _, most in actives
        ],
        perfect_balance_gain=base / sum(costs["in_order"].balanced) - 1,
    )


def largest_budget(part: JudgedPlan, placement: str, most: float) -> float | None:
    """Return the largest budget whose caps lose at most `most` on the batches that judge.

    Caps that lost little where they were chosen may lose more elsewhere. Where gate mass is unknown
    the limit is on the share of the assignments. None: none is within it.
    """
    budgets = [
        point.budget
        for point in part.frontier
        if point.placement == placement and point.budget <= most and loss(point) <= most
    ]
    return max(budgets, default=None)


def add_caps(part: JudgedPlan, budgets: Mapping[str, float | None]) -> None:
    """Add "cap" and "place and cap" to the ways of a part: points of its frontier.

    Args:
        part: from `judge_plans`.
        budgets: placement -> budget, None: no cap.
    """
    alone = {"in_order": "nothing", "placed": "place"}
    for name, base in (("cap", "in_order"), ("place and cap", "placed")):
        points = [
            StepCost(**{each.name: getattr(point, each.name) for each in fields(StepCost)})
            for point in part.frontier
            if (point.placement, point.budget) == (base, budgets[base])
        ]
        part.ways[name] = points[0] if points else part.ways[alone[base]]


def variants(
    trace: Trace,
    maps: Sequence[ExpertMap],
    policies: Sequence[CapacityPolicy],
    base: float,
    goal: Goal,
    steps: Steps,
) -> list[Variant]:
    """Compute the cost of the chosen caps with other settings, on the same batches.

    Args:
        base: seconds of a step with nothing done, to which gains refer.
        goal: shape and hardware.
    """
    plans = {
        name: layer_plan(trace, maps, [p.replace(**change) if _varies(p) else p for p in policies])
        for name, change in _changes(trace, policies).items()
    }
    if not plans:
        return []
    costs = plan_costs(trace, plans, goal.shape, goal.hardware, steps.next("other settings"))
    return [costs[name].step(base, Variant, change=name) for name in plans]


def _varies(policy: CapacityPolicy) -> bool:
    """Return if a policy caps rows alone: max_active needs batch pools and a min_expert_load."""
    return policy.caps and policy.factor is not None and policy.max_active is None


def _changes(trace: Trace, policies: Sequence[CapacityPolicy]) -> dict[str, dict[str, Any]]:
    """List other settings for which the trace has what they need."""
    caps = [policy for policy in policies if _varies(policy)]
    if not caps:
        return {}
    possible: dict[str, dict[str, Any]] = {
        f"pool={pool}": {"pool": pool} for pool in supported_pools(trace) if pool != "batch"
    }
    keeps = supported_keeps(trace)
    possible |= {f"keep={k}": {"keep": k} for k in ("weight", "first") if k in keeps}
    possible["min_expert_load=0"] = {"min_expert_load": 0}
    return {
        name: change
        for name, change in possible.items()
        if any(getattr(caps[0], field) != value for field, value in change.items())
    }


def _replica_cost(
    trace: Trace, maps: Sequence[ExpertMap], goal: Goal, base: float, steps: Steps
) -> ReplicaCost:
    """Compute the cost of a placement with replicas, and the memory they take."""
    shape = replace(goal.shape, experts=len(maps[0].slots))
    plans = {"replicas": Plan(placements=(goal.spec.devices,), layers=len(maps))}
    costs = plan_costs(
        with_replicas(trace, maps), plans, shape, goal.hardware, steps.next("replicas")
    )
    taken = replica_bytes(maps, shape.hidden, shape.expert_size, BYTES[goal.shape.precision])
    return costs["replicas"].step(base, ReplicaCost, replica_gb_a_device=taken / 1e9)
