"""Balance figures of a trace: per layer, expert, device, batch, phase and modality.

Every figure names its axes; `paceline.balance` says how they are reduced. "pooled" takes all
batches as one, which no device ever computes together: their differences cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.balance import (
    Peaks,
    Sample,
    peaks,
    percentile,
    sample_of,
    share,
    spread,
    straggler_loss,
    unit_matrix,
)
from paceline.placement import ExpertPlacement
from paceline.progress import Progress
from paceline.traces.results import (
    ActiveExperts,
    GroupLoads,
    LayerLoads,
    OverallLoads,
    OverLayers,
    RepeatedRows,
    TraceLoads,
)
from paceline.traces.tables import Group, LoadTable, load_tables
from paceline.traces.trace import Trace, Without, repeats, without

Array = npt.NDArray[Any]

SCHEMA = "paceline-trace-loads/1"
AXES = {
    "peak_to_mean": "largest / mean over units, idle ones included, in a batch and layer",
    "over_batches": "mean: sum of the largest / sum of the means; percentiles of ratios",
    "overall": "sum over batches and layers of the largest / sum of the means",
    "over_layers": "percentiles over layers of each layer's figure over batches",
    "groups": "rows of a phase and modality alone: overall, and pooled with layers summed up",
    "pooled": "all batches taken as one; overall: mean over layers",
    "balancedness_sum": "1 / overall device peak-to-mean (how vLLM reduces)",
    "balancedness_mean": "mean over batches and layers of mean / largest (how SGLang reduces)",
    "active_experts": "experts with at least one row, in a batch and layer",
    "most_active_experts": "experts with a row on the device with the most of them, whose weights "
    "it reads; mean over batches (overall: and layers)",
    "best_possible": "device peak-to-mean if rows, being whole, were spread as evenly as can be",
    "perfect_balance_speedup": "sum of the largest devices / sum of the best possible ones",
}
"""The reduction behind each figure, in every result."""


def placements_of(
    trace: Trace, devices: int | Sequence[ExpertPlacement]
) -> tuple[ExpertPlacement, ...]:
    """Return the placement of each layer.

    Args:
        devices: number of devices that share the experts in order, or placements (one for all
            layers, or one per layer).

    Raises:
        ValueError: if there are fewer experts than devices, or the placements don't fit the layers.

    >>> from paceline.traces import sample
    >>> [placement.sizes for placement in placements_of(sample("gpt_oss_20b_decode"), 4)][0]
    (8, 8, 8, 8)
    """
    layers = trace.header.layers
    if isinstance(devices, int):
        return tuple(ExpertPlacement.contiguous(layer.experts, devices) for layer in layers)
    placements = tuple(devices) * (len(layers) if len(devices) == 1 else 1)
    if len(placements) != len(layers):
        raise ValueError(
            f"placements must be one for all layers or one for each of {len(layers)} layers, got "
            f"{len(placements)}"
        )
    for layer, placement in zip(layers, placements, strict=True):
        if placement.num_experts != layer.experts:
            raise ValueError(
                f"the placement of {layer.name} must have its {layer.experts} experts, got "
                f"{placement.num_experts}"
            )
    return placements


def trace_loads(
    trace: Trace,
    devices: int | Sequence[ExpertPlacement] = 8,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> TraceLoads:
    """Measure the loads of a trace; see `AXES` for what is reduced over what.

    Args:
        devices: number of devices that share the experts in order, or placements (one for all
            layers, or one per layer).
        batch_tokens: tokens per batch, to cut the trace anew; None: batches as in the trace.
        progress: called with the chunks read, and their number.

    Raises:
        ValueError: if devices don't fit, or counts are to be cut.

    >>> from paceline.traces import sample
    >>> loads = trace_loads(sample("esft_v2lite_law"), devices=8, batch_tokens=1024)
    >>> loads.batches, loads.layers[0].device_peak_to_mean.max > 1
    (4, True)
    """
    placements = placements_of(trace, devices)
    cut = trace if batch_tokens is None else trace.regrouped(batch_tokens)
    figures = _LoadSums(cut, placements)
    figures.read(cut, progress)
    header, layers = trace.header, figures.layers()
    return TraceLoads(
        schema=SCHEMA,
        trace=trace.where,
        model=header.model,
        source=header.source,
        content=header.content,
        notes=list(header.notes),
        devices=placements[0].num_devices,
        batch_tokens=batch_tokens,
        batches_are=cut.header.batches,
        axes=AXES,
        batches=figures.batches,
        tokens=figures.tokens,
        overall=figures.overall(layers),
        layers=layers,
        groups=figures.groups(),
        sample=_sample(figures, layers, placements[0]),
        rows=_repeated(trace, placements, batch_tokens) if header.per_token else None,
    )


def _sample(
    figures: _LoadSums, layers: Sequence[LayerLoads], placement: ExpertPlacement
) -> Sample | None:
    k = layers[0].k
    if figures.tokens is None or k is None:
        return None
    return sample_of(figures.tokens, figures.batches, k, placement.sizes)


def _repeated(
    trace: Trace, placements: Sequence[ExpertPlacement], batch_tokens: int | None
) -> RepeatedRows:
    found = repeats(trace)
    rest: dict[str, OverallLoads] = {}
    counts: dict[Without, int] = {"commonest": found.commonest, "repeats": found.repeated}
    for which, rows in counts.items():
        if not found.repeated or rows == found.tokens:
            continue
        part = without(trace, which, found)
        part = part if batch_tokens is None else part.regrouped(batch_tokens)
        figures = _LoadSums(part, placements)
        figures.read(part, None)
        rest[f"without_{which}"] = figures.overall(figures.layers())
    return RepeatedRows(
        tokens=found.tokens,
        commonest_share=share(found.commonest, found.tokens),
        repeated_share=share(found.repeated, found.tokens),
        **rest,
    )


class _LoadSums:
    """Sums of load tables; memory grows by a few numbers per batch and layer.

    Args:
        placements: one per layer.
    """

    def __init__(self, trace: Trace, placements: Sequence[ExpertPlacement]) -> None:
        self._header, self._placements = trace.header, placements
        self._shares = trace.header.content == "shares"
        layers, experts = len(trace.header.layers), trace.header.experts
        devices = max(placement.num_devices for placement in placements)
        self._host = np.zeros((layers, experts, devices))
        for layer, placement in enumerate(placements):
            self._host[layer, : placement.num_experts, : placement.num_devices] = unit_matrix(
                placement.expert_to_device, placement.num_devices
            )
        self._num_devices = np.array([placement.num_devices for placement in placements])
        self._num_experts = np.array([layer.experts for layer in trace.header.layers])
        self._total = np.zeros((layers, experts))
        self._groups: dict[Group, Array] = {}  # [layers, experts] of all batches
        self._group_busiest: dict[Group, float] = {}  # sum over batches and layers
        self._group_tokens: dict[Group, Array] = {}
        self._tokens: Array | None = np.zeros(layers, dtype=np.int64)
        # [batches, layers, 5]: sum, largest device and expert, active experts, most on a device
        self._rows: list[Array] = []
        self.batches = 0

    def read(self, trace: Trace, progress: Progress | None) -> None:
        """Add all batches of a trace."""
        for done, table in enumerate(load_tables(trace), start=1):
            self.add(table)
            if progress is not None:
                progress(done, max(done, len(trace.chunks)), f"{self.batches} batches")

    def add(self, table: LoadTable) -> None:
        """Add some batches."""
        counts = table.counts.astype(np.float64)
        if self._shares:  # no totals: every layer weighs the same
            counts = counts / np.maximum(counts.sum(2, keepdims=True), 1e-300)
        busy = (counts > 0).astype(np.float64)
        parts = [
            counts.sum(2),
            self._device_loads(counts).max(2),
            counts.max(2),
            busy.sum(2),
            self._device_loads(busy).max(2),
        ]
        self._rows.append(np.stack(parts, 2))
        self._total += counts.sum(0)
        self.batches += len(counts)
        if table.tokens is None or self._tokens is None:
            self._tokens = None
        else:
            self._tokens += table.tokens.sum(0)
        for group, loads in table.groups.items():
            own = loads.astype(np.float64)
            busiest = self._device_loads(own).max(2).sum()
            self._groups[group] = self._groups.get(group, 0) + own.sum(0)
            self._group_busiest[group] = self._group_busiest.get(group, 0.0) + float(busiest)
        for group, tokens in table.group_tokens.items():
            self._group_tokens[group] = self._group_tokens.get(group, 0) + tokens

    def _device_loads(self, loads: Array) -> Array:
        """Add up expert loads, [batches, layers, experts] -> [batches, layers, devices]."""
        by_layer: Array = np.matmul(loads.swapaxes(0, 1), self._host).swapaxes(0, 1)
        return by_layer

    @property
    def tokens(self) -> int | None:
        """Tokens of the layer that saw the most; None where unknown."""
        return None if self._tokens is None or self._shares else int(self._tokens.max())

    def _figures(self) -> tuple[Peaks, Peaks, Array, Array]:
        """Return the peaks of devices and of experts, and [batches, layers] active experts, in all
        and on the device with the most.

        Raises:
            ValueError: if there is no batch with a token.
        """
        if not self._total.any():
            raise ValueError("the trace has no assignment: there is nothing to be balanced.")
        total, device, expert, active, most = np.moveaxis(np.concatenate(self._rows), 2, 0)
        axes = ("batch", "layer")
        return (
            Peaks(axes, device, total / self._num_devices),
            Peaks(axes, expert, total / self._num_experts),
            active,
            most,
        )

    def layers(self) -> list[LayerLoads]:
        """Sum up each layer.

        Raises:
            ValueError: if there is no batch with a token.
        """
        device, expert, active, most = self._figures()
        return [
            self._layer(
                layer,
                Peaks(("batch",), device.busiest[:, layer], device.mean[:, layer]),
                Peaks(("batch",), expert.busiest[:, layer], expert.mean[:, layer]),
                active[:, layer],
                most[:, layer],
            )
            for layer in range(len(self._num_experts))
        ]

    def _layer(
        self, layer: int, device: Peaks, expert: Peaks, active: Array, most: Array
    ) -> LayerLoads:
        described, placement = self._header.layers[layer], self._placements[layer]
        loads = self._total[layer, : described.experts]
        device_loads = (loads @ self._host[layer, : described.experts])[: placement.num_devices]
        number: Callable[[Any], Any] = float if self._shares else int
        busy = device.mean > 0
        counted = busy.any() and not self._shares
        active, most = active[busy], most[busy]
        over_batches = spread(device)
        return LayerLoads(
            name=described.name,
            experts=described.experts,
            k=described.k,
            tokens=None if self._tokens is None or self._shares else int(self._tokens[layer]),
            assignments=None if self._shares else int(loads.sum()),
            expert_loads=[number(load) for load in loads],
            device_loads=[number(load) for load in device_loads],
            busiest_expert=int(loads.argmax()),
            busiest_device=int(device_loads.argmax()),
            pooled_device_peak_to_mean=_pooled(device_loads),
            pooled_expert_peak_to_mean=_pooled(loads),
            device_peak_to_mean=over_batches,
            expert_peak_to_mean=spread(expert),
            straggler_loss=straggler_loss(over_batches.mean or 1.0),
            active_experts=ActiveExperts(
                mean=float(active.mean()), min=int(active.min()), max=int(active.max())
            )
            if counted
            else None,
            most_active_experts=float(most.mean()) if counted else None,
        )

    def overall(self, layers: Sequence[LayerLoads]) -> OverallLoads:
        """Sum up all layers.

        Raises:
            ValueError: if there is no batch with a token.
        """
        device, expert, _, most = self._figures()
        busy = device.mean > 0
        over_all = device.over("batch", "layer")
        peak = float(over_all.ratio)
        over_layers = [x for x in (one.device_peak_to_mean.mean for one in layers) if x is not None]
        best = device.best_possible.over("batch", "layer")
        return OverallLoads(
            device_peak_to_mean=peak,
            expert_peak_to_mean=float(expert.over("batch", "layer").ratio),
            straggler_loss=straggler_loss(peak),
            over_layers=OverLayers(
                p50=percentile(over_layers, 50),
                p95=percentile(over_layers, 95),
                max=max(over_layers),
            ),
            balancedness_sum=1 / peak,
            balancedness_mean=float((device.mean[busy] / device.busiest[busy]).mean()),
            pooled_device_peak_to_mean=float(
                np.mean([layer.pooled_device_peak_to_mean or 1.0 for layer in layers])
            ),
            most_active_experts=None if self._shares else float(most[busy].mean()),
            best_possible=None if self._shares else float(best.ratio),
            perfect_balance_speedup=peak
            if self._shares
            else float(over_all.busiest / best.busiest),
        )

    def groups(self) -> list[GroupLoads]:
        """Sum up each phase and modality."""
        return [self._group(group) for group in sorted(self._groups)]

    def _group(self, group: Group) -> GroupLoads:
        loads, tokens = self._groups[group], self._group_tokens.get(group)
        devices = np.einsum("le,led->ld", loads, self._host)
        pooled = Peaks(("layer",), devices.max(1), devices.sum(1) / self._num_devices).over("layer")
        busy = bool(pooled.mean > 0)
        return GroupLoads(
            phase=group[0],
            modality=group[1],
            tokens=None if tokens is None else int(tokens.max()),
            assignments=None if self._shares else int(loads.sum()),
            device_peak_to_mean=float(self._group_busiest[group] / pooled.mean) if busy else None,
            pooled_device_peak_to_mean=float(pooled.ratio) if busy else None,
        )


def _pooled(loads: Array) -> float | None:
    return float(peaks(loads, ("unit",)).ratio) if loads.any() else None
