"""Balance figures of a trace: per layer, expert, device, batch, phase and modality.

Every figure says its axes. Within a batch and a layer, peak-to-mean is the largest over the units
(devices by rows, or experts) / their mean, idle units included. Over batches and layers, which run
one after the other, it is the sum of the largest / the sum of the means: the ratio of the time that
experts take to the time with perfect balance. "pooled" takes all batches as one, which no device
ever computes together: batches differ, and their differences cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.balance import straggler_loss
from paceline.placement import ExpertPlacement
from paceline.progress import Progress
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
"""What is reduced over what, in every result."""


def placements_of(
    trace: Trace, devices: int | Sequence[ExpertPlacement]
) -> tuple[ExpertPlacement, ...]:
    """One placement a layer: so many devices with experts in order, or as they are given.

    Raises:
        ValueError: if there are fewer experts than devices, or the placements don't fit the layers.

    >>> from paceline.traces import sample
    >>> [placement.sizes for placement in placements_of(sample("gpt_oss_20b_decode"), 4)][0]
    (8, 8, 8, 8)
    """
    layers = trace.header.layers
    if isinstance(devices, int):
        return tuple(ExpertPlacement.contiguous(layer.experts, devices) for layer in layers)
    given = tuple(devices) * (len(layers) if len(devices) == 1 else 1)
    if len(given) != len(layers):
        raise ValueError(
            f"{len(given)} placements for {len(layers)} layers: allowed is one, or one a layer."
        )
    for layer, placement in zip(layers, given, strict=True):
        if placement.num_experts != layer.experts:
            raise ValueError(
                f"a placement of {placement.num_experts} experts doesn't fit {layer.name}, which "
                f"has {layer.experts}."
            )
    return given


def trace_loads(
    trace: Trace,
    devices: int | Sequence[ExpertPlacement] = 8,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The loads of a trace, as JSON-able values; see `AXES` for what is reduced over what.

    Args:
        trace: any.
        devices: so many, with experts in order, or a placement (one, or one a layer).
        batch_tokens: cut the tokens into batches of so many; None: as in the trace.
        progress: told of layers gone through.

    Raises:
        ValueError: if devices don't fit, or counts are to be cut.

    >>> from paceline.traces import sample
    >>> loads = trace_loads(sample("esft_v2lite_law"), devices=8, batch_tokens=1024)
    >>> loads["batches"], loads["layers"][0]["device_peak_to_mean"]["max"] > 1
    (4, True)
    """
    placements = placements_of(trace, devices)
    cut = trace if batch_tokens is None else trace.regrouped(batch_tokens)
    figures = LoadFigures(cut, placements)
    figures.read(cut, progress)
    header = trace.header
    result = {
        "schema": SCHEMA,
        "trace": trace.where,
        "model": header.model,
        "source": header.source,
        "content": header.content,
        "notes": list(header.notes),
        "devices": placements[0].num_devices,
        "batch_tokens": batch_tokens,
        "batches_are": cut.header.batches,
        "axes": AXES,
        **figures.result(),
    }
    if header.per_token:
        result["rows"] = _with_and_without(trace, placements, batch_tokens)
    return result


def _with_and_without(
    trace: Trace, placements: Sequence[ExpertPlacement], batch_tokens: int | None
) -> dict[str, Any]:
    """What repeats, and the overall figures without it."""
    found = repeats(trace)
    said: dict[str, Any] = {
        "tokens": found.tokens,
        "commonest_share": found.commonest / max(1, found.tokens),
        "repeated_share": found.repeated / max(1, found.tokens),
    }
    choices: dict[str, Without] = {"commonest": "commonest", "repeats": "repeats"}
    for name, which in choices.items():
        rest = found.tokens - (found.commonest if which == "commonest" else found.repeated)
        if not found.repeated or not rest:
            continue
        part = without(trace, which, found)
        part = part if batch_tokens is None else part.regrouped(batch_tokens)
        figures = LoadFigures(part, placements)
        figures.read(part, None)
        said[f"without_{name}"] = figures.result()["overall"]
    return said


