"""`paceline eval`: what policies cost in quality, on your texts and on tasks."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.output import (
    check_at_least,
    check_folder,
    command_line,
    emit,
    guarded,
    progress,
)
from paceline.cli.sources import load, plan_from_options, read_texts, with_devices
from paceline.shipped import DEMO, TASK_FOLDER

if TYPE_CHECKING:
    from paceline.evaluation.results import EvalResult, SweepResult
    from paceline.plan import Plan

COMPOSITIONS = ("one_text", "mixed", "solo")


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
    from paceline.evaluation.subject import Subject
    from paceline.stand_ins.calibration_file import Calibration

    check_folder(out)
    check_at_least(1, limit=limit, batch_size=batch_size)
    check_at_least(0, num_fewshot=num_fewshot)
    places = with_devices(plan_from_options(devices, placement, plan))
    names = _task_names(tasks or [], suite)
    axes, ways = None, _ways(compositions, grid)
    if grid:
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
    fitted = None if calibration is None else Calibration.load(calibration)
    chosen = None
    if names:
        if find_spec("lm_eval") is None:
            raise ValueError("tasks need lm-evaluation-harness: pip install 'paceline[eval]'")
        os.environ.setdefault("TQDM_DISABLE", "1")  # no bars of the harness beside ours
        from paceline.evaluation.tasks import load_tasks

        own = [TASK_FOLDER] if model == DEMO else []
        chosen = load_tasks(names, [*own, *(include_path or [])], num_fewshot)
    network, tokenizer = load(model, dtype.value, trust_remote_code)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with progress() as tell:
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
    shown = _write(result, out)
    emit(result, json, lambda _: typer.echo(shown, nl=False))


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


def _write(result: EvalResult | SweepResult, out: Path | None) -> str:
    """Write results into a folder, and return them as Markdown."""
    from paceline.evaluation.results import EvalResult
    from paceline.evaluation.tables import markdown
    from paceline.files import write_text
    from paceline.reporting.pages import sweep_page
    from paceline.reporting.quality_figures import sweep_table

    if isinstance(result, EvalResult):
        name, shown, page = "eval", markdown(result), None
        if found := result.batches["found"]:
            typer.echo(f"{found} batches had been computed before", err=True)
    else:
        swept = result.to_dict()
        name, shown, page = "sweep", sweep_table(swept), sweep_page(swept)
    if out is not None:
        write_text(out / f"{name}.json", result.to_json(), private=True)
        write_text(out / f"{name}.md", shown, private=True)
        if page is not None:
            write_text(out / f"{name}.html", page, private=True)
    return shown
