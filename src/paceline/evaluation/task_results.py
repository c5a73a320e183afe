"""Runs over the same tasks, compared: every policy with none, and batched with alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paceline.evaluation.samples import Scores
from paceline.evaluation.subject import BASELINE


def described(
    of_policy: Mapping[str, Any], alone: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """The runs of one way to batch, JSON-able.

    Args:
        of_policy: name of the policy -> run, the one without a policy first.
        alone: the same with every prompt alone, None where that wasn't run.
    """
    base = of_policy[BASELINE]
    return [
        {
            "name": name,
            **_compared(run.scores, base.scores),
            **run.tally.shares(),
            "truncated_prompts": run.truncated,
            "harness": run.harness,
            **(
                {}
                if alone is None
                else {"against_solo": _compared(run.scores, alone[name].scores, brief=True)}
            ),
        }
        for name, run in of_policy.items()
    ]


def _compared(
    scores: Mapping[str, Scores], base: Mapping[str, Scores], brief: bool = False
) -> dict[str, Any]:
    tasks: dict[str, dict[str, Any]] = {}
    for name, found in scores.items():
        paired = found.against(base[name])
        tasks[name] = {
            **({} if brief else {"metric": found.metric, "filter": found.filter}),
            **({} if brief else {"score": found.score}),
            "difference": paired.to_dict(),
            "changed_answers": found.changed(base[name]),
        }
    judged = {name: found for name, found in scores.items() if not found.is_perplexity}
    changed = [tasks[name]["changed_answers"] for name in scores]
    answers = sum(
        len(found.answers)
        for found, count in zip(scores.values(), changed, strict=True)
        if count is not None
    )
    return {
        "mean": math.fsum(f.score for f in judged.values()) / len(judged) if judged else None,
        "mean_difference": _mean([tasks[name]["difference"] for name in judged]),
        "changed_answers": sum(count for count in changed if count is not None),
        "answers": answers,
        "tasks": tasks,
    }


def _mean(differences: list[dict[str, Any]]) -> dict[str, float | None] | None:
    """Mean over tasks, which are independent; None without tasks that have a score."""
    if not differences:
        return None
    errors = [each["standard_error"] for each in differences]
    count = len(differences)
    return {
        "mean": math.fsum(each["mean"] for each in differences) / count,
        "standard_error": None
        if None in errors
        else math.sqrt(math.fsum(error**2 for error in errors)) / count,
    }
