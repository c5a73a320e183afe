"""Sentences that sum up an evaluation, for the terminal."""

from __future__ import annotations

from paceline.evaluation.results import EvalResult, MeanDifference, TaskRow, TextRow
from paceline.evaluation.sweep_results import PointByText, SweepResult
from paceline.policy import CapacityPolicy
from paceline.text import percent, signed_percent, times

SIGMAS = 2.0
"""A difference counts as measured from so many standard errors on."""

BEARABLE = 0.01
"""Change of perplexity by which a sweep is summed up."""


def eval_verdict(result: EvalResult) -> list[str]:
    """Say what each policy costs and how far it evens the loads out, the first way to batch."""
    lines = []
    if result.texts:
        composition = next(iter(result.texts.compositions.values()))
        lines += [_of_texts(row) for row in composition.policies[1:]]
    if result.tasks:
        found = next(iter(result.tasks.modes.values()))
        lines += [_of_tasks(row) for row in found.policies[1:]]
    return lines


def best_bearable(result: SweepResult) -> PointByText | None:
    """Return the cap that evens the loads out most for a bearable change of perplexity."""
    bearable = [
        point
        for point in result.points
        if point.on_frontier and point.dropped_share > 0 and point.change <= BEARABLE
    ]
    return min(bearable, key=lambda each: (each.device_peak_to_mean, each.change), default=None)


def sweep_verdict(result: SweepResult) -> list[str]:
    """Name the cap that evens the loads out most for a bearable change of perplexity."""
    before, most = result.baseline.device_peak_to_mean, percent(BEARABLE, 0)
    chosen = best_bearable(result)
    if chosen is None:
        return [f"Every cap tried that drops anything raises perplexity by more than {most}."]
    cost = _change(chosen.change, chosen.standard_error)
    return [
        f"Within {most} of perplexity, {short_form(chosen)} evens the loads out most: busiest "
        f"device {times(before)} to {times(chosen.device_peak_to_mean)} the mean, perplexity "
        f"{cost}, {percent(chosen.dropped_share)} dropped.",
        f"{sum(point.on_frontier for point in result.points)} of {len(result.points)} caps are "
        "beaten by no other.",
    ]


def short_form(point: PointByText) -> str:
    """Return the policy of a point of a sweep."""
    names = ("capacity_factor", "unit", "keep", "expand", "compensate")
    return str(CapacityPolicy(**{name: getattr(point, name) for name in names}))


def _of_texts(row: TextRow) -> str:
    change = _change(row.perplexity_change.mean, row.perplexity_change.standard_error)
    return (
        f"{row.name}: perplexity {change}, {percent(row.changed_next_tokens)} of the next "
        f"tokens change; {_loads(row)}."
    )


def _of_tasks(row: TaskRow) -> str:
    mean = row.mean_difference
    score = "no score" if mean is None else f"mean score {_points(mean)}"
    answers = f"{row.changed_answers} of {row.answers} answers change"
    return f"{row.name}: {score}, {answers}; {_loads(row)}."


def _loads(row: TextRow | TaskRow) -> str:
    before, after = times(row.device_peak_to_mean_before), times(row.device_peak_to_mean)
    return f"{percent(row.dropped_share)} dropped, busiest device {before} to {after} the mean"


def _change(mean: float, error: float | None) -> str:
    """Write a relative change, and say so where it is within its error."""
    if error is None:
        return signed_percent(mean)
    text = f"{signed_percent(mean)} ± {percent(error, 2)}"
    return f"{text} (nothing measurable)" if abs(mean) < SIGMAS * error else text


def _points(change: MeanDifference) -> str:
    """Write a difference of scores in percentage points."""
    if change.standard_error is None:
        return f"{100 * change.mean:+.1f} points"
    text = f"{100 * change.mean:+.1f} ± {100 * change.standard_error:.1f} points"
    within = abs(change.mean) < SIGMAS * change.standard_error
    return f"{text} (nothing measurable)" if within else text
