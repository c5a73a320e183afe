"""`paceline tune`: fit stand-ins, placements and factors by layer of a model on your text."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.output import (
    check_at_least,
    check_folder,
    check_new,
    check_page_libraries,
    continued_by_same_command,
    emit,
    guarded,
    print_end,
    print_lines,
    progress,
    writing,
)
from paceline.cli.sources import (
    folder_of,
    load,
    plan_from_options,
    read_texts,
    read_trace,
    with_devices,
)
from paceline.cli.tune_ladder import (
    LADDER,
    PAGE,
    PLAN,
    base_policy,
    check_model,
    choose_factors,
    climb,
    machine_of,
    next_commands,
    place_experts,
    read_loss,
    relative,
    show_factors,
    show_ladder,
)
from paceline.shipped import DEMO

if TYPE_CHECKING:
    from paceline.calibration.collect import Unfinished
    from paceline.plan import Plan
    from paceline.policy import CapacityPolicy
    from paceline.stand_ins.calibration_file import Calibration
    from paceline.traces import Trace

_FIT_TOKENS, _FACTOR_TOKENS = 65536, 16384


class Stage(str, Enum):
    """Choices of --only."""

    placement = "placement"
    stand_ins = "stand-ins"
    factors = "factors"


@guarded
def tune(
    model: options.Model,
    out: Annotated[
        Path, typer.Option(help="Folder for plan, ladder and calibration, readable by you only.")
    ],
    text: options.Text = None,
    devices: options.Devices = None,
    loss: Annotated[
        str | None,
        typer.Option(help="Perplexity that may be lost, such as 0.3%: take the tightest rung."),
    ] = None,
    bound: Annotated[
        float | None,
        typer.Option(help="Mean capacity factor over layers: this rung alone."),
    ] = None,
    hardware: options.Hardware = None,
    policy: options.Policies = None,
    only: Annotated[Stage | None, typer.Option(help="Run one stage alone.")] = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="Choose max_active for decode steps too.")
    ] = False,
    rank: Annotated[int, typer.Option(help="Rank of an expert's stand-in, at most.")] = 16,
    trace: Annotated[
        str | None,
        typer.Option(help="Place experts by the traffic of this trace, not by the texts."),
    ] = None,
    plan: options.PlanFile = None,
    calibration: options.CalibrationFolder = None,
    tokens: options.StageTokens = None,
    batch_size: options.BatchSize = 16,
    sequence_length: options.SequenceLength = 256,
    memory_gib: Annotated[
        float, typer.Option(help="Memory for inputs of layers, beside the model and 1 GiB.")
    ] = 2,
    dtype: options.DType = options.DTypeName.auto,
    trust_remote_code: options.TrustRemoteCode = False,
    force: options.Force = False,
    json: options.AsJson = False,
) -> None:
    """Go from a model and your text to a plan that can be served, in one run.

    Splits every text: 60% to fit stand-ins for dropped experts and, with --devices, a placement;
    15% to choose a capacity factor for every layer; 25% to judge a ladder of bounds on the busiest
    device, from 2 times the mean to half of it. OUT gets plan.toml, ladder.json and ladder.html.
    With --loss the plan holds the tightest rung that loses less, with a confidence of 95%; with
    --bound that rung; with neither the knee. Where no rung pays, the plan places experts and caps
    nothing. Give text like that which the model will see, of every kind, in several files.

    A run that was stopped goes on where it was; a finished one is replaced by --force alone.
    With --plan, --calibration or both nothing is fitted: they are an earlier run's on the same
    texts. --decode adds a ladder of max_active, judged on steps in which a batch decodes together.

    --only placement places experts by the texts or the trace. --only stand-ins fits alone, on
    all of the texts: for caps at the mean per device and per expert, or for each --policy. --only
    factors chooses factors for --bound on all of the texts. None of these judges anything. Texts
    are cut to 65536 tokens for the fit, 16384 for the factors and 36864 to judge; --tokens changes
    the first, and the others in proportion, or that of the stage which runs alone.

    \b
    Examples:
      paceline tune demo --devices 8 --loss 0.3% --out tuned
      paceline tune ./my-moe --text a.txt --text b.txt --devices 8 --hardware h100 --out mine
      paceline tune ./my-moe --text a.txt --text b.txt --plan mine/plan.toml --bound 1 --out again
      paceline tune ./my-moe --text a.txt --devices 8 --only placement --out placed
      paceline tune demo --only stand-ins --text prose --text german --out fitted
      paceline tune demo --only factors --bound 0.75 --text prose --out factors
    """
    given = plan is not None or calibration is not None
    fits = only is Stage.stand_ins or (only is None and not given)
    allowed = read_loss(loss)
    _check(out, devices, memory_gib, trace, None if only else bound)
    _check_stage(
        only, loss=loss, hardware=hardware, bound=bound, decode=decode or None, plan=plan,
        calibration=calibration, policy=policy,
    )  # fmt: skip
    if only is Stage.placement and devices is None:
        raise ValueError("--only placement needs --devices, on which experts are to be placed.")

    from paceline.batches import Sampling, make_batches
    from paceline.bench.timing import keep_freed_memory
    from paceline.calibration.collect import FOLDER, calibrate
    from paceline.calibration.rows import CAPS
    from paceline.calibration.scripts import scripts_left_out
    from paceline.demo.assets import domains
    from paceline.evaluation.ladder import split_texts
    from paceline.evaluation.subject import BASELINE, STATE, Subject
    from paceline.files import write_text
    from paceline.plan import Plan
    from paceline.reporting.pages import ladder_page
    from paceline.stand_ins.calibration_file import FILE, Calibration

    if only is None:
        check_page_libraries()
    earlier = [out / FILE] if fits else []
    if only is not Stage.stand_ins or devices is not None:
        earlier.append(out / PLAN)
    if not fits or not (out / FOLDER).is_dir():  # else known once the model is loaded
        for path in earlier:
            check_new(force, out=path)
    runs: list[Unfinished] = []

    def started(run: Unfinished, layers: int) -> None:
        runs.append(run)
        if layers:
            typer.echo(f"{layers} layers had been fitted before: going on", err=True)
            return
        for path in earlier:
            check_new(force, out=path)

    caps = _caps(policy or []) if only is Stage.stand_ins else []
    base = None
    if only in (None, Stage.factors):
        base = base_policy(policy or [], bound, alone=only is not None)
    if decode and base is not None:
        base.replace(max_active=1)  # refused before the work
    traffic = None if trace is None else read_trace(trace)
    places = None if fits else with_devices(plan_from_options(devices, None, plan))
    texts = read_texts(text or (domains() if model == DEMO else []), model)
    machine = None if hardware is None else machine_of(hardware, folder_of(model))
    folder = None if places is None else calibration or places.calibration_folder()
    fitted = None if folder is None else Calibration.load(folder)
    parts, spans = split_texts(texts) if only is None else ({"fit": texts}, {})
    network, tokenizer = load(model, dtype.value, trust_remote_code)
    most = tokens or (_FACTOR_TOKENS if only is Stage.factors else _FIT_TOKENS)
    sampling = Sampling(most, batch_size, sequence_length)
    check_model(network, traffic, devices, decode)
    if only is Stage.placement and devices is not None:
        drawn = None if traffic else make_batches(tokenizer, texts, sampling)[0]
        place_experts(network, model, traffic, drawn, devices, out, json)
        return
    result: dict[str, Any] = {}
    with continued_by_same_command(), writing() as write:
        if fits:
            keep_freed_memory()  # a fifth of the fit of a wide layer would be page faults
            with progress() as tell:
                fitted = fit = calibrate(
                    network,
                    tokenizer,
                    parts["fit"],
                    rank=rank,
                    devices=devices if trace is None else None,
                    caps=caps or CAPS,
                    sampling=sampling,
                    memory=int(memory_gib * 2**30),
                    unfinished=out / FOLDER,
                    started=started,
                    progress=tell,
                )
            places = placed = _placed(fit, traffic, devices)
            done = write("out", out / FILE, lambda: fit.save(out))
            result = _fit_result(fit, out / FILE, None if devices is None else out / PLAN)
            if devices is not None and only is not None:
                write("out", out / PLAN, lambda: placed.save(out / PLAN))
            elif force and done:  # an earlier plan names the calibration that was replaced
                (out / PLAN).unlink(missing_ok=True)
            folder = out
        if base is not None and not policy and fitted is None:
            base = base.replace(keep="score", compensate=False)
        if only is None and places is not None and base is not None:
            subject = Subject(
                network, tokenizer, {BASELINE: None}, Plan(placements=places.placements), fitted
            )
            ladder, policies = climb(
                subject, parts, sampling, base, bound=bound, loss=allowed, machine=machine,
                decode=decode, out=out,
            )  # fmt: skip
            ladder.model, ladder.split = model, spans
            ladder.tokens = {"fit": sum(fitted.tokens) if fitted else 0, **ladder.tokens}
            chosen = places.replace(
                policies=policies,
                calibration=None if folder is None else relative(folder, out),
                layers=ladder.subject.layers,
            )
            files = {LADDER: ladder.to_json(), PAGE: ladder_page(ladder.to_dict())}
            write("out", out / PLAN, lambda: _save(chosen, out))
            for name, content in files.items():
                write("out", out / name, partial(write_text, out / name, content, private=True))
            notes = fitted.warnings() if fitted else []
            notes += filter(None, [scripts_left_out(tokenizer, texts.values())])
            emit(ladder, json, show_ladder, fit=result, plan=str(out / PLAN), notes=notes)
            if not json:
                print_lines(notes)
                next_steps = next_commands(model, out / PLAN, ladder)
                print_end([out / name for name in (PLAN, *files)], next_steps)
            shutil.rmtree(out / STATE, ignore_errors=True)
        elif base is not None and places is not None:
            if not policy:
                base = base.replace(compensate=fitted is not None)
            found, chosen = choose_factors(
                network, tokenizer, texts, sampling, base, places, fitted, folder, out
            )
            write("out", out / PLAN, lambda: _save(chosen, out))
            emit(found, json, show_factors)
        else:
            emit(result, json, _show)
    for run in runs:
        run.remove()


def _save(plan: Plan, out: Path) -> None:
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    plan.save(out / PLAN)


def _check_stage(only: Stage | None, **options: Any) -> None:
    """Refuse options that a single stage doesn't have."""
    ladder, given = ("loss", "hardware", "decode"), ("plan", "calibration")
    alone = {
        Stage.placement: (*ladder, *given, "bound", "policy"),
        Stage.stand_ins: (*ladder, *given, "bound"),
        Stage.factors: ladder,
    }
    for name in () if only is None else alone[only]:
        if only is not None and options[name] is not None:
            raise ValueError(f"--{name} is not for --only {only.value}.")


