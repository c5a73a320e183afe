"""What plans cost on a trace: every batch routed as an engine would, then the cost model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from paceline.analysis.cap_words import lost
from paceline.analysis.cost import STAGES, LayerShape, layer_cost
from paceline.analysis.expert_map import ExpertMap, Loads
from paceline.analysis.hardware import Hardware
from paceline.plan import Plan
from paceline.progress import Progress
from paceline.routing import Assignment
from paceline.traces import Trace
from paceline.traces.chunk import Chunk
from paceline.traces.simulate import simulate
from paceline.traces.trace import Chunks


@dataclass
class Costs:
    """What one plan costs, layer by layer, as means over batches.

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

    def as_json(self) -> dict[str, Any]:
        """Figures of a step through all layers, as JSON-able values."""
        return {
            "microseconds": sum(self.seconds) * 1e6,
            "stages": {name: sum(each) * 1e6 for name, each in self.stages.items()},
            "bytes_sent": sum(self.bytes),
            "receive_buffer_bytes": max(self.receive_bytes),
            "most_active_experts": self.most_active,
            "dropped_share": self.dropped_share,
            "gate_mass_lost": self.gate_mass_lost,
            "layers": [seconds * 1e6 for seconds in self.seconds],
        }


@dataclass
class _Seen:
    """What was routed in one layer under one plan, a row a batch."""

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
    """What each plan costs on a trace.

    Args:
        trace: of choices; its batches are what a layer computes at once.
        plans: name -> policies and placements; every plan has a placement.
        shape: of each layer; its experts are those of the trace.
        hardware: of each device.
        progress: told layers done, of how many.

    Raises:
        ValueError: as `paceline.traces.simulate` does.

    >>> from paceline.analysis.hardware import PRESETS
    >>> from paceline.traces import sample
    >>> shape = LayerShape(2048, 1408, 64, 6)
    >>> trace = sample("esft_v2lite_law").regrouped(2048)
    >>> found = plan_costs(trace, {"in order": Plan(placements=(8,))}, shape, PRESETS["h100"])
    >>> sum(found["in order"].seconds) > sum(found["in order"].balanced)
    True
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
    seen = {name: [_Seen() for _ in range(layers)] for name in plans}

    def watch(name: str, layer: int, step: int, routed: Assignment) -> None:
        ids, row = routed.bounded_ids, seen[name][layer]
        devices = placements[name][layer].num_devices
        hosts = device_of[name][layer][ids.clamp(max=shape.experts)]
        row.loads.append(routed.expert_loads_after.numpy().astype(np.float64))
        row.tokens.append(int(routed.pools.total))
        row.received.append([int((hosts == d).any(1).sum()) for d in range(devices)])

    said = simulate(trace, plans, watch=watch, progress=progress)
    out = {}
    for name in plans:
        costs, result = Costs(), said["plans"][name]
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
            costs.lost.append(lost(result["layers"][layer]))
            for stage in STAGES:
                costs.stages[stage].append(float(cost.seconds[stage].mean()))
        costs.most_active = result["overall"]["most_active_experts"]
        costs.dropped_share = result["overall"]["dropped_share"]
        costs.gate_mass_lost = result["overall"]["gate_mass_lost"]
        out[name] = costs
    return out


def _placement(plan: Plan, layer: int, experts: int) -> ExpertMap:
    placement = plan.placement_of(layer)
    if placement is None:
        raise ValueError("a plan without a placement has no cost: say how many devices there are.")
    if isinstance(placement, int):
        return ExpertMap.contiguous(experts, placement)
    return ExpertMap.of_placement(placement)


def physical(trace: Trace, maps: Sequence[ExpertMap]) -> Trace:
    """The trace as an engine with replicas sees it: slots as experts, replicas taken in turn.

    Args:
        trace: of choices.
        maps: of each layer, with equally many slots.

    >>> from paceline.traces import sample
    >>> trace = sample("gpt_oss_20b_decode")
    >>> maps = [ExpertMap((*range(32), 0), 32, 3)] * 6
    >>> physical(trace, maps).header.layers[0].experts
    33
    """
    layers = tuple(
        layer.model_copy(update={"experts": len(own.slots)})
        for layer, own in zip(trace.header.layers, maps, strict=True)
    )
    # scores of experts that were not chosen have no slot
    content = "choices" if trace.header.content == "scores" else trace.header.content
    header = trace.header.model_copy(update={"layers": layers, "content": content})
    return Trace(header, _Physical(trace.chunks, maps), trace.where)


class _Physical:
    """Chunks whose ids are slots."""

    def __init__(self, chunks: Chunks, maps: Sequence[ExpertMap]) -> None:
        self._chunks = chunks
        most = max(max(own.copies) for own in maps)
        self._slots = torch.stack([_slot_table(own, most) for own in maps])
        self._copies = torch.stack([torch.tensor([*own.copies, 1]) for own in maps])

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self._chunks:
            assert chunk.ids is not None
            experts = self._copies.shape[1] - 1
            ids = chunk.ids.long()
            inside = (ids >= 0) & (ids < experts)
            safe = torch.where(inside, ids, experts)
            token = torch.arange(ids.shape[1])[:, None]
            slots = torch.stack(
                [
                    table[own, token % copies[own]]
                    for table, copies, own in zip(self._slots, self._copies, safe, strict=True)
                ]
            )
            topk = chunk.topk_scores
            if topk is None and chunk.scores is not None:
                topk = chunk.scores.gather(2, safe.clamp(max=experts - 1))
            yield replace(chunk, ids=slots, scores=None, topk_scores=topk)


def _slot_table(own: ExpertMap, most: int) -> torch.Tensor:
    """[experts + 1, copies] slots of each expert; no expert has none."""
    table = torch.full((own.num_experts + 1, most), len(own.slots), dtype=torch.int64)
    taken = [0] * own.num_experts
    for slot, expert in enumerate(own.slots):
        table[expert, taken[expert]] = slot
        taken[expert] += 1
    return table
