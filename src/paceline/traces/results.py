"""Results of `trace_loads` and `simulate`, with the names that their JSON has."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

from paceline.balance import Sample, Spread


class Result:
    """A dataclass with a form in JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values; figures that this kind of trace can't have are left out."""
        values: dict[str, Any] = asdict(cast(Any, self), dict_factory=_known)
        return values


_OPTIONAL = {
    "sample", "rows", "active_experts", "most_active_experts", "best_possible", "without_commonest",
    "without_repeats",
}  # fmt: skip


def _known(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if value is not None or name not in _OPTIONAL}


@dataclass(frozen=True, kw_only=True)
class ActiveExperts:
    """Number of experts with at least one row, over batches."""

    mean: float
    min: int
    max: int


@dataclass(frozen=True, kw_only=True)
class LayerLoads:
    """Loads of one layer; counts are None where a trace holds shares."""

    name: str
    experts: int
    k: int | None
    tokens: int | None
    assignments: int | None
    expert_loads: list[float]
    device_loads: list[float]
    busiest_expert: int
    busiest_device: int
    pooled_device_peak_to_mean: float | None
    pooled_expert_peak_to_mean: float | None
    device_peak_to_mean: Spread
    expert_peak_to_mean: Spread
    straggler_loss: float
    active_experts: ActiveExperts | None = None
    most_active_experts: float | None = None


@dataclass(frozen=True, kw_only=True)
class OverLayers:
    """Percentiles over layers."""

    p50: float
    p95: float
    max: float


@dataclass(frozen=True, kw_only=True)
class OverallLoads:
    """Loads of all layers."""

    device_peak_to_mean: float
    expert_peak_to_mean: float
    straggler_loss: float
    over_layers: OverLayers
    balancedness_sum: float
    balancedness_mean: float
    pooled_device_peak_to_mean: float
    most_active_experts: float | None = None
    best_possible: float | None = None
    perfect_balance_speedup: float


@dataclass(frozen=True, kw_only=True)
class GroupLoads:
    """Loads from the rows of one phase and modality alone."""

    phase: str
    modality: str
    tokens: int | None
    assignments: int | None
    device_peak_to_mean: float | None
    pooled_device_peak_to_mean: float | None


@dataclass(frozen=True, kw_only=True)
class RepeatedRows:
    """Rows that repeat, and the loads without them."""

    tokens: int
    commonest_share: float
    repeated_share: float
    without_commonest: OverallLoads | None = None
    without_repeats: OverallLoads | None = None


@dataclass(kw_only=True)
class TraceLoads(Result):
    """Result of `paceline.traces.loads.trace_loads`; `axes` says what is reduced over what."""

    schema: str
    trace: str
    model: str | None
    source: str
    content: str
    notes: list[str]
    devices: int
    batch_tokens: int | None
    batches_are: str
    axes: dict[str, str]
    batches: int
    tokens: int | None
    overall: OverallLoads
    layers: list[LayerLoads]
    groups: list[GroupLoads]
    rows: RepeatedRows | None = None
    sample: Sample | None = None


@dataclass(frozen=True, kw_only=True)
class SimulatedLayer:
    """Effect of a plan on one layer: sums over batches, and figures over them."""

    name: str
    tokens: int
    assignments: int
    dropped: int
    extras: int
    dropped_share: float
    gate_mass_lost: float | None
    lost_tokens: int
    batches_below_min_expert_load: int
    batches_ruled_by_max_active: int
    most_active_experts_before: float
    most_active_experts: float
    expert_loads_after: list[int]
    device_peak_to_mean_before: Spread
    device_peak_to_mean: Spread
    straggler_loss: float


@dataclass(kw_only=True)
class SimulatedModel:
    """Effect of a plan on all layers; `gain` refers to the first plan of the simulation."""

    assignments: int
    dropped: int
    extras: int
    dropped_share: float
    gate_mass_lost: float | None
    lost_tokens: int
    batches_below_min_expert_load: int
    batches_ruled_by_max_active: int
    most_active_experts_before: float
    most_active_experts: float
    busiest_rows_before: int
    busiest_rows_after: int
    device_peak_to_mean_before: Spread
    device_peak_to_mean: Spread
    straggler_loss: float
    gain: float = 1.0


@dataclass(frozen=True, kw_only=True)
class SimulatedPlan:
    """Effect of one plan on a trace; why its policies capped nothing, None where they did."""

    policy: str
    devices: int
    min_expert_load: float
    overall: SimulatedModel
    layers: list[SimulatedLayer]
    capped_nothing: str | None = None


@dataclass(frozen=True, kw_only=True)
class Simulation(Result):
    """Result of `paceline.traces.simulate.simulate`; `axes` says what is reduced over what."""

    schema: str
    trace: str
    model: str | None
    notes: list[str]
    batches: int
    batches_are: str
    axes: dict[str, str]
    reference: str
    plans: dict[str, SimulatedPlan]