def _check(
    out: Path, devices: int | None, memory_gib: float, trace: str | None, bound: float | None
) -> None:
    from paceline.evaluation.ladder import FACTORS

    check_folder(out=out)
    check_at_least(1, devices=devices)
    if bound is not None and not FACTORS[0] <= bound <= FACTORS[-1]:
        raise ValueError(f"--bound must be {FACTORS[0]} to {FACTORS[-1]}, got {bound:g}.")
    if not 0 < memory_gib < 1 << 20:
        raise ValueError(f"--memory-gib must be above 0, got {memory_gib}.")
    if trace is not None and devices is None:
        raise ValueError("--trace needs --devices, on which experts are to be placed.")


# -- stand-ins and placements ----------------------------------------------------------------------


def _caps(texts: list[str]) -> list[CapacityPolicy]:
    """Return the caps to fit stand-ins for; none: those of the library."""
    from paceline.policy import CapacityPolicy

    caps = []
    for text in texts:
        cap = CapacityPolicy.parse(text)
        if not cap.caps:
            raise ValueError(f"--policy {text} caps nothing: give it a capacity_factor.")
        if cap.pool != "batch" or cap.expand is not None or cap.phase != "all":
            raise ValueError(
                f"--policy {text} can't be fitted for: pool, expand and phase must be left out."
            )
        caps.append(cap)
    return caps


