"""Tasks of lm-evaluation-harness under several policies, on the same samples in one run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.evaluation.harness import PacelineLM, Run
from paceline.evaluation.results import (
    LayerLoads,
    LoadShares,
    TaskMode,
    TaskRow,
    TasksResult,
)
from paceline.evaluation.samples import Scores, compare, read_scores
from paceline.evaluation.subject import BASELINE, Store, Subject, run_or_read
from paceline.progress import Progress
from paceline.text import shortened

FEWSHOT_SEED = 1234  # the harness's own
MODES = {"batched": "batches of several prompts", "solo": "every prompt alone"}


@dataclass
class _TaskRun:
    """One policy on all tasks.

    Attributes:
        scores: by task as named by the user.
        layers: loads of every layer in every batch.
        truncated: prompts longer than the model reads.
        harness: task -> metric -> figure, as lm-evaluation-harness sums it up.
    """

    scores: dict[str, Scores]
    layers: list[LayerLoads]
    truncated: int
    harness: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Chosen:
    """Tasks, loaded.

    Attributes:
        leaves: task as named by the user -> names of the tasks that it is made of.
        tasks: name -> task of lm-evaluation-harness.
        shots: task as named by the user -> examples in the prompt, where set.
    """

    leaves: dict[str, list[str]]
    tasks: dict[str, Any] = field(repr=False)
    shots: dict[str, int]


def load_tasks(
    names: Mapping[str, int | None], include: Sequence[Path] = (), shots: int | None = None
) -> Chosen:
    """Load tasks and their data.

    Args:
        names: of tasks or groups -> examples in the prompt; None: as the task says.
        include: folders with tasks of the user's own, looked at first.
        shots: examples in the prompt of tasks that name no number; None: as the task says.

    Raises:
        ValueError: if there is no such task or folder, or its data can't be had.
    """
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    for folder in include:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder} with tasks.")
    manager = TaskManager(include_path=list(include), include_defaults=False)
    if any(name not in manager.all_tasks for name in names):
        manager = TaskManager(include_path=list(include))  # all of the harness's: many seconds
    for name in names:
        if name not in manager.all_tasks:
            near = [each for each in manager.all_tasks if name[:4].lower() in each.lower()][:3]
            hint = f"; near it are {', '.join(near)}" if near else ""
            raise ValueError(f"there is no task {name} in lm-evaluation-harness{hint}.")
    chosen = Chosen({}, {}, {})
    for name, own in names.items():
        loaded = _load(manager, name)
        if shared := set(loaded) & set(chosen.tasks):
            raise ValueError(f"tasks must differ, got {min(shared)} twice.")
        number = shots if own is None else own
        for task in loaded.values():
            if number is not None:
                task.set_config(key="num_fewshot", value=number)
            elif task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
        chosen.leaves[name] = list(loaded)
        chosen.tasks.update(loaded)
        chosen.shots[name] = next(iter(loaded.values())).get_config("num_fewshot")
    return chosen


def _load(manager: Any, name: str) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = manager.load([name])["tasks"]
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # what is raised differs with what is missing
        reason = shortened(" ".join(str(error).split()) or type(error).__name__, 200)
        if isinstance(error, ConnectionError | TimeoutError) or " Hub" in reason:
            raise ValueError(
                f"the data of the task {name} can't be loaded: {reason}. It is fetched from the "
                "Hugging Face hub once and read from its cache from then on; tasks of your own "
                "need none (--include-path)."
            ) from error
        raise ValueError(f"the task {name} can't be loaded: {reason}") from error
    if not loaded:
        raise ValueError(f"the task {name} is empty.")
    return loaded


def judge_tasks(
    subject: Subject,
    chosen: Chosen,
    store: Store,
    *,
    limit: int | None = None,
    batch_size: int = 16,
    solo: bool = False,
    progress: Progress | None = None,
) -> TasksResult:
    """Answer the tasks under every policy.

    Args:
        limit: samples per task, the first ones; None: all.
        batch_size: prompts per batch.
        solo: also answer every prompt alone, to see what sharing a batch does.

    Raises:
        ValueError: if the model can't be run on a task.
    """
    modes = {"batched": batch_size, **({"solo": 1} if solo and batch_size > 1 else {})}
    lm = PacelineLM(
        subject.model,
        plan=subject.plan,
        calibration=subject.calibration,
        tokenizer=subject.tokenizer,
        batch_size=batch_size,
    )
    lm.quiet = True
    runs: dict[str, dict[str, _TaskRun]] = {mode: {} for mode in modes}
    steps = _Steps(len(modes) * len(subject.policies), chosen, progress)
    fingerprint = subject.fingerprint()
    try:
        for name, policy in subject.policies.items():
            lm.pace.policy = policy
            for mode, rows in modes.items():
                lm.batch_size_per_gpu = rows
                steps.start(f"{MODES[mode]}: {name}")
                runs[mode][name] = _answer(lm, chosen, store, fingerprint, limit, steps)
                steps.end()
    finally:
        lm.pace.detach()
    return TasksResult(
        harness_version=version("lm_eval"),
        limit=limit,
        batch_size=batch_size,
        tasks={name: {"shots": chosen.shots[name]} for name in chosen.leaves},
        modes={
            mode: TaskMode(
                label=MODES[mode],
                policies=_rows(by_policy, runs.get("solo") if mode != "solo" else None),
            )
            for mode, by_policy in runs.items()
        },
    )


def _rows(by_policy: Mapping[str, _TaskRun], alone: Mapping[str, _TaskRun] | None) -> list[TaskRow]:
    """Compare every policy with none, and with the same run with every prompt alone, if given."""
    base = by_policy[BASELINE]
    return [
        TaskRow(
            name=name,
            truncated_prompts=run.truncated,
            harness=run.harness,
            against_solo=None if alone is None else compare(run.scores, alone[name].scores),
            **dict(compare(run.scores, base.scores)),
            **dict(LoadShares.of(run.layers)),
        )
        for name, run in by_policy.items()
    ]


class _Steps:
    """Progress of several runs over the same tasks, in requests."""

    def __init__(self, runs: int, chosen: Chosen, progress: Progress | None) -> None:
        self._runs, self._chosen, self._progress = runs, chosen, progress
        self._run, self._done, self._words = -1, 0, ""

    def start(self, words: str) -> None:
        """Start the next run."""
        self._run, self._done, self._words = self._run + 1, 0, words

    def add(self, requests: int) -> None:
        """Add requests that have been answered."""
        self._show(min(self._done + requests, self._total() - 1))  # a long text is several

    def end(self) -> None:
        """End the run."""
        self._show(self._total())

    def _show(self, done: int) -> None:
        self._done, total = done, self._total()
        if self._progress is not None:
            self._progress(self._run * total + done, self._runs * total, self._words)

    def _total(self) -> int:
        """Count the requests of one run."""
        return sum(len(task.instances) for task in self._chosen.tasks.values())


def _answer(
    lm: PacelineLM,
    chosen: Chosen,
    store: Store,
    fingerprint: str,
    limit: int | None,
    steps: _Steps,
) -> _TaskRun:
    from lm_eval.evaluator import evaluate

    seen: list[LayerLoads] = []

    def around(batch: list[Any], run: Run) -> list[Any]:
        answers: list[Any]
        answers, layers = run_or_read(lm.pace, store, fingerprint, batch, run)
        seen.extend(layers)
        steps.add(len(batch) - 1)
        return answers

    lm.around_batch, lm.truncated = around, 0
    for task in chosen.tasks.values():
        task.set_fewshot_seed(seed=FEWSHOT_SEED)  # the same examples in every run
    try:
        result = evaluate(
            lm=lm,
            task_dict={"tasks": chosen.tasks, "groups": {}},
            limit=limit,
            bootstrap_iters=0,
        )
    except AssertionError as error:  # how the harness says that a prompt doesn't fit
        raise ValueError(f"a task doesn't fit the model: {error or 'an empty text'}") from error
    samples = result["samples"]
    return _TaskRun(
        {name: read_scores(name, leaves, samples) for name, leaves in chosen.leaves.items()},
        seen,
        lm.truncated,
        {
            task: {
                key: float(value)
                for key, value in figures.items()
                if "," in key and "stderr" not in key and isinstance(value, (int, float))
            }
            for task, figures in result["results"].items()
        },
    )
