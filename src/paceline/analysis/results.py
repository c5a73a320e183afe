"""Results of the studies, with the names that their JSON has (`to_dict`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.balance import Sample
from paceline.routing.layer_stats import LayerStats
from paceline.traces.results import Result, TraceLoads


class Loses(Protocol):
    """Anything that has a cap's losses."""

    @property
    def dropped_share(self) -> float:
        """Dropped assignments / the model's own."""

    @property
    def gate_mass_lost(self) -> float | None:
        """Share of the gate mass dropped; None: unknown."""


def loss(way: Loses) -> float:
    """Return the share of the gate mass lost; of the assignments, where gate mass is unknown."""
    return way.dropped_share if way.gate_mass_lost is None else way.gate_mass_lost


def loss_unit(way: Loses) -> str:
    """Name the quantity that `loss` is a share of."""
    return "assignments" if way.gate_mass_lost is None else "gate mass"


# Loads of a model on text: `paceline.analysis.observe`.


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Sets of experts that the tokens of a layer chose, and the spread of their scores."""

    distinct_choices: int
    largest_choice_share: float
    same_choice_chance: float
    score_spread: float | None


@dataclass(frozen=True, kw_only=True)
class ObservedLayer(LayerStats):
    """Statistics of a layer, with its placement and its busiest units (by summed load)."""

    experts: int
    devices: int
    experts_per_device: list[int]
    expert_to_device: list[int]
    busiest_expert: int
    busiest_device: int
    policy: str
    choices: Choices


@dataclass(frozen=True, kw_only=True)
class OverallStats:
    """Statistics of all layers, which run one after the other."""

    device_peak_to_mean_before: float
    expert_peak_to_mean_before: float
    straggler_loss_before: float
    device_peak_to_mean_after: float
    expert_peak_to_mean_after: float
    straggler_loss_after: float
    worst_device_peak_to_mean_before: float
    dropped_share: float
    forwards: int
    capped_forwards: int
    narrowed_forwards: int
    tokens_without_expert: int
    most_active_experts_before: float
    most_active_experts_after: float


@dataclass(frozen=True, kw_only=True)
class ModelLoads(Result):
    """Result of `paceline.analysis.observe.observe_loads`."""

    schema: str
    policy: str | None
    mode: str
    devices: int
    placement: str
    batches: int
    mixed: bool
    tokens_by_text: dict[str, int]
    degenerate: list[str]
    min_expert_load: float | None
    tokens_an_expert: float | None
    overall: OverallStats
    layers: list[ObservedLayer]
    sample: Sample


# A placement: `paceline.analysis.placing`.


@dataclass(frozen=True, kw_only=True)
class PlacementFigures:
    """Balance that one method of placing gives on some batches."""

    device_peak_to_mean: float
    overall: float
    straggler_loss: float
    gain: float
    layers: list[float]


@dataclass(frozen=True, kw_only=True)
class JudgedPlacements:
    """Placements by several methods, judged on some batches of the fitted trace."""

    batches: int
    ways: dict[str, PlacementFigures]


@dataclass(frozen=True, kw_only=True)
class _Trace:
    trace: str


@dataclass(frozen=True, kw_only=True)
class PlacementsElsewhere(JudgedPlacements, _Trace):
    """Placements judged on another trace."""


@dataclass(kw_only=True)
class PlaceResult(Result):
    """Result of `paceline.analysis.placing.place`."""

    schema: str
    trace: str
    model: str | None
    notes: list[str]
    axes: dict[str, str]
    devices: int
    replicas: int
    groups: int
    nodes: int | None
    batches: int
    batch_tokens: int | None
    layers: list[str]
    same_batches: JudgedPlacements
    second_half: JudgedPlacements | None
    other_trace: PlacementsElsewhere | None
    verdict: list[str]
    sample: Sample | None = None
    method: str = "search"

    @property
    def deciding(self) -> JudgedPlacements | None:
        """The part whose batches took no part in a fit; None where there is one batch."""
        return self.other_trace or self.second_half

    @property
    def best(self) -> str:
        """The method that is best there, with replicas if any are allowed."""
        part = self.deciding or self.same_batches
        names = [name for name in part.ways if name.endswith("_replicas") == bool(self.replicas)]
        return min(names, key=lambda name: (part.ways[name].overall, name != self.method))


# Caps of every size: `paceline.analysis.cap_study`.


@dataclass(frozen=True, kw_only=True)
class CapLayer:
    """Effect of a cap on one layer."""

    dropped_share: float
    busiest_device: float | None
    device_loads: list[float]


@dataclass(frozen=True, kw_only=True)
class CapFigures:
    """Effect of a cap on the judged batches."""

    dropped_share: float
    gate_mass_lost: float | None
    lost_tokens: int
    gain: float
    busiest_device: float | None
    layers: list[CapLayer]


@dataclass(frozen=True, kw_only=True)
class _Cap:
    placement: str
    unit: str | None
    gamma: float | None


@dataclass(frozen=True, kw_only=True)
class CapWay(CapFigures, _Cap):
    """Effect of one cap on one placement; unit and gamma are None without a cap."""


@dataclass(frozen=True, kw_only=True)
class CapPlan(CapFigures):
    """Effect of the policies of a plan file."""

    policy: str


@dataclass(frozen=True, kw_only=True)
class ActiveWay:
    """Effect of one max_active on one placement; None: no limit."""

    placement: str
    max_active: int | None
    most_active_experts: float
    dropped_share: float
    gate_mass_lost: float | None
    lost_tokens: int


@dataclass(kw_only=True)
class CapStudy(Result):
    """Result of `paceline.analysis.cap_study.cap_study`."""

    schema: str
    trace: str
    judge: str | None
    model: str | None
    notes: list[str]
    axes: dict[str, str]
    devices: int
    batch_tokens: int | None
    batches: int
    batches_are: str
    judged_batches: int
    judged_on: str
    placement_is: str
    keep: str | None
    layers: list[str]
    expert_to_device: dict[str, list[list[int]]]
    loads: TraceLoads
    ways: list[CapWay]
    active: list[ActiveWay]
    plan: CapPlan | None
    verdict: list[str]

    def way(self, placement: str, unit: str | None = None, gamma: float | None = None) -> CapWay:
        """Return one of the ways; without a cap unit and gamma are None.

        Raises:
            KeyError: if there is none.
        """
        for way in self.ways:
            if (way.placement, way.unit, way.gamma) == (placement, unit, gamma):
                return way
        raise KeyError((placement, unit, gamma))


# A decision: `paceline.analysis.planner`.


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Modelled cost of a step through all MoE layers; `gain` is over doing nothing."""

    microseconds: float
    stages: dict[str, float]
    bytes_sent: float
    receive_buffer_bytes: float
    most_active_experts: float
    dropped_share: float
    gate_mass_lost: float | None
    layers: list[float]
    gain: float


