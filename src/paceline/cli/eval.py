"""`paceline eval`: what policies cost in quality, on your texts and on tasks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.output import (
    check_at_least,
    check_folder,
    check_page_libraries,
    command_line,
    continued_by_same_command,
    emit,
    guarded,
    print_end,
    print_lines,
    print_table,
    print_verdict,
    progress,
    writing,
)
from paceline.cli.sources import load, most_devices, plan_from_options, read_texts, with_devices
from paceline.shipped import TASK_FOLDER

if TYPE_CHECKING:
    from paceline.evaluation.results import EvalResult
    from paceline.evaluation.sweep_results import SweepResult
    from paceline.plan import Plan

COMPOSITIONS = ("one_text", "mixed", "solo")
EVAL_FILE, SWEEP_FILE = "eval.json", "sweep.json"
POINT = ("unit", "keep", "expand", "compensate", "capacity_factor")
"""Fields of a policy of the grid."""


@guarded
def evaluate(
    model: options.Model,
    policy: options.Policies = None,
    plan: options.PlanFile = None,
    placement: options.PlacementFile = None,
    calibration: options.CalibrationFolder = None,
    devices: options.Devices = None,
    text: options.Text = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(help="Task of lm-evaluation-harness; may be repeated, or several by comma."),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(help="paper: its nine tasks with their shots; its policies if none is given."),
    ] = None,
    include_path: Annotated[
        list[Path] | None,
        typer.Option(help="Folder with tasks of your own (YAML), as lm_eval's --include_path."),
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples in the prompt. Default: as each task says.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Samples per task, at most.")] = None,
    grid: Annotated[
        bool, typer.Option("--grid", help="Try caps of every size and kind on texts.")
    ] = False,
    factors: Annotated[
        str | None,
        typer.Option(help="With --grid: capacity factors by comma; 0: one assignment per unit."),
    ] = None,
    units: Annotated[
        str | None, typer.Option(help="With --grid: device, expert, by comma. Default: both.")
    ] = None,
    keeps: Annotated[
        str | None,
        typer.Option(help="With --grid: a policy's keep, by comma. Default: score,random."),
    ] = None,
    expands: Annotated[
        str | None,
        typer.Option(
            help="With --grid: none, own_device, visited_devices, all, by comma. Default: "
            "none,own_device."
        ),
    ] = None,
    compositions: Annotated[
        str | None,
        typer.Option(
            help="Ways to batch, by comma: one_text, mixed, solo (every sample alone). Default: "
            "all; with --grid one_text."
        ),
    ] = None,
    tokens: options.Tokens = 16384,
    batch_size: options.BatchSize = 16,
    sequence_length: options.SequenceLength = 256,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results, and for what a killed run goes on from."),
    ] = None,
    dtype: options.DType = options.DTypeName.auto,
    trust_remote_code: options.TrustRemoteCode = False,
    force: options.Force = False,
    json: options.AsJson = False,
) -> None:
    """Judge policies by texts and tasks against no policy, on the same samples, in one run.

    Perplexity and next tokens on texts, scores and answers on tasks, each with paired differences
    and standard errors, beside what is dropped and how busy the busiest device is. The same samples
    are batched in several ways, since what a cap drops depends on who shares a batch.

    --grid tries caps of every size and kind on texts instead, with --calibration also each with
    stand-ins. It marks the caps that no other beats both in quality and in the load of the busiest
    device, and writes sweep.json and sweep.html.

    \b
    Examples:
      paceline eval demo --policy capacity_factor=1.25 --policy capacity_factor=1,unit=expert
      paceline eval demo --policy capacity_factor=1 --tasks paceline_continuation,paceline_copy
      paceline eval demo --policy capacity_factor=1,compensate=true --calibration demo
      paceline eval ./my-moe --text a.txt --text b.txt --plan plan.toml --out judged
      paceline eval allenai/OLMoE-1B-7B-0924-Instruct --suite paper --out olmoe
      paceline eval demo --grid --calibration demo --factors 1.5,1,0.75,0.5 --out swept
    """
    from paceline.batches import Sampling
    from paceline.evaluation.run import Axes, Job, sweep
    from paceline.evaluation.run import evaluate as judge
    from paceline.evaluation.subject import Subject, weights_hash
    from paceline.files import write_text
    from paceline.stand_ins.calibration_file import Calibration

    check_folder(out=out)
    check_at_least(1, limit=limit, batch_size=batch_size)
    check_at_least(0, num_fewshot=num_fewshot)
    places = with_devices(plan_from_options(devices, placement, plan))
    names = _task_names(tasks or [], suite)
    axes, ways = None, _ways(compositions, grid)
    if grid:
        check_page_libraries()
        _refuse("can't be combined with --grid", policy=policy, tasks=tasks, suite=suite)
        if places.policies:
            raise ValueError("--grid has its own policies: give the plan as --placement.")
        axes = Axes.parse(factors, units, keeps, expands, calibration is not None)
        list(axes.policies())  # an error for a bad value comes before the model is loaded
    else:
        _refuse("needs --grid", factors=factors, units=units, keeps=keeps, expands=expands)
    policies = [] if grid else _policies(policy or [], places, suite)

    sampling = Sampling(tokens, batch_size, sequence_length)
    texts = read_texts(text or [], model) if text or not names else {}
    old = None
    if out is not None and not force:
        points = [each for each, _ in axes.policies()] if axes is not None else None
        old = _check_earlier(out, _of_run(model, places, points, policies, texts, names))
    fitted = None if calibration is None else Calibration.load(calibration)
    chosen = None
    if names:
        if find_spec("lm_eval") is None:
            raise ValueError("tasks need lm-evaluation-harness: pip install 'paceline[eval]'")
        os.environ.setdefault("TQDM_DISABLE", "1")  # no bars of the harness beside ours
        from paceline.evaluation.tasks import load_tasks

        chosen = load_tasks(names, [TASK_FOLDER, *(include_path or [])], num_fewshot)
    network, tokenizer = load(model, dtype.value, trust_remote_code)
    if out is not None:
        if old is not None and not force and old != weights_hash(network):
            raise ValueError(
                f"--out {out} holds results of {model} with other weights or another dtype: give "
                "another, or --force to replace it."
            )
        out.mkdir(parents=True, exist_ok=True)
    with progress() as tell, continued_by_same_command(kept=out is not None):
        if axes is not None:
            result: EvalResult | SweepResult = sweep(
                network, tokenizer, texts, axes=[axes], plan=places, calibration=fitted,
                sampling=sampling, composition=ways[0], out=out, progress=tell,
            )  # fmt: skip
        else:
            subject = Subject.of(network, tokenizer, policies, places, fitted)
            job = Job(texts, sampling, ways, chosen, limit, batch_size)
            result = judge(subject, job, out=out, progress=tell)
    result.model, result.command = model, command_line()
    files, written = _files(result), []
    with writing() as write:
        if out is not None:
            for name, content in files.items():
                save = partial(write_text, out / name, content, private=True)
                if write("out", out / name, save):
                    written.append(out / name)
        emit(result, json, _show)
        if not json:
            print_end(written, _next(model, policies, result, calibration))


# -- options ---------------------------------------------------------------------------------------


def _task_names(tasks: list[str], suite: str | None) -> dict[str, int | None]:
    """Return tasks by name -> examples in the prompt, where the suite fixes them."""
    from paceline.evaluation.suite import SUITES

    if suite is not None and suite not in SUITES:
        raise ValueError(f"--suite must be {', '.join(SUITES)}, got {suite}.")
    named = [name.strip() for each in tasks for name in each.split(",") if name.strip()]
    return {**(SUITES[suite] if suite else {}), **dict.fromkeys(named)}


def _policies(policies: list[str], plan: Plan, suite: str | None) -> list[Any]:
    """Return the policies to judge beside those of the plan."""
    from paceline.evaluation.suite import paper_policies
    from paceline.policy import CapacityPolicy

    read = [CapacityPolicy.parse(each) for each in policies]
    if not read and not plan.policies:
        if suite is None:
            raise ValueError("give at least one --policy, or a --plan that has one, to judge.")
        read = paper_policies()
    return read


def _ways(compositions: str | None, grid: bool) -> tuple[str, ...]:
    """Return the ways to batch; a grid has one, and never every sample alone."""
    if compositions is None:
        return COMPOSITIONS[:1] if grid else COMPOSITIONS
    ways = tuple(dict.fromkeys(filter(None, compositions.split(","))))
    if grid and (len(ways) != 1 or ways[0] not in COMPOSITIONS[:2]):
        raise ValueError(
            f"--compositions must be one_text or mixed with --grid, got {compositions}."
        )
    if not ways or not set(ways) <= set(COMPOSITIONS):
        raise ValueError(
            f"--compositions must be among one_text, mixed and solo, got {compositions}."
        )
    return ways


def _refuse(reason: str, **options: Any) -> None:
    for name, value in options.items():
        if value:
            raise ValueError(f"--{name} {reason}.")


# -- results ---------------------------------------------------------------------------------------


def _files(result: EvalResult | SweepResult) -> dict[str, str]:
    """Return the content of a result's files by name."""
    from paceline.evaluation.results import EvalResult
    from paceline.evaluation.tables import idle_lines, markdown
    from paceline.evaluation.verdict import short_form
    from paceline.reporting.pages import sweep_page
    from paceline.reporting.quality_figures import sweep_table

    if isinstance(result, EvalResult):
        if found := result.batches["found"]:
            typer.echo(f"{found} batches had been computed before", err=True)
        return {EVAL_FILE: result.to_json(), "eval.md": markdown(result)}
    swept = result.to_dict()
    idle = idle_lines((short_form(point), point.capped_nothing) for point in result.points)
    shown = sweep_table(swept) + "".join(f"\n{line}\n" for line in idle)
    return {SWEEP_FILE: result.to_json(), "sweep.md": shown, "sweep.html": sweep_page(swept)}


