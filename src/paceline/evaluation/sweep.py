"""A sweep over caps: what each costs in quality, and how busy it leaves the busiest device.

The paper's Figure 12 draws quality against the capacity factor. A factor of two says little by
itself: per expert and per device it leaves different loads. So quality is set against the load of
the busiest device, which is what the others wait for.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from paceline.batches import Sampling
from paceline.evaluation.run import STATE, describe
from paceline.evaluation.store import Store
from paceline.evaluation.subject import BASELINE, Subject
from paceline.evaluation.sweep_file import SCHEMA
from paceline.evaluation.texts import judge_texts
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.progress import Progress
from paceline.system_info import system_info

FACTORS = (3.0, 2.0, 1.5, 1.25, 1.0, 0.75, 0.5, 0.25, 0.1, 1e-9)
"""From a cap that hardly binds to the smallest: one assignment a unit and pool."""


@dataclass(frozen=True)
class Axes:
    """What is varied; every combination is run.

    Attributes:
        factors: capacity factors.
        units: what is capped.
        keeps: which assignments survive.
        expands: experts that a token may use beyond its own; None: none.
        compensates: whether dropped assignments leave their stand-ins.
    """

    factors: tuple[float, ...] = FACTORS
    units: tuple[str, ...] = ("device", "expert")
    keeps: tuple[str, ...] = ("score", "random")
    expands: tuple[str | None, ...] = (None, "own_device")
    compensates: tuple[bool, ...] = (False,)

    def policies(self) -> Iterator[tuple[dict[str, Any], CapacityPolicy]]:
        """Every combination, and the policy that it is.

        Raises:
            PolicyError: naming a value that isn't allowed.
        """
        combinations = itertools.product(
            self.units, self.keeps, self.expands, self.compensates, self.factors
        )
        for unit, keep, expand, compensate, factor in combinations:
            fields = {
                "capacity_factor": factor,
                "unit": unit,
                "keep": keep,
                "expand": expand,
                "compensate": compensate,
            }
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
) -> dict[str, Any]:
    """Run texts under every combination and find which of them nothing beats; JSON-able.

    Args:
        model: a Mixture-of-Experts model in evaluation mode; it is restored afterwards.
        tokenizer: its tokenizer.
        texts: name -> text.
        axes: what is varied; of several, each by itself.
        plan: where experts are.
        calibration: for axes that compensate.
        sampling: which tokens.
        composition: how they are batched.
        out: folder in which computed batches are kept; None: nowhere.
        progress: told after every batch.

    Raises:
        ValueError: if a combination is no policy, or can't be run.
    """
    started, surroundings = time.perf_counter(), system_info()
    sampling = sampling or Sampling()
    combinations = [each for some in axes for each in some.policies()]
    policies = [policy for _, policy in combinations]
    subject = Subject.of(model, tokenizer, policies, plan, calibration)
    described = describe(subject)
    store = Store(None if out is None else out / STATE)
    judged = judge_texts(subject, texts, sampling, [composition], store, progress)
    rows = {row["name"]: row for row in judged["compositions"][composition]["policies"]}
    points = [{**fields, **_point(rows[str(policy)])} for fields, policy in combinations]
    best = frontier([(p["device_peak_to_mean"], p["change"]) for p in points])
    for index, point in enumerate(points):
        point["on_frontier"] = index in best
    return {
        "schema": SCHEMA,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **surroundings,
        "subject": {key: value for key, value in described.items() if key != "policies"},
        "tokens_by_text": judged["tokens_by_text"],
        "batch_size": judged["batch_size"],
        "sequence_length": judged["sequence_length"],
        "composition": composition,
        "baseline": _point(rows[BASELINE]),
        "points": points,
        "seconds": round(time.perf_counter() - started, 1),
    }


def _point(row: Mapping[str, Any]) -> dict[str, Any]:
    change = row["perplexity_change"]
    return {
        "change": change["mean"],
        "standard_error": change["standard_error"],
        "by_text": change["by_domain"],
        "changed_next_tokens": row["changed_next_tokens"],
        "dropped_share": row["dropped_share"],
        "device_peak_to_mean": row["device_peak_to_mean"],
    }


def frontier(points: Sequence[tuple[float, float]]) -> set[int]:
    """Indices of points that no other point equals or beats in both figures, of equals the first.

    >>> frontier([(1.0, 0.5), (1.2, 0.1), (1.2, 0.3), (1.3, 0.2)])
    {0, 1}
    """
    order = sorted(range(len(points)), key=lambda index: (*points[index], index))
    best: set[int] = set()
    lowest = float("inf")
    for index in order:
        if points[index][1] < lowest:
            best.add(index)
            lowest = points[index][1]
    return best
