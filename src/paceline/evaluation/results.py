"""Results of `paceline eval` in the form in which they are written, read back and shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from paceline.balance import combine_peaks, share, straggler_loss
from paceline.files import to_json

EVAL_SCHEMA = "paceline-eval/1"


class Form(BaseModel):
    """Part of a result: finite numbers only; fields of later versions are ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, from_attributes=True)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values under the names of the file."""
        return self.model_dump(by_alias=True)

    def to_json(self) -> str:
        """Return the content of the file."""
        return to_json(self.to_dict())


# -- loads -----------------------------------------------------------------------------------------


class LayerLoads(Form):
    """Loads of one layer in one batch: the fields of `LayerStats` that sums over batches need."""

    assignments: int
    dropped: int
    extras: int
    forwards: int
    capped_forwards: int
    gate_mass_kept: float
    device_peak_to_mean_before: float
    device_peak_to_mean_after: float
    expert_peak_to_mean_before: float
    expert_peak_to_mean_after: float
    worst_device_peak_to_mean_before: float
    worst_device_peak_to_mean_after: float
    worst_expert_peak_to_mean_before: float
    worst_expert_peak_to_mean_after: float
    most_active_experts_after: float = 0.0
    stand_in_distance: float | None = None
    expert_loads_after: list[int] = []


class Balance(Form):
    """Balance over batches and layers, which run one after the other.

    A peak-to-mean is the load of the busiest device or expert / the mean load; the worst is the
    highest of one forward of one layer. `straggler_loss` is the share of the expert time that an
    average device waits.
    """

    device_peak_to_mean: float
    device_peak_to_mean_worst: float
    straggler_loss: float
    expert_peak_to_mean: float
    expert_peak_to_mean_worst: float

    @classmethod
    def of(cls, layers: Sequence[Any], when: str = "after") -> Balance:
        """Sum up layers of batches, `LayerStats` or `LayerLoads`, "before" or "after" a policy."""
        return Balance(**_balance(layers, when))


class LoadShares(Balance):
    """Balance under a policy, and the shares of assignments that it dropped and added.

    Attributes:
        assignments: (token, expert) pairs that the model chose.
        dropped_share: of these.
        extras_share: assignments beyond a token's own choice, relative to these.
        gate_mass_kept: mean over batches and layers, weighted by assignments.
        device_peak_to_mean_before: of the model's own choice.
        capped_share_of_forwards: forwards of a layer that a cap applied to.
        assignments_per_forward: of a layer, on average.
        stand_in_distance: mean distance of the inputs of stand-ins from the calibration's.
    """

    assignments: int
    dropped_share: float
    extras_share: float
    gate_mass_kept: float
    device_peak_to_mean_before: float
    capped_share_of_forwards: float
    assignments_per_forward: float = 0.0
    stand_in_distance: float | None

    @classmethod
    def of(cls, layers: Sequence[Any], when: str = "after") -> LoadShares:
        """Sum up layers of batches, `LayerStats` or `LayerLoads`."""
        total = sum(layer.assignments for layer in layers)
        kept = sum(layer.gate_mass_kept * layer.assignments for layer in layers)
        capped = sum(layer.capped_forwards for layer in layers)
        forwards = sum(layer.forwards for layer in layers)
        known = [x.stand_in_distance for x in layers if x.stand_in_distance is not None]
        return LoadShares(
            **_balance(layers, when),
            assignments=total,
            dropped_share=share(sum(layer.dropped for layer in layers), total),
            extras_share=share(sum(layer.extras for layer in layers), total),
            gate_mass_kept=kept / total if total else 1.0,
            device_peak_to_mean_before=_peak(layers, "device", "before"),
            capped_share_of_forwards=share(capped, forwards),
            assignments_per_forward=share(total, forwards),
            stand_in_distance=sum(known) / len(known) if known else None,
        )

    def drops(self) -> dict[str, float]:
        """Return the shares dropped and added, and the gate mass kept."""
        return self.model_dump(include={"dropped_share", "extras_share", "gate_mass_kept"})


def _balance(layers: Sequence[Any], when: str) -> dict[str, float]:
    busy, figures = [layer for layer in layers if layer.assignments], {}
    for unit in ("device", "expert"):
        worst = (getattr(layer, f"worst_{unit}_peak_to_mean_{when}") for layer in busy)
        figures[f"{unit}_peak_to_mean"] = _peak(layers, unit, when)
        figures[f"{unit}_peak_to_mean_worst"] = max(worst, default=1.0)
    return {**figures, "straggler_loss": straggler_loss(figures["device_peak_to_mean"])}


def _peak(layers: Sequence[Any], unit: str, when: str) -> float:
    peaks = [getattr(layer, f"{unit}_peak_to_mean_{when}") for layer in layers]
    return combine_peaks(peaks, [layer.assignments for layer in layers]) if peaks else 1.0


# -- texts -----------------------------------------------------------------------------------------


class PerplexityChange(Form):
    """Perplexity change against another run, as shares (0.01 is +1%).

    Attributes:
        by_domain: text -> perplexity / perplexity of the other run - 1.
        mean: over the texts.
        standard_error: from paired sequences; None with fewer than two of some text.
        standard_error_over_texts: with the texts as a sample of texts; None with one.
    """

    by_domain: dict[str, float]
    mean: float
    standard_error: float | None
    standard_error_over_texts: float | None


class AgainstSolo(Form):
    """Effect of sharing a batch, under one and the same policy."""

    perplexity_change: PerplexityChange
    changed_next_tokens: float


class TextRow(LoadShares):
    """One policy on the texts; None against solo where sequences alone were not run.

    `capped_nothing` says why a policy that may cap never did; None where it did.
    """

    name: str
    capped_nothing: str | None = None
    perplexity: dict[str, float]
    perplexity_change: PerplexityChange
    changed_next_tokens: float
    against_solo: AgainstSolo | None


class Composition(Form):
    """One way to batch the texts."""

    label: str
    batches: int
    policies: list[TextRow]


class TextsResult(Form):
    """Every policy on the texts, in every composition."""

    tokens_by_text: dict[str, int]
    batch_size: int
    sequence_length: int
    compositions: dict[str, Composition]


# -- tasks -----------------------------------------------------------------------------------------


class MeanDifference(Form):
    """Mean difference of two runs, and its standard error; None where it is unknown."""

    mean: float
    standard_error: float | None


class Difference(MeanDifference):
    """Mean difference of paired samples: sum of (other - base) / sum of the weights.

    The standard error is None with fewer than two clusters, which are groups of samples that may
    depend on each other, such as those of one text.
    """

    samples: int
    clusters: int


class TaskScore(Form):
    """One task under one policy; a difference of a perplexity is that of its logarithm."""

    metric: str
    filter: str
    score: float
    difference: Difference
    changed_answers: int | None


class TaskScores(Form):
    """All tasks of one run beside those of another; means are over tasks that have a score."""

    mean: float | None
    mean_difference: MeanDifference | None
    changed_answers: int
    answers: int
    tasks: dict[str, TaskScore]


class TaskRow(TaskScores, LoadShares):
    """One policy on the tasks.

    Attributes:
        name: of the policy.
        truncated_prompts: prompts longer than the model reads, which lost their start.
        harness: task -> metric -> figure, as lm-evaluation-harness sums it up.
        against_solo: beside every prompt alone; None where that was not run.
        capped_nothing: why a policy that may cap never did; None where it did.
    """

    name: str
    capped_nothing: str | None = None
    truncated_prompts: int
    harness: dict[str, dict[str, float]]
    against_solo: TaskScores | None


class TaskMode(Form):
    """One way to batch the prompts."""

    label: str
    policies: list[TaskRow]


class TasksResult(Form):
    """Every policy on the tasks; limit: samples per task, None for all.

    `tasks` is task -> {"shots": examples in its prompt}.
    """

    harness_version: str
    limit: int | None
    batch_size: int
    tasks: dict[str, dict[str, int]]
    modes: dict[str, TaskMode]


# -- whole results ---------------------------------------------------------------------------------


class NamedPolicy(Form):
    """A policy under its name: its short form, one per layer, or None for no policy."""

    name: str
    policy: str | list[str] | None


class ModelSize(Form):
    """Size of a model."""

    layers: int
    experts: int
    devices: int


class SubjectFacts(ModelSize):
    """The model under evaluation, a hash of its weights, and where its experts are."""

    architecture: str
    parameters: int
    dtype: str
    experts_per_device: list[int]
    calibrated_on: dict[str, int] | None
    weights: str | None = None
    policies: list[NamedPolicy] = []


class Schema(Form):
    """Content of a file, which names its form."""

    form: str = Field(alias="schema")


class Made(Schema):
    """Origin of a result: when, where and by which command it was made."""

    created: str
    machine: dict[str, Any]
    versions: dict[str, str]
    seconds: float = 0.0
    model: str = ""
    command: str = ""


class EvalResult(Made):
    """Content of eval.json; `batches` counts those "computed", and "found" from an earlier run."""

    subject: SubjectFacts
    texts: TextsResult | None
    tasks: TasksResult | None
    batches: dict[str, int]
