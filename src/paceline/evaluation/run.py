"""The two runs of `paceline eval`: policies on texts and tasks, and a grid of caps on texts.

The paper's Figure 12 draws quality against the capacity factor. A factor of two says little by
itself: per expert and per device it leaves different loads. So a sweep sets quality against the
load of the busiest device, which is what the others wait for.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.batches import Sampling
from paceline.evaluation.perplexity import judge_texts
from paceline.evaluation.results import (
    EVAL_SCHEMA,
    EvalResult,
    LoadShares,
    SubjectFacts,
    TextRow,
    TextsResult,
)
from paceline.evaluation.subject import BASELINE, STATE, Store, Subject
from paceline.evaluation.sweep_results import (
    SWEEP_SCHEMA,
    Cost,
    CostByText,
    PointByText,
    SweepResult,
    on_frontier,
)
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.progress import Progress
from paceline.settings import PoliciesLike
from paceline.system_info import system_info
from paceline.text import capped_nothing

if TYPE_CHECKING:
    from paceline.evaluation.tasks import Chosen

FACTORS = (3.0, 2.0, 1.5, 1.25, 1.0, 0.75, 0.5, 0.25, 0.1, 1e-9)
"""From a cap that hardly binds to the smallest: one assignment per unit and pool."""


@dataclass(frozen=True)
class Job:
    """Texts and tasks to evaluate a model on.

    Attributes:
        texts: name -> text, for perplexity.
        sampling: which of their tokens, and how they are batched.
        compositions: ways to batch them.
        tasks: of lm-evaluation-harness, loaded; None: none.
        limit: samples per task; None: all.
        task_batch: prompts per batch.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    compositions: tuple[str, ...] = ("one_text", "mixed", "solo")
    tasks: Chosen | None = None
    limit: int | None = None
    task_batch: int = 16


def evaluate(
    subject: Subject, job: Job, *, out: Path | None = None, progress: Progress | None = None
) -> EvalResult:
    """Run a model without a policy and under each of its policies, on the same samples.

    With `out` computed batches are kept in that folder, so that a killed run continues.

    Raises:
        ValueError: if there are no texts and no tasks, or the model can't be run on them.
        OSError: if the folder can't be written.
    """
    if not job.texts and job.tasks is None:
        raise ValueError("texts or tasks must be given, got neither.")
    started, made = time.perf_counter(), header(EVAL_SCHEMA)
    store = Store(None if out is None else out / STATE)
    facts, texts, tasks = subject.describe(), None, None
    if job.texts:
        texts = judge_texts(subject, job.texts, job.sampling, job.compositions, store, progress)
        _mark_idle_texts(texts, subject, facts)
    if job.tasks is not None:
        from paceline.evaluation.tasks import judge_tasks

        tasks = judge_tasks(
            subject, job.tasks, store, limit=job.limit, batch_size=job.task_batch,
            solo="solo" in job.compositions, progress=progress,
        )  # fmt: skip
        for mode in tasks.modes.values():
            for answers in mode.policies:
                answers.capped_nothing = _idle(subject, facts, answers.name, answers, None)
    return EvalResult(
        **made,
        subject=facts,
        texts=texts,
        tasks=tasks,
        batches={"computed": store.computed, "found": store.found},
        seconds=round(time.perf_counter() - started, 1),
    )


def _mark_idle_texts(texts: TextsResult, subject: Subject, facts: SubjectFacts) -> None:
    """Say of every policy that capped nothing why, and from which batch size it would."""
    for each in texts.compositions.values():
        tokens = sum(texts.tokens_by_text.values()) / max(1, each.batches)
        for row in each.policies:
            row.capped_nothing = _idle(subject, facts, row.name, row, tokens)


def _idle(
    subject: Subject, facts: SubjectFacts, name: str, row: LoadShares, tokens: float | None
) -> str | None:
    """Return why a policy that may cap never did, None where it did or can't.

    Args:
        name: of the policy.
        tokens: per batch, where known.
    """
    policy: PoliciesLike = subject.policies[name]
    own = [policy] if isinstance(policy, CapacityPolicy) else policy or ()
    capping = [each for each in own if isinstance(each, CapacityPolicy) and each.caps]
    if not capping or row.dropped_share or row.extras_share:
        return None
    device = subject.model.device.type
    return capped_nothing(
        min(each.resolved_min_expert_load(device) for each in capping),
        row.assignments_per_forward / facts.experts,
        tokens,
        factor=any(each.capacity_factor is not None for each in capping),
    )