@dataclass(frozen=True, kw_only=True)
class ReplicaCost(StepCost):
    """Cost of a placement with replicas, and their memory on each device."""

    replica_gb_a_device: float


@dataclass(frozen=True, kw_only=True)
class _Budget:
    placement: str
    budget: float


@dataclass(frozen=True, kw_only=True)
class FrontierPoint(StepCost, _Budget):
    """Cost of the caps that were chosen under one budget of gate mass."""


@dataclass(frozen=True, kw_only=True)
class _Active:
    placement: str
    max_active: int


@dataclass(frozen=True, kw_only=True)
class ActivePoint(StepCost, _Active):
    """Cost of one max_active in all layers."""


@dataclass(frozen=True, kw_only=True)
class _Change:
    change: str


@dataclass(frozen=True, kw_only=True)
class Variant(StepCost, _Change):
    """Cost of the chosen caps with one setting changed."""


@dataclass(kw_only=True)
class JudgedPlan:
    """Every option of a plan, judged on batches that took no part in choosing it."""

    batches: int
    ways: dict[str, StepCost | ReplicaCost]
    frontier: list[FrontierPoint]
    active: list[ActivePoint]
    perfect_balance_gain: float


@dataclass(kw_only=True)
class _JudgedTrace:
    trace: str


@dataclass(kw_only=True)
class PlanElsewhere(JudgedPlan, _JudgedTrace):
    """Every option of a plan, judged on another trace."""


@dataclass(kw_only=True)
class PlanResult(Result):
    """Result of `paceline.analysis.planner.make_plan`."""

    schema: str
    trace: str
    model: str | None
    notes: list[str]
    devices: int
    hardware: str
    hardware_source: str
    precision: str
    max_mass_loss: float
    min_gain: float
    min_expert_load: int
    batches: int
    batch_tokens: int | None
    layers: list[str]
    second_half: JudgedPlan
    other_trace: PlanElsewhere | None
    budgets: dict[str, float | None]
    variants: list[Variant]
    decision: str
    verdict: list[str]
    plan: str | None = None
    sample: Sample | None = None

    @property
    def deciding(self) -> JudgedPlan:
        """The part that decides: the other trace, where there is one."""
        return self.other_trace or self.second_half