class LoadFigures:
    """Sums up load tables; memory grows by a few numbers a batch and layer.

    Args:
        trace: whose layers these are.
        placements: one a layer.
    """

    def __init__(self, trace: Trace, placements: Sequence[ExpertPlacement]) -> None:
        self._header, self._placements = trace.header, placements
        layers, experts = len(trace.header.layers), trace.header.experts
        devices = max(placement.num_devices for placement in placements)
        self._host = np.zeros((layers, experts, devices))
        for layer, placement in enumerate(placements):
            chosen = np.arange(placement.num_experts)
            self._host[layer, chosen, np.array(placement.expert_to_device)] = 1
        self._devices = np.array([placement.num_devices for placement in placements])
        self._experts = np.array([layer.experts for layer in trace.header.layers])
        self._total = np.zeros((layers, experts))
        self._groups: dict[Group, Array] = {}  # [layers, experts] of all batches
        self._group_busiest: dict[Group, float] = {}  # sum over batches and layers
        self._group_tokens: dict[Group, Array] = {}
        self._tokens: Array | None = np.zeros(layers, dtype=np.int64)
        # [batches, layers, 5]: sum, largest device and expert, active experts, most on a device
        self._peaks: list[Array] = []
        self._batches = 0

    def read(self, trace: Trace, progress: Progress | None) -> None:
        """Add all of a trace."""
        for done, table in enumerate(load_tables(trace), start=1):
            self.add(table)
            if progress is not None:
                progress(done, max(done, len(trace.chunks)), f"{self._batches} batches")

    def add(self, table: LoadTable) -> None:
        """Add some batches."""
        counts = table.counts.astype(np.float64)
        if self._header.content == "shares":  # no totals: every layer weighs the same
            counts = counts / np.maximum(counts.sum(2, keepdims=True), 1e-300)
        devices = np.matmul(counts.swapaxes(0, 1), self._host).swapaxes(0, 1)
        busy = (counts > 0).astype(np.float64)
        active = np.matmul(busy.swapaxes(0, 1), self._host).max(2).T
        parts = [counts.sum(2), devices.max(2), counts.max(2), busy.sum(2), active]
        self._peaks.append(np.stack(parts, 2))
        self._total += counts.sum(0)
        self._batches += len(counts)
        if table.tokens is None or self._tokens is None:
            self._tokens = None
        else:
            self._tokens += table.tokens.sum(0)
        for group, loads in table.groups.items():
            own = loads.astype(np.float64)
            busiest = np.matmul(own.swapaxes(0, 1), self._host).max(2).sum()
            self._groups[group] = self._groups.get(group, 0) + own.sum(0)
            self._group_busiest[group] = self._group_busiest.get(group, 0.0) + float(busiest)
        for group, tokens in table.group_tokens.items():
            self._group_tokens[group] = self._group_tokens.get(group, 0) + tokens

    def result(self) -> dict[str, Any]:
        """The figures so far, as JSON-able values.

        Raises:
            ValueError: if there is no batch with a token.
        """
        peaks = np.concatenate(self._peaks) if self._peaks else np.zeros((0, len(self._experts), 5))
        if not peaks[:, :, 0].any():
            raise ValueError("the trace has no assignment: there is nothing to be balanced.")
        layers = [self._layer(layer, peaks[:, layer]) for layer in range(len(self._experts))]
        known = self._tokens is not None and self._header.content != "shares"
        return {
            "batches": self._batches,
            "tokens": int(self._tokens.max()) if known and self._tokens is not None else None,
            "overall": self._overall(peaks, layers),
            "layers": layers,
            "groups": [self._group(group) for group in sorted(self._groups)],
        }

    def _layer(self, layer: int, peaks: Array) -> dict[str, Any]:
        described, placement = self._header.layers[layer], self._placements[layer]
        loads = self._total[layer, : described.experts]
        devices = (loads @ self._host[layer, : described.experts])[: placement.num_devices]
        shares = self._header.content == "shares"
        number: Callable[[Any], Any] = float if shares else int
        figures: dict[str, Any] = {
            "name": described.name,
            "experts": described.experts,
            "k": described.k,
            "tokens": None if self._tokens is None or shares else int(self._tokens[layer]),
            "assignments": None if shares else int(loads.sum()),
            "expert_loads": [number(load) for load in loads],
            "device_loads": [number(load) for load in devices],
            "busiest_expert": int(loads.argmax()),
            "busiest_device": int(devices.argmax()),
            "pooled_device_peak_to_mean": _ratio(devices.max(), devices.sum(), len(devices)),
            "pooled_expert_peak_to_mean": _ratio(loads.max(), loads.sum(), len(loads)),
        }
        total, device, expert, active, most = peaks[peaks[:, 0] > 0].T
        figures["device_peak_to_mean"] = _spread(device, total / placement.num_devices)
        figures["expert_peak_to_mean"] = _spread(expert, total / described.experts)
        figures["straggler_loss"] = straggler_loss(figures["device_peak_to_mean"]["mean"] or 1.0)
        if not shares and len(active):
            figures["active_experts"] = {
                "mean": float(active.mean()), "min": int(active.min()), "max": int(active.max()),
            }  # fmt: skip
            figures["most_active_experts"] = float(most.mean())
        return figures

    def _overall(self, peaks: Array, layers: list[dict[str, Any]]) -> dict[str, Any]:
        total, device, expert, _, most = (peaks[:, :, i] for i in range(5))
        means = total / self._devices
        peak = float(device.sum() / means.sum())
        busy = total > 0
        over_layers = [layer["device_peak_to_mean"]["mean"] for layer in layers]
        figures: dict[str, Any] = {
            "device_peak_to_mean": peak,
            "expert_peak_to_mean": float(expert.sum() / (total / self._experts).sum()),
            "straggler_loss": straggler_loss(peak),
            "over_layers": _percentiles(np.array([p for p in over_layers if p is not None])),
            "balancedness_sum": 1 / peak,
            "balancedness_mean": float((means[busy] / device[busy]).mean()),
            "pooled_device_peak_to_mean": float(
                np.mean([layer["pooled_device_peak_to_mean"] or 1.0 for layer in layers])
            ),
        }
        if self._header.content != "shares":
            figures["most_active_experts"] = float(most[busy].mean())
            best = np.ceil(means)
            figures["best_possible"] = float(best.sum() / means.sum())
            figures["perfect_balance_speedup"] = float(device.sum() / best.sum())
        else:
            figures["perfect_balance_speedup"] = peak
        return figures

    def _group(self, group: Group) -> dict[str, Any]:
        loads = self._groups[group]
        devices = np.einsum("le,led->ld", loads, self._host)
        peaks, means = devices.max(1), devices.sum(1) / self._devices
        mean = bool(means.any())
        tokens = self._group_tokens.get(group)
        shares = self._header.content == "shares"
        return {
            "phase": group[0],
            "modality": group[1],
            "tokens": None if tokens is None else int(tokens.max()),
            "assignments": None if shares else int(loads.sum()),
            "device_peak_to_mean": self._group_busiest[group] / means.sum() if mean else None,
            "pooled_device_peak_to_mean": float(peaks.sum() / means.sum()) if mean else None,
        }


def _spread(largest: Array, means: Array) -> dict[str, float | None]:
    """Peak-to-mean over batches: weighted by time, and percentiles."""
    if not len(largest):
        return {"mean": None, "p50": None, "p95": None, "max": None}
    ratios = largest / means
    return {"mean": float(largest.sum() / means.sum()), **_percentiles(ratios)}


def _percentiles(ratios: Array) -> dict[str, float | None]:
    return {
        "p50": float(np.percentile(ratios, 50)),
        "p95": float(np.percentile(ratios, 95)),
        "max": float(ratios.max()),
    }


def _ratio(largest: float, total: float, units: int) -> float | None:
    return float(largest * units / total) if total > 0 else None
