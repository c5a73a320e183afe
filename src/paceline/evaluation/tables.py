"""Tables of an evaluation: the cost of every policy, and the paper's tables beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from paceline.evaluation.results import EvalResult, TaskScore, TasksResult, TextsResult
from paceline.evaluation.suite import PUBLISHED, Published
from paceline.policy import CapacityPolicy
from paceline.text import percent, signed_percent, times

NONE = "-"

IGNORED = ("min_expert_load", "seed")
"""Fields in which a policy may differ from the paper's and still be set beside it."""


@dataclass(frozen=True)
class Table:
    """A table of a result: a first column of names, and columns of figures."""

    title: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    after: Sequence[str] = field(default=())


def heading(result: EvalResult) -> list[str]:
    """Describe the model under evaluation."""
    subject = result.subject
    lines = [
        f"{result.model}: {subject.architecture}, {subject.parameters:,} parameters, "
        f"{subject.layers} MoE layers of {subject.experts} experts on {subject.devices} "
        f"devices; {subject.dtype}."
    ]
    if subject.calibrated_on:
        lines.append(f"Stand-ins calibrated on {', '.join(subject.calibrated_on)}.")
    return lines


def tables(result: EvalResult) -> Iterator[Table]:
    """Yield the tables of a result of `evaluate`."""
    if result.texts:
        yield from _texts(result.texts)
    if result.tasks:
        yield from _tasks(result.tasks)
    if any(_name_of(row, result) for row in PUBLISHED):
        yield from _beside_the_paper(result)