def _show(result: EvalResult | SweepResult) -> None:
    from paceline.evaluation.results import EvalResult
    from paceline.evaluation.tables import heading, idle_lines, tables
    from paceline.evaluation.verdict import eval_verdict, short_form, sweep_verdict
    from paceline.reporting.quality_figures import sweep_rows

    if isinstance(result, EvalResult):
        for line in eval_verdict(result):
            print_verdict([line])
        print_lines(["", *heading(result)])
        for each in tables(result):
            print_lines([""])
            print_table(each.title, each.header, each.rows, fold=True)
            print_lines([each.note, *each.after])
        return
    print_verdict(sweep_verdict(result))
    about, header, rows = sweep_rows(result.to_dict())
    print_table("Every cap; those that no other beats have a star", header, rows, fold=True)
    print_lines([about])
    print_lines(idle_lines((short_form(point), point.capped_nothing) for point in result.points))


def _next(
    model: str,
    policies: list[Any],
    result: EvalResult | SweepResult,
    calibration: Path | str | None,
) -> list[list[str]]:
    """Return the command to run after a result: serve the first policy, or a sweep's choice."""
    from paceline.evaluation.results import EvalResult
    from paceline.evaluation.verdict import best_bearable, short_form

    if isinstance(result, EvalResult):
        chosen = str(policies[0]) if policies else None
    else:
        best = best_bearable(result)
        chosen = None if best is None else short_form(best)
    if chosen is None:
        return []
    more = ["--calibration", str(calibration)] if "compensate" in chosen else []
    return [["serve", model, "--policy", chosen, *more]]


