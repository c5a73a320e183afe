"""What caps of every size would do on a trace, experts in order and placed: what a report shows.

Counted, not modelled: every figure is `simulate`'s (or, of counts, the loads'), on batches that the
placement hasn't seen. Time is the planner's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.analysis.cap_words import IN_ORDER, PLACED, said
from paceline.analysis.expert_map import ExpertMap
from paceline.analysis.placing import Wanted, check_alike
from paceline.analysis.plan_judge import Steps, fitted
from paceline.analysis.planner import MAX_BATCHES
from paceline.analysis.traffic import (
    Part,
    batch_loads,
    batches_of,
    count_batches,
    picked,
    spread_over,
)
from paceline.placement import ExpertPlacement
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.progress import Progress
from paceline.traces import Trace
from paceline.traces.loads import trace_loads
from paceline.traces.policy_support import supported_keeps
from paceline.traces.simulate import simulate
from paceline.traces.tables import load_tables

SCHEMA = "paceline-report/1"
GAMMAS = (0.5, 0.75, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
UNITS = ("device", "expert")
SMALL_LOAD = 64
"""Rows an expert below which weights rule on a GPU."""
AXES = {
    "gain": "sum over batches and layers of the busiest device's rows, in order and uncapped / "
    "with this cap and placement; a bound from loads, no time",
    "busiest_device": "sum over batches (overall: and layers) of the busiest device's rows / sum "
    "of the mean rows of a device without a cap",
    "device_loads": "rows of each device, summed over batches",
}
"""What is reduced over what, in every result."""


def cap_study(
    trace: Trace,
    devices: int = 8,
    batch_tokens: int | None = None,
    plan: Plan | None = None,
    progress: Progress | None = None,
    judge: Trace | None = None,
) -> dict[str, Any]:
    """Loads, a placement, and every cap on either of them, as JSON-able values.

    Without placements in `plan` one is searched on the first half of the batches, and everything is
    judged on the second half: at most 32 batches of it, evenly spaced. With them all batches judge.
    With `judge` the placement is searched on all of the trace, and loads, placements and caps are
    those of the other traffic.

    Args:
        trace: any; caps need choices.
        devices: that share the experts, unless the plan places them.
        batch_tokens: tokens of a batch; None: the trace's own forwards, else 1024.
        plan: to show beside the caps.
        progress: told steps done, of how many.
        judge: another trace of the same model.

    Raises:
        ValueError: if there are fewer experts than devices, or plan or judge don't fit the trace.

    >>> from paceline.traces import sample
    >>> found = cap_study(sample("esft_v2lite_law"), batch_tokens=1024)
    >>> found["judged_on"], len(found["ways"])
    ('second half', 42)
    """
    plan = plan or Plan()
    layers = trace.header.layers
    plan.check_model([layer.experts for layer in layers], [layer.k or 1 for layer in layers])
    devices = max((_devices(p) for p in plan.placements), default=devices)
    order = [ExpertMap.contiguous(layer.experts, devices).placement for layer in layers]
    own = _own(plan, trace)
    steps = Steps(progress, 3)
    search = steps.of("placing")
    fitting = batches_of(trace, batch_tokens)
    cut, first = fitting, 0  # what judges: the batches of which trace, from which on
    if judge is not None:
        check_alike(trace, judge)
        cut = batches_of(judge, batch_tokens)
        if own is None:
            own = _searched(fitting, count_batches(fitting), devices, search)
    elif own is None and (first := count_batches(fitting) // 2):
        own = _searched(fitting, first, devices, search)
    batches = count_batches(cut)
    part = Part(first, batches)
    placements = {IN_ORDER: order} | ({} if own is None else {PLACED: own})
    if trace.header.per_token:
        seen = picked(cut, spread_over(part, MAX_BATCHES))
        keep = supported_keeps(cut)[0]
        ways, of_plan = _capped(seen, placements, keep, plan, steps.of("caps"))
    else:
        seen, keep = cut, None
        ways, of_plan = _uncapped(cut, part, placements), None
    active = _active(seen, placements) if keep else []
    if ways[0]["busiest_device"] is None:
        raise ValueError(f"{trace.where} has no assignment to judge by.")
    result = {
        "schema": SCHEMA,
        "trace": trace.where,
        "judge": None if judge is None else judge.where,
        "model": trace.header.model,
        "notes": list(trace.header.notes),
        "axes": AXES,
        "devices": devices,
        "batch_tokens": batch_tokens,
        "batches": batches,
        "batches_are": cut.header.batches,
        "judged_batches": min(batches - first, MAX_BATCHES) if keep else batches - first,
        "judged_on": "another trace" if judge else "second half" if first else "all batches",
        "placement_is": "the plan's"
        if plan.placements
        else "searched on the first trace"
        if judge
        else "searched on the first half"
        if own
        else "in order",
        "keep": keep,
        "layers": [layer.name for layer in layers],
        "expert_to_device": {
            name: [list(p.expert_to_device) for p in own] for name, own in placements.items()
        },
        "loads": trace_loads(cut, order, progress=steps.of("loads")),
        "ways": ways,
        "active": active,
        "plan": of_plan,
    }
    result["verdict"] = said(result)
    return result


def _searched(
    trace: Trace, batches: int, devices: int, progress: Progress | None
) -> list[ExpertPlacement]:
    """The placement of each layer that is searched on the first batches."""
    found = fitted(trace, Part(0, batches), Wanted(devices), progress)
    return [own.placement for own in found.alone]


def _devices(placement: ExpertPlacement | int) -> int:
    return placement if isinstance(placement, int) else placement.num_devices


def _own(plan: Plan, trace: Trace) -> list[ExpertPlacement] | None:
    """The plan's placement of each layer, where it has any."""
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
    trace: Trace,
    placements: Mapping[str, Sequence[ExpertPlacement]],
    keep: str,
    plan: Plan,
    progress: Progress | None,
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Every cap on every placement, no cap first; and the plan."""
    keys: dict[str, tuple[str, str | None, float | None]] = {}
    plans: dict[str, Plan] = {}

    def add(placement: str, unit: str | None, gamma: float | None) -> None:
        name = f"{placement} {unit} {gamma}"
        keys[name] = (placement, unit, gamma)
        policies: Any = ()
        if gamma is not None:
            cap: Any = {"capacity_factor": gamma, "unit": unit, "keep": keep, "min_expert_load": 0}
            policies = (CapacityPolicy(**cap),)
        plans[name] = Plan(policies, tuple(placements[placement]))

    for placement in placements:
        add(placement, None, None)
        for unit in UNITS:
            for gamma in GAMMAS:
                add(placement, unit, gamma)
    if plan.policies:
        plans["plan"] = Plan(
            plan.policies, tuple(placements[PLACED if plan.placements else IN_ORDER])
        )
    found = simulate(trace, plans, progress=progress)["plans"]
    ways = [
        dict(zip(("placement", "unit", "gamma"), keys[name], strict=True))
        | _figures(found[name], placements[keys[name][0]])
        for name in keys
    ]
    if not plan.policies:
        return ways, None
    return ways, _figures(found["plan"], placements[PLACED if plan.placements else IN_ORDER]) | {
        "policy": found["plan"]["policy"]
    }


def _active(
    trace: Trace, placements: Mapping[str, Sequence[ExpertPlacement]]
) -> list[dict[str, Any]]:
    """What every max_active does, where batches are so small that weights rule on a GPU too."""
    small = all(
        table.tokens is not None
        and bool((table.tokens * layer.k < SMALL_LOAD * layer.experts).all())
        for table in load_tables(trace)
        for layer in trace.header.layers
        if layer.k is not None
    )
    most = min(max(own.sizes) for each in placements.values() for own in each)
    if not small or "weight" not in supported_keeps(trace):
        return []
    plans = {"": Plan(placements=tuple(placements[IN_ORDER]))}
    for placement, own in placements.items():
        for count in range(most - 1, 0, -1):
            policy = CapacityPolicy(max_active=count, min_expert_load=SMALL_LOAD)
            plans[f"{placement} {count}"] = Plan((policy,), tuple(own))
    found = {name: each["overall"] for name, each in simulate(trace, plans)["plans"].items()}
    names = ("most_active_experts", "dropped_share", "gate_mass_lost", "lost_tokens")
    return [
        {"placement": placement, "max_active": count or None}
        | {key: found[f"{placement} {count}" if count else ""][key] for key in names}
        for placement, count in [
            (IN_ORDER, 0), *((p, n) for p in placements for n in range(most - 1, 0, -1)),
        ]
    ]  # fmt: skip


def _figures(of_plan: Mapping[str, Any], placements: Sequence[ExpertPlacement]) -> dict[str, Any]:
    """What a page shows of one plan of `simulate`."""
    overall = of_plan["overall"]
    return {
        "dropped_share": overall["dropped_share"],
        "gate_mass_lost": overall["gate_mass_lost"],
        "lost_tokens": overall["lost_tokens"],
        "gain": overall["gain"],
        "busiest_device": overall["device_peak_to_mean"]["mean"],
        "layers": [
            {
                "dropped_share": layer["dropped_share"],
                "busiest_device": layer["device_peak_to_mean"]["mean"],
                "device_loads": np.bincount(
                    placement.expert_to_device,
                    weights=layer["expert_loads_after"],
                    minlength=placement.num_devices,
                ).tolist(),
            }
            for layer, placement in zip(of_plan["layers"], placements, strict=True)
        ],
    }


def _uncapped(
    trace: Trace, part: Part, placements: Mapping[str, Sequence[ExpertPlacement]]
) -> list[dict[str, Any]]:
    """No cap on every placement, from load tables alone."""
    hosts = {
        name: [np.eye(p.num_devices)[list(p.expert_to_device)] for p in own]
        for name, own in placements.items()
    }
    sums = {name: [np.zeros(host.shape[1]) for host in own] for name, own in hosts.items()}
    busiest = {name: np.zeros(len(own)) for name, own in hosts.items()}
    for loads, _ in batch_loads(trace, part):
        for name, own in hosts.items():
            for layer, table in enumerate(loads):
                devices = table @ own[layer]
                sums[name][layer] += devices.sum(0)
                busiest[name][layer] += devices.max(1).sum()
    ways = []
    for name, of_layers in sums.items():
        means = np.array([load.mean() for load in of_layers])
        if not means.any():
            raise ValueError(f"{trace.where} has no assignment: there is nothing to be balanced.")
        ways.append(
            {
                "placement": name,
                "unit": None,
                "gamma": None,
                "dropped_share": 0.0,
                "gate_mass_lost": 0.0,
                "lost_tokens": 0,
                "gain": float(busiest[IN_ORDER].sum() / busiest[name].sum()),
                "busiest_device": float(busiest[name].sum() / means.sum()),
                "layers": [
                    {
                        "dropped_share": 0.0,
                        "busiest_device": float(peak / mean) if mean else None,
                        "device_loads": load.tolist(),
                    }
                    for load, peak, mean in zip(of_layers, busiest[name], means, strict=True)
                ],
            }
        )
    return ways
