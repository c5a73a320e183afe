"""Placement of a trace's experts: fitted on one part of the traffic, judged on another.

The placement that is returned is fitted on the whole trace. Its worth is judged on batches that
took no part in a fit: the second half of the trace, with a placement fitted on the first, and,
where there is one, a second trace, with a placement fitted on all of the first. Two halves of one
traffic are alike: they can't tell what happens when traffic changes. A second trace can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from paceline.analysis.eplb import eplb_map
from paceline.analysis.expert_map import ExpertMap, Loads
from paceline.analysis.placement_search import Shape, greedy_map, search_map
from paceline.analysis.results import (
    JudgedPlacements,
    PlacementFigures,
    PlacementsElsewhere,
    PlaceResult,
)
from paceline.analysis.traffic import (
    Part,
    batch_loads,
    batches_of,
    count_batches,
    pieces_of,
    sample,
)
from paceline.analysis.verdict import placement_verdict
from paceline.balance import Peaks, peaks, straggler_loss
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.progress import Progress
from paceline.settings import read_placement
from paceline.traces import Trace

Maps = list[ExpertMap]

SCHEMA = "paceline-place/1"
AXES = {
    "device_peak_to_mean": "over batches: sum of the busiest device's rows / sum of the mean rows; "
    "mean over layers",
    "overall": "sum over batches and layers of the busiest device's rows / sum of the mean rows",
    "gain": "overall of experts in order / overall of the placement",
}
"""The reduction behind each figure, in every result."""


@dataclass(frozen=True)
class PlacementSpec:
    """Requirements on the placement of a model.

    Attributes:
        devices: that share the experts.
        replicas: slots per layer beyond one per expert.
        groups: expert groups of a group-limited router.
        nodes: machines, each with whole groups; None: groups stay whole in order.

    >>> PlacementSpec(devices=4, groups=2).shape(experts=8).cells
    2
    """

    devices: int
    replicas: int = 0
    groups: int = 1
    nodes: int | None = None

    def slots_differ(self, experts: int) -> bool:
        """Return True if devices can't have equally many slots."""
        return (experts + self.replicas) % self.devices != 0

    def shape(self, experts: int, replicas: int | None = None) -> Shape:
        """Make the requirements on a layer with so many experts.

        Raises:
            ValueError: if there is no such map.
        """
        extra = self.replicas if replicas is None else replicas
        return Shape(experts, self.devices, extra, self.groups, self.nodes)


@dataclass(frozen=True)
class SearchedMaps:
    """Searched maps, [layers] each.

    Attributes:
        alone: every expert once.
        replicated: with replicas; empty where the spec has none.
    """

    alone: Maps
    replicated: Maps


def search_maps(
    trace: Trace, part: Part, spec: PlacementSpec, progress: Progress | None = None
) -> SearchedMaps:
    """Search the map of every layer on some batches."""
    pieces = pieces_of(trace, part, progress)
    alone = [search_map(loads, spec.shape(loads.shape[1], 0)) for loads in pieces]
    replicated = pieces if spec.replicas else []
    return SearchedMaps(
        alone, [search_map(loads, spec.shape(loads.shape[1])) for loads in replicated]
    )


def layer_plan(trace: Trace, maps: Sequence[ExpertMap], policies: Sequence[CapacityPolicy]) -> Plan:
    """Make a plan of maps and policies; what is the same in all layers stands in it once."""
    replicated = any(own.replicas for own in maps)
    contiguous = all(own.slots == tuple(range(own.num_experts)) for own in maps)
    in_order = replicated or contiguous
    ks = {layer.k for layer in trace.header.layers}
    experts = {layer.experts for layer in trace.header.layers}
    return Plan(
        policies=tuple(policies[:1] if len(set(policies)) == 1 else policies),
        placements=(maps[0].num_devices,) if in_order else tuple(own.placement for own in maps),
        layers=len(maps),
        experts=experts.pop() if len(experts) == 1 else None,
        k=ks.pop() if len(ks) == 1 else None,
        slots=tuple(own.slots for own in maps) if replicated else (),
    )


def plan_maps(plan: Plan, trace: Trace) -> list[ExpertMap]:
    """Return the expert map of every layer of a plan for the model of a trace.

    Raises:
        ValueError: if the plan doesn't place a layer.

    >>> from paceline.traces import sample
    >>> plan_maps(Plan(placements=(8,)), sample("gpt_oss_20b_decode"))[0].num_devices
    8
    """
    maps = []
    for index, layer in enumerate(trace.header.layers):
        own = read_placement(plan.placement_of(index), layer.experts, layer.name)
        if own is None:
            raise ValueError(f"the plan must place the experts of {layer.name}.")
        maps.append(ExpertMap.of_placement(own))
    return maps


