"""Place the experts of a trace: fit on one part of the traffic, judge on another, compare ways.

The placement that is handed out is fitted on the whole trace. What it is worth is judged on batches
that took no part in a fit: the second half of the trace with what the first half gives, and, where
there is one, a second trace with what all of the first gives. Two halves of one traffic are alike:
they can't tell what happens when the traffic turns. A second trace can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.analysis.eplb import eplb_map
from paceline.analysis.expert_map import ExpertMap, Loads
from paceline.analysis.placement_search import Shape, greedy_map, search_map
from paceline.analysis.traffic import Part, batch_loads, batches_of, count_batches, pieces_of
from paceline.balance import straggler_loss
from paceline.progress import Progress
from paceline.traces import Trace

Maps = list[ExpertMap]

SCHEMA = "paceline-place/1"
AXES = {
    "device_peak_to_mean": "over batches: sum of the busiest device's rows / sum of the mean rows; "
    "mean over layers",
    "overall": "sum over batches and layers of the busiest device's rows / sum of the mean rows",
    "gain": "overall of experts in order / overall of the placement",
}
"""What is reduced over what, in every result."""


@dataclass(frozen=True)
class Wanted:
    """What a placement is to be.

    Attributes:
        devices: that share the experts.
        replicas: slots a layer beyond one an expert.
        groups: expert groups of a group-limited router.
        nodes: machines, each with whole groups; None: groups stay whole in order.

    >>> Wanted(devices=4, groups=2).shape(experts=8).cells
    2
    """

    devices: int
    replicas: int = 0
    groups: int = 1
    nodes: int | None = None

    def shape(self, experts: int, replicas: int | None = None) -> Shape:
        """For a layer with so many experts."""
        extra = self.replicas if replicas is None else replicas
        return Shape(experts, self.devices, extra, self.groups, self.nodes)


@dataclass
class Balance:
    """Sums over batches of what a way of placing gives, layer by layer.

    Attributes:
        busiest: [layers] rows of the busiest device.
        means: [layers] mean rows of a device.

    >>> balance = Balance()
    >>> balance.add(0, np.array([[3.0, 1.0], [1.0, 3.0]]))
    >>> balance.overall
    1.5
    """

    busiest: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)

    def add(self, layer: int, device_loads: Loads) -> None:
        """Count some batches of a layer, [batches, devices]."""
        while len(self.busiest) <= layer:
            self.busiest.append(0.0)
            self.means.append(0.0)
        self.busiest[layer] += float(device_loads.max(1).sum())
        self.means[layer] += float(device_loads.mean(1).sum())

    @property
    def layers(self) -> list[float]:
        """[layers] peak-to-mean over batches; 1 where there is no load."""
        pairs = zip(self.busiest, self.means, strict=True)
        return [b / m if m > 0 else 1.0 for b, m in pairs]

    @property
    def overall(self) -> float:
        """Peak-to-mean over batches and layers."""
        return sum(self.busiest) / sum(self.means) if sum(self.means) > 0 else 1.0


def place(
    trace: Trace,
    wanted: Wanted,
    judge: Trace | None = None,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> tuple[Maps, dict[str, Any]]:
    """The map of every layer, and what it and other ways are worth, as JSON-able values.

    Args:
        trace: to fit on.
        wanted: devices, replicas and groups.
        judge: another trace of the same model, to judge on as well.
        batch_tokens: tokens of a batch to judge on; None: the trace's own forwards, else 1024.
        progress: told layers placed, of how many, and the last one.

    Raises:
        ValueError: if the placement can't be, or the two traces aren't of one model.

    >>> from paceline.traces import sample
    >>> maps, said = place(sample("esft_v2lite_law"), Wanted(devices=8))
    >>> said["second_half"]["ways"]["search"]["overall"] < 1.2
    True
    """
    cut = batches_of(trace, batch_tokens)
    batches = count_batches(cut)
    for layer in trace.header.layers:
        wanted.shape(layer.experts)  # say what can't be before any work
    half = batches // 2
    done = 0
    total = len(trace.header.layers) * (2 if half else 1)

    def fitted(part: Part) -> dict[str, Maps]:
        nonlocal done
        ways: dict[str, Maps] = {}
        for layer, loads in enumerate(pieces_of(cut, part)):
            for name, found in _ways(loads, wanted).items():
                ways.setdefault(name, []).append(found)
            done += 1
            if progress is not None:
                progress(done, total, trace.header.layers[layer].name)
        # what can't be had in one layer can't be compared
        return {name: maps for name, maps in ways.items() if len(maps) == len(ways["search"])}

    whole = fitted(Part(0, batches))
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "trace": trace.where,
        "model": trace.header.model,
        "notes": list(trace.header.notes),
        "axes": AXES,
        "devices": wanted.devices,
        "replicas": wanted.replicas,
        "groups": wanted.groups,
        "nodes": wanted.nodes,
        "batches": batches,
        "batch_tokens": batch_tokens,
        "layers": [layer.name for layer in trace.header.layers],
        "same_batches": judged(whole, cut, Part(0, batches)),
        "second_half": None,
        "other_trace": None,
    }
    if half:
        result["second_half"] = judged(fitted(Part(0, half)), cut, Part(half, batches))
    if judge is not None:
        check_alike(trace, judge)
        other = batches_of(judge, batch_tokens)
        part = Part(0, count_batches(other))
        result["other_trace"] = {"trace": judge.where, **judged(whole, other, part)}
    result["verdict"] = verdict(result)
    return whole["search" if not wanted.replicas else "search_replicas"], result


def _ways(loads: Loads, wanted: Wanted) -> dict[str, ExpertMap]:
    """The map of a layer by every way that can be had."""
    experts, devices = loads.shape[1], wanted.devices
    ways = {"in_order": ExpertMap.contiguous(experts, devices)}
    if wanted.groups == 1:
        ways["heaviest_first"] = greedy_map(loads, devices)
    for name, replicas in {"": 0, "_replicas": wanted.replicas}.items():
        if name and not replicas:
            continue
        with suppress(ValueError):  # EPLB wants equally many slots on each device
            ways[f"eplb{name}"] = eplb_map(
                loads.sum(0), devices, replicas, wanted.groups, wanted.nodes or 1
            )
        ways[f"search{name}"] = search_map(loads, wanted.shape(experts, replicas))
    return ways


def judged(ways: Mapping[str, Sequence[ExpertMap]], trace: Trace, part: Part) -> dict[str, Any]:
    """What ways of placing give on some batches, as JSON-able values.

    Args:
        ways: name -> map of each layer; "in_order" is what gains refer to.
        trace: whose batches.
        part: which of them.

    >>> from paceline.traces import sample
    >>> maps = [ExpertMap.contiguous(32, 8)] * 6
    >>> said = judged({"in_order": maps}, sample("gpt_oss_20b_decode"), Part(0, 9))
    >>> said["ways"]["in_order"]["gain"]
    1.0
    """
    balances = {name: Balance() for name in ways}
    for loads, _ in batch_loads(trace, part):
        for name, maps in ways.items():
            for layer, table in enumerate(loads):
                balances[name].add(layer, maps[layer].device_loads(table))
    base = balances["in_order"].overall
    return {
        "batches": part.end - part.first,
        "ways": {
            name: {
                "device_peak_to_mean": float(np.mean(balance.layers)),
                "overall": balance.overall,
                "straggler_loss": straggler_loss(balance.overall),
                "gain": base / balance.overall,
                "layers": balance.layers,
            }
            for name, balance in balances.items()
        },
    }


def check_alike(trace: Trace, judge: Trace) -> None:
    """Refuse traces of different models.

    Raises:
        ValueError: if their layers differ in number or experts.
    """
    ours, theirs = ([layer.experts for layer in t.header.layers] for t in (trace, judge))
    if ours != theirs:
        raise ValueError(
            f"{judge.where} has {len(theirs)} layers of {sorted(set(theirs))} experts, "
            f"{trace.where} has {len(ours)} of {sorted(set(ours))}: they are of one model."
        )


def verdict(result: Mapping[str, Any]) -> list[str]:
    """What the figures of `place` mean, in sentences.

    >>> ways = {"search": {"overall": 1.0}, "in_order": {"overall": 1.5}}
    >>> parts = {"same_batches": {"ways": ways}, "second_half": None, "other_trace": None}
    >>> one = {"replicas": 0, **parts}
    >>> verdict(one)[0].endswith("one batch can't tell what others would give.")
    True
    """
    chosen = "search_replicas" if result["replicas"] else "search"
    halves, other = result["second_half"], result["other_trace"]
    lines = []
    if halves is None:
        ways = result["same_batches"]["ways"]
        before, after = ways["in_order"]["overall"], ways[chosen]["overall"]
        lines.append(
            f"On the very batch it was made for, the busiest device gets {after:.2f} x the mean "
            f"instead of {before:.2f}: one batch can't tell what others would give."
        )
    else:
        ways = halves["ways"]
        before, after = ways["in_order"]["overall"], ways[chosen]["overall"]
        lines.append(
            f"Fitted on the first half and judged on the second: the busiest device gets "
            f"{after:.2f} x the mean instead of {before:.2f}, {1 - after / before:.0%} fewer rows "
            "to wait for, without any loss."
        )
        if before / after < 1.02:
            lines.append("That is hardly worth moving weights for.")
        if result["replicas"]:
            alone = ways["search"]["overall"]
            lines.append(
                f"Without replicas it would be {alone:.2f}"
                + (": they are not needed." if alone / after < 1.02 else ".")
            )
        lines.append(
            "Two halves of one traffic are alike; what happens when the traffic turns they "
            "can't tell." + ("" if other else " A second trace can (--judge).")
        )
    if other is not None:
        before, after = (other["ways"][way]["overall"] for way in ("in_order", chosen))
        lines.append(
            f"On {other['trace']}: {after:.2f} x the mean instead of {before:.2f}"
            + (": the placement carries over." if before / after >= 1.1 else "")
            + (": it carries over little." if 1.02 <= before / after < 1.1 else "")
            + (": it does not carry over." if before / after < 1.02 else "")
        )
    return lines