def header(schema: str) -> dict[str, Any]:
    """Return the origin of a result: `Made` without seconds, model and command."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"schema": schema, "created": now, **system_info()}


# -- a grid of caps --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axes:
    """Axes of a grid of caps; every combination is run.

    Attributes:
        factors: capacity factors.
        units: what is capped.
        keeps: which assignments survive.
        expands: experts that a token may use beyond its own; None: none.
        compensates: True: dropped assignments are replaced by their stand-ins.
    """

    factors: tuple[float, ...] = FACTORS
    units: tuple[str, ...] = ("device", "expert")
    keeps: tuple[str, ...] = ("score", "random")
    expands: tuple[str | None, ...] = (None, "own_device")
    compensates: tuple[bool, ...] = (False,)

    @classmethod
    def parse(
        cls,
        factors: str | None = None,
        units: str | None = None,
        keeps: str | None = None,
        expands: str | None = None,
        compensate: bool = False,
    ) -> Axes:
        """Read axes from values separated by commas; None: the default.

        A factor of 0 leaves one assignment per unit and pool; "none" expands nothing.

        Raises:
            ValueError: if an axis has no value, or a factor is no number.

        >>> Axes.parse(factors="1,0", units="device").factors
        (1.0, 1e-09)
        """
        texts = {"factors": factors, "units": units, "keeps": keeps, "expands": expands}
        axes: dict[str, Any] = {}
        for name, text in texts.items():
            if text is not None:
                axes[name] = tuple(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
                if not axes[name]:
                    raise ValueError(f"--{name} must have at least one value, got {text!r}.")
        if "factors" in axes:
            try:
                axes["factors"] = tuple(float(each) or FACTORS[-1] for each in axes["factors"])
            except ValueError:
                raise ValueError(f"--factors must be numbers >= 0, got {factors}.") from None
        if "expands" in axes:
            axes["expands"] = tuple(None if e == "none" else e for e in axes["expands"])
        return cls(**axes, compensates=(False, True) if compensate else (False,))

    def policies(self) -> Iterator[tuple[dict[str, Any], CapacityPolicy]]:
        """Yield the fields of every combination, and its policy.

        Raises:
            PolicyError: naming a value that isn't allowed.
        """
        names = ("unit", "keep", "expand", "compensate", "capacity_factor")
        for values in itertools.product(
            self.units, self.keeps, self.expands, self.compensates, self.factors
        ):
            fields = dict(zip(names, values, strict=True))
            yield fields, CapacityPolicy(**fields)


def sweep(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, str],
    *,
    axes: Sequence[Axes],
    plan: Plan,
    calibration: Any = None,
    sampling: Sampling | None = None,
    composition: str = "one_text",
    out: Path | None = None,
    progress: Progress | None = None,
) -> SweepResult:
    """Run texts under every combination of a grid, and mark those that no other beats.

    The model is in evaluation mode, and restored afterwards. Of several `axes` each is a grid of
    its own; `composition` is how texts are batched; `out` as for `evaluate`.

    Raises:
        ValueError: if a combination is no policy, or can't be run.
    """
    started, made = time.perf_counter(), header(SWEEP_SCHEMA)
    combinations = [each for some in axes for each in some.policies()]
    subject = Subject.of(model, tokenizer, [each for _, each in combinations], plan, calibration)
    facts = subject.describe()
    store = Store(None if out is None else out / STATE)
    judged = judge_texts(subject, texts, sampling or Sampling(), [composition], store, progress)
    _mark_idle_texts(judged, subject, facts)
    rows = {row.name: row for row in judged.compositions[composition].policies}
    chosen = [rows[str(policy)] for _, policy in combinations]
    best = on_frontier([Cost(**_cost(row)) for row in chosen])
    points = [
        PointByText(**fields, **_cost(row), on_frontier=marked, capped_nothing=row.capped_nothing)
        for (fields, _), row, marked in zip(combinations, chosen, best, strict=True)
    ]
    return SweepResult(
        **made,
        subject=facts.model_copy(update={"policies": []}),
        tokens_by_text=judged.tokens_by_text,
        batch_size=judged.batch_size,
        sequence_length=judged.sequence_length,
        composition=composition,
        baseline=CostByText(**_cost(rows[BASELINE])),
        points=points,
        seconds=round(time.perf_counter() - started, 1),
    )


def _cost(row: TextRow) -> dict[str, Any]:
    return {
        "change": row.perplexity_change.mean,
        "standard_error": row.perplexity_change.standard_error,
        "by_text": row.perplexity_change.by_domain,
        "changed_next_tokens": row.changed_next_tokens,
        "dropped_share": row.dropped_share,
        "device_peak_to_mean": row.device_peak_to_mean,
    }
