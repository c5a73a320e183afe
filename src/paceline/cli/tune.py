"""`paceline tune`: fit stand-ins, placements and factors by layer of a model on your text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.output import (
    check_at_least,
    check_folder,
    check_new,
    continued_by_same_command,
    emit,
    guarded,
    print_end,
    print_lines,
    print_table,
    progress,
    writing,
)
from paceline.cli.sources import load, plan_from_options, read_texts, with_devices

if TYPE_CHECKING:
    from paceline.calibration.collect import Unfinished
    from paceline.plan import Plan
    from paceline.policy import CapacityPolicy
    from paceline.stand_ins.calibration_file import Calibration

PLAN = "plan.toml"
"""In the folder that is written: placements, policies by layer and the calibration's folder."""
_FIT_TOKENS, _FACTOR_TOKENS = 65536, 16384


class Stage(str, Enum):
    """Choices of --only."""

    stand_ins = "stand-ins"
    factors = "factors"


@guarded
def tune(
    model: options.Model,
    out: Annotated[
        Path, typer.Option(help="Folder for calibration and plan, readable by you only.")
    ],
    text: options.Text = None,
    devices: options.Devices = None,
    bound: Annotated[
        float | None,
        typer.Option(help="Mean capacity factor over layers; also choose a factor per layer."),
    ] = None,
    policy: options.Policies = None,
    only: Annotated[Stage | None, typer.Option(help="Run one stage alone.")] = None,
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
    """Fit stand-ins for dropped experts, place experts, and choose a factor for every layer.

    Stand-ins serve policies with compensate=true. Give text like that which the model will see, in
    several files: each --text is left out in turn, and the shares printed are of the text left out.
    They are fitted for caps at the mean per device and per expert, or for each --policy. With
    --devices a placement is searched too, and OUT/plan.toml names both. A run that was stopped goes
    on where it was; a finished one is replaced by --force alone.

    With --bound every layer also gets a factor of its own: more room where a cap costs more. Each
    layer is capped alone at seven factors; the factors are chosen whose mean, weighted by the work
    of a layer, is at most the bound, and whose losses add up to least. OUT/plan.toml then holds a
    policy per layer: --policy without its factor, compensated where stand-ins were fitted. Judge it
    on other text with paceline eval --plan. --only factors fits nothing, and takes placements and
    stand-ins from --plan and --calibration.

    Texts are cut to 65536 tokens for the fit and 16384 for the factors, unless --tokens says so.

    \b
    Examples:
      paceline tune demo --text prose --text german --out tuned
      paceline tune ./my-moe --text a.txt --text b.txt --devices 8 --bound 0.75 --out mine
      paceline tune demo --only factors --bound 0.75 --out factors
      paceline tune ./my-moe --only factors --plan mine/plan.toml --bound 1 --text a.txt --out t
    """
    fits = only is not Stage.factors
    chooses = only is Stage.factors or (only is None and bound is not None)
    _check(out, devices, memory_gib, trace)
    writes_plan = chooses or devices is not None
    if fits and (plan is not None or calibration is not None):
        raise ValueError("--plan and --calibration are for --only factors.")

    from paceline.batches import Sampling
    from paceline.calibration.collect import FOLDER, calibrate
    from paceline.calibration.rows import CAPS
    from paceline.stand_ins.calibration_file import FILE, Calibration

    earlier = [*([out / FILE] if fits else []), *([out / PLAN] if writes_plan else [])]
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

    caps = _caps(policy or [], bound) if fits else []
    base = _base(policy or [], bound) if chooses else None
    places = None if fits else with_devices(plan_from_options(devices, None, plan))
    texts = read_texts(text or [], model)
    folder = None if places is None else calibration or places.calibration_folder()
    fitted = None if folder is None else Calibration.load(folder)
    network, tokenizer = load(model, dtype.value, trust_remote_code)
    result: dict[str, Any] = {}
    with continued_by_same_command(), writing() as write:
        if fits:
            sampling = Sampling(tokens or _FIT_TOKENS, batch_size, sequence_length)
            with progress() as tell:
                fitted = fit = calibrate(
                    network,
                    tokenizer,
                    texts,
                    rank=rank,
                    devices=devices if trace is None else None,
                    caps=caps or CAPS,
                    sampling=sampling,
                    memory=int(memory_gib * 2**30),
                    unfinished=out / FOLDER,
                    started=started,
                    progress=tell,
                )
            places = placed = _placed(fit, trace, devices)
            done = write("out", out / FILE, lambda: fit.save(out))
            result = _fit_result(fit, out / FILE, None if devices is None else out / PLAN)
            if devices is not None:
                write("out", out / PLAN, lambda: placed.save(out / PLAN))
            elif force and done:  # an earlier plan names the calibration that was replaced
                (out / PLAN).unlink(missing_ok=True)
            folder = out
        if base is not None and places is not None:
            sampling = Sampling(tokens or _FACTOR_TOKENS, batch_size, sequence_length)
            if not policy:
                base = base.replace(compensate=fitted is not None)
            found, chosen = _choose(
                network, tokenizer, texts, sampling, base, places, fitted, folder, out
            )
            write("out", out / PLAN, lambda: _save(chosen, out))
            result = result | {"factors": found, "plan": found["plan"]} if fits else found
        emit(result, json, _show if fits else _show_factors)
    for run in runs:
        run.remove()


def _save(plan: Plan, out: Path) -> None:
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    plan.save(out / PLAN)


def _check(out: Path, devices: int | None, memory_gib: float, trace: str | None) -> None:
    check_folder(out=out)
    check_at_least(1, devices=devices)
    if not 0 < memory_gib < 1 << 20:
        raise ValueError(f"--memory-gib must be above 0, got {memory_gib}.")
    if trace is not None and devices is None:
        raise ValueError("--trace needs --devices, on which experts are to be placed.")


# -- stand-ins and placements ----------------------------------------------------------------------


def _caps(texts: list[str], bound: float | None) -> list[CapacityPolicy]:
    """Return the caps to fit stand-ins for; none: those of the library."""
    from paceline.policy import CapacityPolicy

    caps = []
    for text in texts:
        cap = CapacityPolicy.parse(text)
        if bound is not None and cap.capacity_factor is None:
            cap = cap.replace(capacity_factor=bound)
        if not cap.caps:
            raise ValueError(f"--policy {text} caps nothing: give it a capacity_factor.")
        if cap.pool != "batch" or cap.expand is not None or cap.phase != "all":
            raise ValueError(
                f"--policy {text} can't be fitted for: pool, expand and phase must be left out."
            )
        caps.append(cap)
    return caps


def _placed(found: Calibration, trace: str | None, devices: int | None) -> Plan:
    """Return a plan with the calibration and its placements, or those of a trace's traffic."""
    plan = found.plan(".")
    if trace is None or devices is None:
        return with_devices(plan)
    from paceline.analysis.placing import PlacementSpec, place
    from paceline.traces import open_trace

    maps, _ = place(open_trace(trace), PlacementSpec(devices))
    experts = [len(layer.experts) for layer in found.layers]
    if [layer.num_experts for layer in maps] != experts:
        raise ValueError(
            f"--trace {trace} is of {len(maps)} layers of {maps[0].num_experts} experts: the model "
            f"has {len(experts)} of {experts[0]}."
        )
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
    typer.echo("share of the outputs' energy that stand-ins explain on text left out")
    for layer in result["layers"]:
        without = layer["without_stand_in"]
        count = len(layer["output_norm"])
        note = f"; {without} of {count} experts have no stand-in" if without else ""
        least = layer["least_rows"]
        typer.echo(f"{layer['name']}: {layer['explained']:.0%}; at least {least} rows{note}")
    if result["held_out"] == "texts":
        for text in result["texts"]:
            typer.echo(f"{text['name']}: {text['explained']:.0%} while it was left out")
    print_lines(result["warnings"])
    tokens = sum(text["tokens"] for text in result["texts"])
    typer.echo(f"{tokens} tokens; written to {result['calibration']}")
    if "factors" in result:
        _show_factors(result["factors"])
    elif result["plan"] is not None:
        print_end([result["plan"]])


# -- factors by layer ------------------------------------------------------------------------------


def _base(texts: list[str], bound: float | None) -> CapacityPolicy:
    """Return the policy whose factor bounds the mean over layers.

    Raises:
        ValueError: if there are several policies, no factor, or two.
    """
    from paceline.evaluation.layer_factors import bound_of
    from paceline.policy import CapacityPolicy

    if len(texts) > 1:
        raise ValueError(f"--policy must be given once to choose factors, got {len(texts)}.")
    if not texts and bound is None:
        raise ValueError("--only factors needs --bound, the mean factor over layers.")
    base = CapacityPolicy.parse(texts[0]) if texts else CapacityPolicy(capacity_factor=bound)
    if bound is not None:
        if base.capacity_factor not in (None, bound):
            raise ValueError(f"--policy {texts[0]} and --bound {bound} must have the same factor.")
        base = base.replace(capacity_factor=bound)
    bound_of(base)
    return base


def _choose(
    network: Any, tokenizer: Any, texts: dict[str, str], sampling: Any, base: CapacityPolicy,
    places: Plan, fitted: Calibration | None, folder: Path | None, out: Path,
) -> tuple[dict[str, Any], Plan]:  # fmt: skip
    """Choose a factor per layer, and return what was measured and the plan for the folder."""
    from paceline.evaluation.layer_factors import measure_layers

    with progress() as tell:
        found = measure_layers(
            network,
            tokenizer,
            texts,
            base,
            plan=places,
            calibration=fitted,
            sampling=sampling,
            progress=tell,
        )
    plan = places.replace(
        policies=found.share(base),
        calibration=None if folder is None else os.path.relpath(folder, out.absolute()),
        layers=len(found.names),
    )
    return found.result(base).to_dict() | {"plan": str(out / PLAN)}, plan


def _show_factors(result: Mapping[str, Any]) -> None:
    print_table(
        "Layers capped alone: divergence from the model without a cap, in millinats per token",
        ("layer", "at the bound", "its factor", "at its factor"),
        [
            (
                layer["name"],
                f"{1e3 * layer['at_bound']:.2f}",
                f"{layer['factor']:.2f}",
                f"{1e3 * layer['at_factor']:.2f}",
            )
            for layer in result["layers"]
        ],
    )
    alike, own = (
        sum(layer[name] for layer in result["layers"]) for name in ("at_bound", "at_factor")
    )
    print_lines(
        [
            f"Together {1e3 * own:.2f} instead of {1e3 * alike:.2f}, on {result['tokens']:,} "
            "tokens, if the losses of layers add up."
        ]
    )
    print_end([result["plan"]])
