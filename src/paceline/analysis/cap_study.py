"""Caps of every size on a trace, experts in order and placed: the figures of a report.

Counted, not modelled: every figure is from `simulate` (of counts, from the loads), on batches that
took no part in searching the placement. Time is the planner's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.analysis.expert_map import ExpertMap, Loads
from paceline.analysis.placing import (
    PlacementSpec,
    check_same_model,
    measure_balance,
    search_maps,
)
from paceline.analysis.results import ActiveWay, CapFigures, CapLayer, CapPlan, CapStudy, CapWay
from paceline.analysis.traffic import (
    MAX_BATCHES,
    Part,
    batches_of,
    count_batches,
    picked,
    spread_over,
)
from paceline.analysis.verdict import IN_ORDER, PLACED, caps_verdict
from paceline.balance import unit_matrix
from paceline.placement import ExpertPlacement
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.progress import Progress, Steps
from paceline.traces import Trace
from paceline.traces.loads import trace_loads
from paceline.traces.policy_support import supported_keeps
from paceline.traces.results import SimulatedPlan
from paceline.traces.simulate import simulate
from paceline.traces.tables import load_tables

SCHEMA = "paceline-report/1"
GAMMAS = (0.5, 0.75, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
UNITS = ("device", "expert")
SMALL_LOAD = 64
"""Rows per expert below which the time to read weights rules on a GPU."""
AXES = {
    "gain": "sum over batches and layers of the busiest device's rows, in order and uncapped / "
    "with this cap and placement; a bound from loads, no time",
    "busiest_device": "sum over batches (overall: and layers) of the busiest device's rows / sum "
    "of the mean rows of a device without a cap",
    "device_loads": "rows of each device, summed over batches",
}
"""The reduction behind each figure, in every result."""

Placements = Mapping[str, Sequence[ExpertPlacement]]


def cap_study(
    trace: Trace,
    devices: int = 8,
    batch_tokens: int | None = None,
    plan: Plan | None = None,
    progress: Progress | None = None,
    judge: Trace | None = None,
) -> CapStudy:
    """Measure loads, a placement, and every cap on experts in order and placed.

    Without placements in `plan` one is searched on the first half of the batches, and everything is
    judged on the second half: at most 32 batches of it, evenly spaced. With them all batches judge.
    With `judge` the placement is searched on all of the trace, and loads, placements and caps are
    those of the other traffic.

    Args:
        trace: any; caps need choices.
        devices: that share the experts, unless the plan places them.
        batch_tokens: tokens per batch; None: the trace's own forwards, else 1024.
        plan: to show beside the caps.
        progress: called with the steps done, and their number.
        judge: another trace of the same model.

    Raises:
        ValueError: if there are fewer experts than devices, or plan or judge don't fit the trace.

    >>> from paceline.traces import sample
    >>> found = cap_study(sample("esft_v2lite_law"), batch_tokens=1024)
    >>> found.judged_on, len(found.ways), found.way("placed", "device", 1.25).gain > 1.2
    ('second half', 42, True)
    """
    plan = plan or Plan()
    layers = trace.header.layers
    plan.check_model([layer.experts for layer in layers], [layer.k or 1 for layer in layers])
    devices = max((_count_devices(p) for p in plan.placements), default=devices)
    own = _plan_placements(plan, trace)
    # gains are over experts in order on as many devices, layer by layer
    counts = [devices] * len(layers) if own is None else [each.num_devices for each in own]
    order = [
        ExpertMap.contiguous(layer.experts, count).placement
        for layer, count in zip(layers, counts, strict=True)
    ]
    steps = Steps(progress, 3)
    search = steps.next("placing")
    fitting = batches_of(trace, batch_tokens)
    cut, first = fitting, 0  # the batches that judge: of which trace, and from which on
    if judge is not None:
        check_same_model(trace, judge)
        cut = batches_of(judge, batch_tokens)
        if own is None:
            own = _searched(fitting, count_batches(fitting), devices, search)
    elif own is None and (first := count_batches(fitting) // 2):
        own = _searched(fitting, first, devices, search)
    batches = count_batches(cut)
    part = Part(first, batches)
    placements = {IN_ORDER: order} | ({} if own is None else {PLACED: own})
    of_plan, active, keep = None, [], None
    if trace.header.per_token:
        seen = picked(cut, spread_over(part, MAX_BATCHES))
        keep = supported_keeps(cut)[0]
        ways, of_plan = _capped(seen, placements, keep, plan, steps.next("caps"))
        active = _active(seen, placements)
    else:
        ways = _uncapped(cut, part, placements)
    if ways[0].busiest_device is None:
        raise ValueError(f"{trace.where} has no assignment to judge by.")
    result = CapStudy(
        schema=SCHEMA,
        trace=trace.where,
        judge=None if judge is None else judge.where,
        model=trace.header.model,
        notes=list(trace.header.notes),
        axes=AXES,
        devices=devices,
        batch_tokens=batch_tokens,
        batches=batches,
        batches_are=cut.header.batches,
        judged_batches=min(batches - first, MAX_BATCHES) if keep else batches - first,
        judged_on="another trace" if judge else "second half" if first else "all batches",
        placement_is="the plan's"
        if plan.placements
        else "searched on the first trace"
        if judge
        else "searched on the first half"
        if own
        else "in order",
        keep=keep,
        layers=[layer.name for layer in layers],
        expert_to_device={
            name: [list(p.expert_to_device) for p in own] for name, own in placements.items()
        },
        loads=trace_loads(cut, order, progress=steps.next("loads")),
        ways=ways,
        active=active,
        plan=of_plan,
        verdict=[],
    )
    result.verdict = caps_verdict(result)
    return result


def _searched(
    trace: Trace, batches: int, devices: int, progress: Progress | None
) -> list[ExpertPlacement]:
    """Search the placement of each layer on the first batches."""
    found = search_maps(trace, Part(0, batches), PlacementSpec(devices), progress)
    return [own.placement for own in found.alone]


def _count_devices(placement: ExpertPlacement | int) -> int:
    return placement if isinstance(placement, int) else placement.num_devices


def _plan_placements(plan: Plan, trace: Trace) -> list[ExpertPlacement] | None:
    """Return the plan's placement of each layer, where it has any."""
    if not plan.placements:
        return None
    found = []
    for index, layer in enumerate(trace.header.layers):
        placement = plan.placement_of(index)
        assert placement is not None
        found.append(
            ExpertPlacement.contiguous(layer.experts, placement)
            if isinstance(placement, int)
            else placement
        )
    return found


