"""Assemble `paceline eval`: texts and tasks under several policies, as JSON-able values."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.batches import Sampling
from paceline.engines.transformers import attach
from paceline.evaluation.store import Store
from paceline.evaluation.subject import Subject
from paceline.evaluation.texts import judge_texts
from paceline.placement import ExpertPlacement
from paceline.progress import Progress
from paceline.system_info import system_info

if TYPE_CHECKING:
    from paceline.evaluation.tasks import Chosen

SCHEMA = "paceline-eval/1"
STATE = "state"
"""Folder of what has been computed, inside that of the results."""


@dataclass(frozen=True)
class Job:
    """What to judge a model by.

    Attributes:
        texts: name -> text, for perplexity.
        sampling: which of their tokens, and how they are batched.
        compositions: ways to batch them.
        tasks: of lm-evaluation-harness, loaded; None: none.
        limit: samples of each task; None: all.
        task_batch: prompts a batch.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    compositions: tuple[str, ...] = ("one_text", "mixed", "solo")
    tasks: Chosen | None = None
    limit: int | None = None
    task_batch: int = 16


def evaluate(
    subject: Subject,
    job: Job,
    *,
    out: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run a model without a policy and under each of its policies, on the same samples.

    Args:
        subject: the model and its policies.
        job: texts and tasks.
        out: folder in which computed batches are kept, so that a killed run goes on; None: nowhere.
        progress: told after every batch.

    Raises:
        ValueError: if there is nothing to judge by, or the model can't be run on it.
        OSError: if the folder can't be written.
    """
    if not job.texts and job.tasks is None:
        raise ValueError("there is nothing to judge by: give texts, tasks, or both.")
    started, surroundings = time.perf_counter(), system_info()
    store = Store(None if out is None else out / STATE)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **surroundings,
        "subject": describe(subject),
        "texts": None,
        "tasks": None,
    }
    if job.texts:
        result["texts"] = judge_texts(
            subject, job.texts, job.sampling, job.compositions, store, progress
        )
    if job.tasks is not None:
        from paceline.evaluation.tasks import judge_tasks

        result["tasks"] = judge_tasks(
            subject,
            job.tasks,
            store,
            limit=job.limit,
            batch_size=job.task_batch,
            solo="solo" in job.compositions,
            progress=progress,
        )
    result["batches"] = {"computed": store.computed, "found": store.found}
    result["seconds"] = round(time.perf_counter() - started, 1)
    return result


def describe(subject: Subject) -> dict[str, Any]:
    """The model, where its experts are, and what is applied.

    Raises:
        ValueError: if a policy can't be applied to the model.
    """
    model = subject.model
    with attach(
        model,
        None,
        plan=subject.plan,
        calibration=subject.calibration,
        token_source="sequence",
    ) as pace:
        for policy in subject.policies.values():  # said before the work, not in the middle of it
            pace.policy = policy
        layers = pace.stats().layers
        placements = [
            placement or ExpertPlacement.per_expert(len(layer.expert_loads_before))
            for placement, layer in zip(pace.placements, layers, strict=True)
        ]
    return {
        "architecture": type(model).__name__,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": len(layers),
        "experts": len(layers[0].expert_loads_before),
        "devices": max(placement.num_devices for placement in placements),
        "experts_per_device": list(placements[0].sizes),
        "calibrated_on": None
        if subject.calibration is None
        else dict(zip(subject.calibration.texts, subject.calibration.tokens, strict=True)),
        "policies": [
            {"name": name, "policy": _shown(policy)} for name, policy in subject.policies.items()
        ],
    }


def _shown(policy: Any) -> str | list[str] | None:
    if policy is None:
        return None
    return list(map(str, policy)) if isinstance(policy, (list, tuple)) else str(policy)