def markdown(result: EvalResult) -> str:
    """Return the tables of a result as Markdown."""
    parts = ["# Quality under caps", *heading(result)]
    for each in tables(result):
        parts += [
            f"## {each.title}",
            each.note,
            "\n".join(table(each.header, each.rows)),
            *each.after,
        ]
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, the first column left, the others right."""
    marks = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (header, marks, *rows)]


def with_error(value: float, error: float | None, scale: float = 100, digits: int = 2) -> str:
    """Format a change with its standard error.

    >>> with_error(0.0052, 0.0004)
    '+0.52 ± 0.04'
    """
    text = f"{scale * value:+.{digits}f}"
    if float(text) == 0:
        text = text[1:]
    return text if error is None else f"{text} ± {scale * error:.{digits}f}"


def idle_lines(rows: Iterable[tuple[str, str | None]]) -> list[str]:
    """Return a sentence for the policies that capped nothing, by name -> why; they share it.

    >>> why = "The policy capped nothing: its cap applies from 16."
    >>> idle_lines([("none", None), ("a", why), ("b", why)])
    ['The policy capped nothing: its cap applies from 16. So with a; b.']
    """
    by_reason: dict[str, list[str]] = {}
    for name, why in rows:
        if why is not None:
            by_reason.setdefault(why, []).append(name)
    return [f"{why} So with {'; '.join(names)}." for why, names in by_reason.items()]


def _texts(texts: TextsResult) -> Iterator[Table]:
    sizes = ", ".join(f"{name} {count}" for name, count in texts.tokens_by_text.items())
    for composition in texts.compositions.values():
        header = ["policy", "perplexity %", "± over texts", "next tokens changed", "dropped",
                  "busiest device"]  # fmt: skip
        rows, shared = [], []
        for row in composition.policies:
            change = row.perplexity_change
            over_texts = change.standard_error_over_texts
            cells = [
                row.name,
                with_error(change.mean, change.standard_error),
                NONE if over_texts is None else f"{100 * over_texts:.2f}",
                percent(row.changed_next_tokens),
                percent(row.dropped_share),
                times(row.device_peak_to_mean),
            ]
            rows.append(cells)
            if solo := row.against_solo:
                change = solo.perplexity_change
                difference = with_error(change.mean, change.standard_error)
                shared.append([row.name, difference, percent(solo.changed_next_tokens, 2)])
        yield Table(
            f"Texts, {composition.label}",
            f"Mean change of perplexity over the texts and its standard error (sequences paired; "
            f"then: texts as a sample of texts). Tokens: {sizes}; sequences of "
            f"{texts.sequence_length}, {texts.batch_size} per batch.",
            header,
            rows,
            idle_lines((row.name, row.capped_nothing) for row in composition.policies),
        )
        if shared:
            yield Table(
                f"Effect of sharing a batch, {composition.label}",
                "Against every sequence alone, under the same policy.",
                ["policy", "perplexity %", "next tokens changed"],
                shared,
            )


def _tasks(tasks: TasksResult) -> Iterator[Table]:
    names = list(tasks.tasks)
    shots = ", ".join(f"{name} {task['shots']}" for name, task in tasks.tasks.items())
    limit = "all samples" if tasks.limit is None else f"the first {tasks.limit} samples"
    for mode, found in tasks.modes.items():
        header = ["policy", "mean", "difference", "answers changed", "dropped",
                  "busiest device"]  # fmt: skip
        header += ["changed by sharing"] if any(row.against_solo for row in found.policies) else []
        rows = []
        for row in found.policies:
            mean = row.mean_difference
            cells = [
                row.name,
                NONE if row.mean is None else f"{100 * row.mean:.1f}",
                NONE if mean is None else with_error(mean.mean, mean.standard_error),
                f"{row.changed_answers} of {row.answers}",
                percent(row.dropped_share),
                times(row.device_peak_to_mean),
            ]
            if solo := row.against_solo:
                cells.append(f"{solo.changed_answers} of {solo.answers}")
            rows.append(cells)
        size = f", {tasks.batch_size} per batch" if mode == "batched" else ""
        after = idle_lines((row.name, row.capped_nothing) for row in found.policies)
        if cut := max(row.truncated_prompts for row in found.policies):
            after.append(f"{cut} prompts were longer than the model reads and lost their start.")
        yield Table(
            f"Tasks, {found.label}",
            f"Mean of the scores in percent and difference to no cap, with the standard error of "
            f"paired differences; {limit} of each{size}.",
            header,
            rows,
            after,
        )
        yield Table(
            f"Scores by task, {found.label}",
            "In percent (perplexities as they are), difference to no cap in brackets. Examples in "
            f"the prompt: {shots}.",
            ["task and policy", "score"],
            [[f"{name}: {row.name}", _score(row.tasks[name])]
             for name in names for row in found.policies],
        )  # fmt: skip


def _score(task: TaskScore) -> str:
    difference = task.difference
    if task.metric.endswith("perplexity") or task.metric == "bits_per_byte":
        return f"{task.score:.3f} ({signed_percent(math.expm1(difference.mean))})"
    change = with_error(difference.mean, difference.standard_error, digits=1)
    return f"{100 * task.score:.1f} ({change})"


# -- beside the paper -----------------------------------------------------------------------------


def _beside_the_paper(result: EvalResult) -> Iterator[Table]:
    note = (
        "The paper's figures are means over its tasks on its checkpoints, copied from it (He et "
        "al., arXiv 2503.05066). Ours are of the model above; they are comparable with a row only "
        "where model, tasks and shots are the same."
    )
    for number in (1, 2, 3):
        rows = [
            [
                row.model,
                row.method,
                f"{row.baseline:.1f}",
                f"{row.mean:.1f}",
                f"{row.mean - row.baseline:+.1f}",
                *_ours(row, result),
            ]
            for row in PUBLISHED
            if row.table == number
        ]
        header = ["paper's model", "method", "no cap", "with it", "change",
                  "ours: tasks", "ours: perplexity %"]  # fmt: skip
        yield Table(f"The paper's Table {number}, and the same policies here", note, header, rows)


def _ours(row: Published, result: EvalResult) -> list[str]:
    """Format the change of the tasks' mean and of perplexity under a published row's policy."""
    if row.policy is None:
        return ["not a policy here", NONE]
    name = _name_of(row, result)
    if name is None:
        return ["not run", "not run"]
    return [_ours_tasks(name, result.tasks), _ours_texts(name, result.texts)]


def _name_of(row: Published, result: EvalResult) -> str | None:
    """Find the name of our run under a published row's policy, None where there was none."""
    defaults = {field: CapacityPolicy.model_fields[field].default for field in IGNORED}
    for each in result.subject.policies:
        if isinstance(each.policy, str) and row.policy is not None:
            ours = CapacityPolicy.parse(each.policy)
            if ours.replace(**defaults) == row.policy.replace(**defaults):
                return each.name
    return None


def _ours_tasks(name: str, tasks: TasksResult | None) -> str:
    if tasks is None:
        return "not run"
    rows = tasks.modes["batched"].policies
    mean = next(row for row in rows if row.name == name).mean_difference
    return NONE if mean is None else with_error(mean.mean, mean.standard_error)


def _ours_texts(name: str, texts: TextsResult | None) -> str:
    if texts is None:
        return "not run"
    rows = next(iter(texts.compositions.values())).policies
    change = next(row for row in rows if row.name == name).perplexity_change
    return with_error(change.mean, change.standard_error)