def place(
    trace: Trace,
    spec: PlacementSpec,
    judge: Trace | None = None,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
    *,
    best_of: bool = False,
) -> tuple[Maps, PlaceResult]:
    """Search the map of every layer, and judge it beside those of other methods.

    Args:
        spec: devices, replicas and groups.
        judge: another trace of the same model, to judge on as well.
        batch_tokens: tokens per batch to judge on; None: the trace's own forwards, else 1024.
        progress: called with the layers placed, their number, and the last one.
        best_of: return the maps of the method that is best on batches that took no part in a fit,
            instead of the searched ones.

    Raises:
        ValueError: if there is no such placement, or the two traces aren't of one model.

    >>> from paceline.traces import sample
    >>> maps, result = place(sample("esft_v2lite_law"), PlacementSpec(devices=8))
    >>> result.second_half.ways["search"].overall < 1.2
    True
    """
    cut = batches_of(trace, batch_tokens)
    batches = count_batches(cut)
    layers = trace.header.layers
    for layer in layers:
        spec.shape(layer.experts)  # fail before any work
    half = batches // 2
    done = 0

    def fit(part: Part) -> dict[str, Maps]:
        nonlocal done
        ways: dict[str, Maps] = {}
        for layer, loads in enumerate(pieces_of(cut, part)):
            for name, found in _methods(loads, spec).items():
                ways.setdefault(name, []).append(found)
            done += 1
            if progress is not None:
                progress(done, len(layers) * (2 if half else 1), layers[layer].name)
        # a method that has no map in one layer can't be compared
        return {name: maps for name, maps in ways.items() if len(maps) == len(ways["search"])}

    whole = fit(Part(0, batches))
    elsewhere = None
    if judge is not None:
        check_same_model(trace, judge)
        other = batches_of(judge, batch_tokens)
        found = judge_placements(whole, other, Part(0, count_batches(other)))
        elsewhere = PlacementsElsewhere(trace=judge.where, batches=found.batches, ways=found.ways)
    result = PlaceResult(
        schema=SCHEMA,
        trace=trace.where,
        model=trace.header.model,
        notes=list(trace.header.notes),
        axes=AXES,
        devices=spec.devices,
        replicas=spec.replicas,
        groups=spec.groups,
        nodes=spec.nodes,
        batches=batches,
        batch_tokens=batch_tokens,
        layers=[layer.name for layer in layers],
        same_batches=judge_placements(whole, cut, Part(0, batches)),
        second_half=judge_placements(fit(Part(0, half)), cut, Part(half, batches))
        if half
        else None,
        other_trace=elsewhere,
        verdict=[],
        sample=sample(cut, Part(half, batches), spec.devices),
    )
    result.method = "search_replicas" if spec.replicas else "search"
    if best_of:
        result.method = result.best
    if spec.slots_differ(layers[0].experts):
        result.notes.append(
            f"EPLB is left out: it needs equally many slots per device, and {layers[0].experts} "
            f"experts on {spec.devices} devices are not"
        )
    result.verdict = placement_verdict(result)
    return whole[result.method], result


def _methods(loads: Loads, spec: PlacementSpec) -> dict[str, ExpertMap]:
    """Place the experts of a layer by every method that has a map for it."""
    experts, devices = loads.shape[1], spec.devices
    ways = {"in_order": ExpertMap.contiguous(experts, devices)}
    if spec.groups == 1:
        ways["heaviest_first"] = greedy_map(loads, devices)
    for name, replicas in {"": 0, "_replicas": spec.replicas}.items():
        if name and not replicas:
            continue
        with suppress(ValueError):  # EPLB needs equally many slots on each device
            ways[f"eplb{name}"] = eplb_map(
                loads.sum(0), devices, replicas, spec.groups, spec.nodes or 1
            )
        ways[f"search{name}"] = search_map(loads, spec.shape(experts, replicas))
    return ways


def judge_placements(
    ways: Mapping[str, Sequence[ExpertMap]], trace: Trace, part: Part
) -> JudgedPlacements:
    """Measure the balance that placements give on some batches.

    Args:
        ways: name -> map of each layer; gains refer to "in_order".
    """
    hosts = {name: [own.hosts for own in maps] for name, maps in ways.items()}
    found = measure_balance(trace, part, hosts)
    sums = {name: layers for name, (layers, _) in found.items()}
    overall = {name: float(layers.over("layer").ratio) for name, layers in sums.items()}
    return JudgedPlacements(
        batches=part.end - part.first,
        ways={
            name: PlacementFigures(
                device_peak_to_mean=float(layers.ratio.mean()),
                overall=overall[name],
                straggler_loss=straggler_loss(overall[name]),
                gain=overall["in_order"] / overall[name],
                layers=layers.ratio.tolist(),
            )
            for name, layers in sums.items()
        },
    )


def measure_balance(
    trace: Trace, part: Part, hosts: Mapping[str, Sequence[Loads]]
) -> dict[str, tuple[Peaks, list[Loads]]]:
    """Measure the balance of each layer on some batches, by placement.

    Args:
        hosts: name -> [layers] tables [experts, devices], the share of each expert's rows that a
            device computes.

    Returns:
        name -> (peaks of devices with the axis "layer", [layers] rows of each device).
    """
    none = np.zeros(len(trace.header.layers))
    sums = {name: Peaks(("layer",), none, none) for name in hosts}
    rows = {name: [np.zeros(host.shape[1]) for host in own] for name, own in hosts.items()}
    for loads, _ in batch_loads(trace, part):
        for name, own in hosts.items():
            devices = [table @ host for table, host in zip(loads, own, strict=True)]
            layers = [peaks(table, ("batch", "device")).over("batch") for table in devices]
            busiest = np.array([layer.busiest for layer in layers])
            sums[name] += Peaks(("layer",), busiest, np.array([layer.mean for layer in layers]))
            rows[name] = [a + b.sum(0) for a, b in zip(rows[name], devices, strict=True)]
    return {name: (sums[name], rows[name]) for name in hosts}


def check_same_model(trace: Trace, judge: Trace) -> None:
    """Refuse traces of different models.

    Raises:
        ValueError: if their layers differ in number or experts.
    """
    ours, theirs = ([layer.experts for layer in t.header.layers] for t in (trace, judge))
    if ours != theirs:
        raise ValueError(
            f"{judge.where} must be of one model with {trace.where}, {len(ours)} layers of "
            f"{sorted(set(ours))} experts, got {len(theirs)} of {sorted(set(theirs))}"
        )