def _placed(found: Calibration, traffic: Trace | None, devices: int | None) -> Plan:
    """Return a plan with the calibration and its placements, or those of a trace's traffic."""
    plan = found.plan(".")
    if traffic is None or devices is None:
        return with_devices(plan)
    from paceline.analysis.placing import PlacementSpec, place

    maps, _ = place(traffic, PlacementSpec(devices))
    return plan.replace(placements=tuple(layer.placement for layer in maps))


def _fit_result(found: Calibration, path: Path, plan: Path | None) -> dict[str, Any]:
    by_text = zip(*(layer.explained_by_text for layer in found.layers), strict=True)
    mean = [sum(shares) / len(found.layers) for shares in by_text]
    return {
        "schema": "paceline-calibrate/1",
        "calibration": str(path),
        "plan": None if plan is None else str(plan),
        "texts": [
            {"name": name, "tokens": count, "explained": share}
            for name, count, share in zip(found.texts, found.tokens, mean, strict=True)
        ],
        "held_out": found.held_out,
        "warnings": found.warnings(),
        "layers": [
            {
                "name": layer.name,
                "explained": layer.explained,
                "explained_by_expert": layer.explained_by_expert.tolist(),
                "ridge": layer.ridge,
                "least_rows": int(layer.loads.sum(0).min()),
                "without_stand_in": int((layer.ranks == 0).sum()),
                "output_norm": layer.output_norm.tolist(),
                "residual_norm": layer.residual_norm.tolist(),
            }
            for layer in found.layers
        ],
    }


def _show(result: Mapping[str, Any]) -> None:
    lines = ["Share of the outputs' energy that stand-ins explain on text left out:"]
    for layer in result["layers"]:
        without = layer["without_stand_in"]
        count = len(layer["output_norm"])
        note = f"; {without} of {count} experts have no stand-in" if without else ""
        least = layer["least_rows"]
        lines.append(f"{layer['name']}: {layer['explained']:.0%}; at least {least} rows{note}")
    if result["held_out"] == "texts":
        for text in result["texts"]:
            lines.append(f"{text['name']}: {text['explained']:.0%} while it was left out")
    tokens = sum(text["tokens"] for text in result["texts"])
    print_lines([*lines, *result["warnings"], f"{tokens:,} tokens."])
    print_end([path for path in (result["calibration"], result["plan"]) if path is not None])
