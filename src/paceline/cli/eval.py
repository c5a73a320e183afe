"""`paceline eval`: what caps cost in quality, on your texts and on tasks."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import model_options
from paceline.cli.decided import Devices, PlanFile, decided, on_devices
from paceline.cli.output import guarded

if TYPE_CHECKING:
    from paceline.evaluation.tasks import Chosen
    from paceline.plan import Plan


@guarded
def evaluate(
    model: model_options.ModelName,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="What to judge, like capacity_factor=1.25; may be repeated."),
    ] = None,
    plan: PlanFile = None,
    calibration: model_options.CalibrationFolder = None,
    devices: Devices = None,
    text: model_options.Text = None,
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
        int | None, typer.Option(help="Examples in the prompt; else as each task says.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="At most so many samples of a task.")] = None,
    compositions: Annotated[
        str,
        typer.Option(help="Ways to batch, by comma: one_text, mixed, solo (every sample alone)."),
    ] = "one_text,mixed,solo",
    tokens: model_options.Tokens = 16384,
    batch_size: Annotated[int, typer.Option(help="Sequences, or prompts, a batch.")] = 16,
    sequence_length: model_options.SequenceLength = 256,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for eval.json, eval.md and what a killed run goes on from."),
    ] = None,
    dtype: model_options.DType = model_options.DTypeName.auto,
    trust_remote_code: model_options.TrustRemoteCode = False,
    json: model_options.AsJson = False,
) -> None:
    """Judge policies by texts and tasks: against no policy, on the same samples, in one run.

    Perplexity and next tokens on texts, scores and answers on tasks, each with paired differences
    and standard errors, beside what is dropped and how busy the busiest device is. The same samples
    are batched in several ways, as what a cap drops depends on who shares a batch.

    \b
    Examples:
      paceline eval demo --policy capacity_factor=1.25 --policy capacity_factor=1,unit=expert
      paceline eval demo --policy capacity_factor=1 --tasks paceline_continuation,paceline_copy
      paceline eval demo --policy capacity_factor=1,compensate=true --calibration demo
      paceline eval ./my-moe --text a.txt --text b.txt --plan plan.toml --out judged
      paceline eval allenai/OLMoE-1B-7B-0924-Instruct --suite paper --out olmoe
    """
    wanted = _tasks(tasks or [], suite)
    ways = tuple(dict.fromkeys(filter(None, compositions.split(","))))
    chosen, policies = _decided(policy or [], plan, devices, suite)
    _check(limit, num_fewshot, batch_size, out, ways)

    from paceline.cli.sources import load, read_texts

    texts = read_texts(text or [], model) if text or not wanted else {}

    from paceline.batches import Sampling
    from paceline.cli.progress import progress
    from paceline.evaluation.run import Job
    from paceline.evaluation.run import evaluate as run
    from paceline.evaluation.subject import Subject
    from paceline.evaluation.tables import markdown
    from paceline.files import to_json, write_text
    from paceline.stand_ins.file import Calibration

    sampling = Sampling(tokens, batch_size, sequence_length)
    fitted = None if calibration is None else Calibration.load(calibration)
    loaded = _loaded(wanted, model, include_path or [], num_fewshot) if wanted else None
    network, tokenizer = load(model, dtype.value, trust_remote_code)
    subject = Subject.of(network, tokenizer, policies, chosen, fitted)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with progress() as tell:
        job = Job(texts, sampling, ways, loaded, limit, batch_size)
        result = run(subject, job, out=out, progress=tell)
    result |= {"model": model, "command": shlex.join(["paceline", *sys.argv[1:]])}
    if out is not None:
        write_text(out / "eval.json", to_json(result), private=True)
        write_text(out / "eval.md", markdown(result), private=True)
    if found := result["batches"]["found"]:
        typer.echo(f"{found} batches had been computed before", err=True)
    typer.echo(to_json(result) if json else markdown(result), nl=False)


def _tasks(tasks: list[str], suite: str | None) -> dict[str, int | None]:
    """Names of tasks -> examples in the prompt, where the suite says."""
    from paceline.evaluation.suite import SUITES

    if suite is not None and suite not in SUITES:
        raise ValueError(f"--suite {suite}: allowed is {', '.join(SUITES)}.")
    named = [name.strip() for each in tasks for name in each.split(",") if name.strip()]
    return {**(SUITES[suite] if suite else {}), **dict.fromkeys(named)}


def _decided(
    policies: list[str], plan: Path | None, devices: int | None, suite: str | None
) -> tuple[Plan, list[Any]]:
    """Where experts are, and the policies beside those of the plan."""
    from paceline.evaluation.suite import paper_policies
    from paceline.policy import CapacityPolicy

    chosen = on_devices(decided(devices, None, plan))
    read = [CapacityPolicy.parse(each) for each in policies]
    if not read and not chosen.policies:
        if suite is None:
            raise ValueError("give at least one --policy, or a --plan that has one, to judge.")
        read = paper_policies()
    return chosen, read


def _check(
    limit: int | None,
    shots: int | None,
    batch_size: int,
    out: Path | None,
    ways: tuple[str, ...],
) -> None:
    from paceline.numbers import check_count

    for name, value, least in (("limit", limit, 1), ("num_fewshot", shots, 0)):
        if value is not None:
            check_count(name, value, least)
    check_count("batch_size", batch_size)
    if out is not None and out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: allowed is a folder, made if need be.")
    if not ways or not set(ways) <= {"one_text", "mixed", "solo"}:
        raise ValueError(f"--compositions {','.join(ways)}: allowed are one_text, mixed and solo.")


def _loaded(
    wanted: dict[str, int | None], model: str, include: list[Path], shots: int | None
) -> Chosen:
    from importlib.util import find_spec

    if find_spec("lm_eval") is None:
        raise ValueError("tasks need lm-evaluation-harness: pip install 'paceline[eval]'")
    os.environ.setdefault("TQDM_DISABLE", "1")  # no bars of the harness beside ours
    from paceline.evaluation.tasks import load_tasks

    if model == "demo":
        from paceline.shipped import TASK_FOLDER

        include = [TASK_FOLDER, *include]
    return load_tasks(wanted, include, shots)