# -- earlier results -------------------------------------------------------------------------------


Made = dict[str, set[str]]
"""What a result is of, by kind."""


def _of_run(
    model: str,
    places: Plan,
    points: list[dict[str, Any]] | None,
    policies: Iterable[Any],
    texts: Iterable[str],
    tasks: Iterable[str],
) -> tuple[str, Made]:
    """Return the file that a run will write, and what its result will be of."""
    if points is not None:
        name, found = SWEEP_FILE, [_point(each) for each in points]
    else:
        name, found = EVAL_FILE, [str(each) for each in policies]
        own = [str(each) for each in places.policies]
        found += [own[0] if len(own) == 1 else str(own)] if own else []
    return name, {
        "model": {model},
        "number of devices": {str(most_devices(places))},
        "policy": set(found),
        "text": set(texts),
        "task": set(tasks),
    }


def _of_file(result: Mapping[str, Any]) -> Made:
    """Return what the content of eval.json or sweep.json is of."""
    subject, texts = result["subject"], result.get("texts") or {}
    named = [each["policy"] for each in subject["policies"] if each["policy"] is not None]
    return {
        "model": {result["model"]},
        "number of devices": {str(subject["devices"])},
        "policy": {*map(str, named), *map(_point, result.get("points", ()))},
        "text": {*result.get("tokens_by_text", texts.get("tokens_by_text", {}))},
        "task": {*(result.get("tasks") or {"tasks": ()})["tasks"]},
    }


def _point(fields: Mapping[str, Any]) -> str:
    return str([fields[name] for name in POINT])


def _check_earlier(out: Path, run: tuple[str, Made]) -> str | None:
    """Check that a run has all that the result in its folder has, so that nothing is lost.

    Returns:
        The hash of that result's weights; None without one.

    Raises:
        ValueError: naming what the earlier result is of.
    """
    import json

    from paceline.files import MOST_TEXT, read_plain

    name, new = run
    path = out / name
    if not path.exists():
        return None
    ending = "give another, or --force to replace it."
    try:
        result = json.loads(read_plain(path, MOST_TEXT))
        old, weights = _of_file(result), result["subject"].get("weights")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"--out {out} holds {name} of something else: {ending}") from None
    for kind, values in old.items():
        if lost := sorted(values - new[kind]):
            raise ValueError(f"--out {out} holds {name} of another {kind}, {lost[0]}: {ending}")
    return None if weights is None else str(weights)