def _capped(
    trace: Trace, placements: Placements, keep: str, plan: Plan, progress: Progress | None
) -> tuple[list[CapWay], CapPlan | None]:
    """Simulate every cap on every placement, no cap first; and the plan."""
    caps: list[tuple[str | None, float | None]] = [
        (None, None),
        *((unit, gamma) for unit in UNITS for gamma in GAMMAS),
    ]
    keys = {f"{p} {unit} {gamma}": (p, unit, gamma) for p in placements for unit, gamma in caps}
    plans: dict[str, Plan] = {}
    for name, (placement, unit, gamma) in keys.items():
        cap: Any = {"capacity_factor": gamma, "unit": unit, "keep": keep, "min_expert_load": 0}
        policies = () if gamma is None else (CapacityPolicy(**cap),)
        plans[name] = Plan(policies, tuple(placements[placement]))
    own = placements[PLACED if plan.placements else IN_ORDER]
    if plan.policies:
        plans["plan"] = Plan(plan.policies, tuple(own))
    found = simulate(trace, plans, progress=progress).plans
    ways = [
        CapWay(placement=p, unit=unit, gamma=gamma, **_figures(found[name], placements[p]))
        for name, (p, unit, gamma) in keys.items()
    ]
    if not plan.policies:
        return ways, None
    return ways, CapPlan(policy=found["plan"].policy, **_figures(found["plan"], own))


def _figures(plan: SimulatedPlan, placements: Sequence[ExpertPlacement]) -> dict[str, Any]:
    """Collect the fields of `CapFigures`."""
    overall = plan.overall
    figures = CapFigures(
        dropped_share=overall.dropped_share,
        gate_mass_lost=overall.gate_mass_lost,
        lost_tokens=overall.lost_tokens,
        gain=overall.gain,
        busiest_device=overall.device_peak_to_mean.mean,
        layers=[
            CapLayer(
                dropped_share=layer.dropped_share,
                busiest_device=layer.device_peak_to_mean.mean,
                device_loads=np.bincount(
                    placement.expert_to_device,
                    weights=layer.expert_loads_after,
                    minlength=placement.num_devices,
                ).tolist(),
            )
            for layer, placement in zip(plan.layers, placements, strict=True)
        ],
    )
    return vars(figures)


def _active(trace: Trace, placements: Placements) -> list[ActiveWay]:
    """Simulate every max_active, where batches are so small that weights rule on a GPU too."""
    small = all(
        table.tokens is not None
        and bool((table.tokens * layer.k < SMALL_LOAD * layer.experts).all())
        for table in load_tables(trace)
        for layer in trace.header.layers
        if layer.k is not None
    )
    if not small or "weight" not in supported_keeps(trace):
        return []
    most = max(max(own.sizes) for each in placements.values() for own in each)
    keys: list[tuple[str, int | None]] = [
        (IN_ORDER, None),
        *((placement, count) for placement in placements for count in range(most - 1, 0, -1)),
    ]
    plans = {}
    for placement, count in keys:
        policy = () if count is None else (
            CapacityPolicy(max_active=count, min_expert_load=SMALL_LOAD),
        )  # fmt: skip
        plans[f"{placement} {count}"] = Plan(policy, tuple(placements[placement]))
    found = simulate(trace, plans).plans
    ways = []
    for placement, count in keys:
        overall = found[f"{placement} {count}"].overall
        ways.append(
            ActiveWay(
                placement=placement,
                max_active=count,
                most_active_experts=overall.most_active_experts,
                dropped_share=overall.dropped_share,
                gate_mass_lost=overall.gate_mass_lost,
                lost_tokens=overall.lost_tokens,
            )
        )
    return ways


def _uncapped(trace: Trace, part: Part, placements: Placements) -> list[CapWay]:
    """Measure every placement without a cap, from load tables alone."""
    hosts: dict[str, list[Loads]] = {
        name: [unit_matrix(p.expert_to_device, p.num_devices).astype(np.float64) for p in own]
        for name, own in placements.items()
    }
    found = measure_balance(trace, part, hosts)
    overall = {name: layers.over("layer") for name, (layers, _) in found.items()}
    if not overall[IN_ORDER].mean:
        raise ValueError(f"{trace.where} has no assignment: there is nothing to be balanced.")
    return [
        CapWay(
            placement=name,
            unit=None,
            gamma=None,
            dropped_share=0.0,
            gate_mass_lost=0.0,
            lost_tokens=0,
            gain=float(overall[IN_ORDER].busiest / overall[name].busiest),
            busiest_device=float(overall[name].ratio),
            layers=[
                CapLayer(
                    dropped_share=0.0,
                    busiest_device=float(ratio) if mean else None,
                    device_loads=total.tolist(),
                )
                for total, ratio, mean in zip(rows, layers.ratio, layers.mean, strict=True)
            ],
        )
        for name, (layers, rows) in found.items()
    ]
