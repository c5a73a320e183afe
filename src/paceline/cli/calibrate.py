"""`paceline calibrate`: learn on your text what dropped assignments should leave behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import model_options
from paceline.cli.errors import guarded

if TYPE_CHECKING:
    from paceline.plan import Plan
    from paceline.policy import CapacityPolicy
    from paceline.stand_ins.file import Calibration

PLAN = "plan.toml"
"""In the folder of a calibration, where placements were searched."""


@guarded
def calibrate(
    model: model_options.ModelName,
    out: Annotated[Path, typer.Option(help="Folder for the calibration, readable by you only.")],
    text: model_options.Text = None,
    rank: Annotated[int, typer.Option(help="Of an expert's stand-in, at most.")] = 16,
    devices: Annotated[
        int | None,
        typer.Option(help="Search a placement of the experts on so many devices as well."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="A cap that stand-ins are to be good for; may be repeated. Default: every device, "
            "and every expert, at most at the mean."
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="Place experts by the traffic of this trace, not by the texts."),
    ] = None,
    tokens: model_options.Tokens = 65536,
    batch_size: model_options.BatchSize = 16,
    sequence_length: model_options.SequenceLength = 256,
    memory_gib: Annotated[
        float, typer.Option(help="For inputs of layers, beside the model and 1 GiB.")
    ] = 2,
    dtype: model_options.DType = model_options.DTypeName.auto,
    trust_remote_code: model_options.TrustRemoteCode = False,
    json: model_options.AsJson = False,
) -> None:
    """Fit a small stand-in of every expert, for policies with compensate=true.

    Calibrate on text like that which the model will see: the shares printed are of text that a
    stand-in was not fitted to. Each --text is left out in turn, so give several. With --devices a
    placement is searched too, and OUT/plan.toml names both. Run again after it was ended, it goes
    on where it was.

    \b
    Examples:
      paceline calibrate demo --text prose --text german --out calibrated
      paceline calibrate ./my-moe --text a.txt --text b.txt --devices 8 --out calibrated
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: allowed is a folder, made if need be.")
    if not 0 < memory_gib < 1 << 20:
        raise ValueError(f"--memory-gib {memory_gib}: allowed is a number > 0.")
    if trace is not None and devices is None:
        raise ValueError("--trace needs --devices, on which experts are to be placed.")

    from paceline.cli.models import load, read_texts

    texts = read_texts(text or [], model)
    caps = _caps(policy or [])

    from paceline.batches import Sampling
    from paceline.calibration.collect import calibrate as run
    from paceline.calibration.unfinished import FOLDER, remove
    from paceline.cli.progress import progress

    sampling = Sampling(tokens, batch_size, sequence_length)
    network, tokenizer = load(model, dtype.value, trust_remote_code)
    with progress() as tell:
        found = run(
            network,
            tokenizer,
            texts,
            rank=rank,
            devices=None if trace is not None else devices,
            **({"caps": caps} if caps else {}),
            sampling=sampling,
            memory=int(memory_gib * 2**30),
            unfinished=out / FOLDER,
            progress=tell,
        )
    plan = None if devices is None else _plan(found, trace, devices)
    path = found.save(out)
    if plan is not None:
        plan.save(out / PLAN)
    remove(out / FOLDER)
    result = _result(found, path, None if plan is None else out / PLAN)
    if json:
        from paceline.files import to_json

        typer.echo(to_json(result), nl=False)
    else:
        _show(result)


def _caps(texts: list[str]) -> list[CapacityPolicy]:
    from paceline.policy import CapacityPolicy

    caps = [CapacityPolicy.parse(text) for text in texts]
    for text, cap in zip(texts, caps, strict=True):
        if not cap.caps:
            raise ValueError(f"--policy {text} caps nothing: allowed is a capacity_factor.")
        if cap.pool != "batch" or cap.expand is not None or cap.phase != "all":
            raise ValueError(f"--policy {text}: allowed here are capacity_factor and unit.")
    return caps


def _plan(found: Calibration, trace: str | None, devices: int) -> Plan:
    """The calibration and its placements, or those that a trace's traffic asks for."""
    plan = found.plan(".")
    if trace is None:
        return plan

    from paceline.analysis.placing import Wanted, place
    from paceline.traces import open_trace

    maps, _ = place(open_trace(trace), Wanted(devices))
    experts = [len(layer.experts) for layer in found.layers]
    if [layer.num_experts for layer in maps] != experts:
        raise ValueError(
            f"--trace {trace} is of {len(maps)} layers of {maps[0].num_experts} experts: the model "
            f"has {len(experts)} of {experts[0]}."
        )
    return plan.replace(placements=tuple(layer.placement for layer in maps))


def _result(found: Calibration, path: Path, plan: Path | None) -> dict[str, Any]:
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


def _show(result: dict[str, Any]) -> None:
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
    for warning in result["warnings"]:
        typer.echo(warning)
    tokens = sum(text["tokens"] for text in result["texts"])
    typer.echo(f"{tokens} tokens; written to {result['calibration']}")
    if result["plan"] is not None:
        typer.echo(f"plan with placements: {result['plan']}")
