"""`paceline sweep`: quality against the busiest device, over caps of every size and kind."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import model_options
from paceline.cli.decided import Devices, PlacementFile, decided, on_devices
from paceline.cli.errors import check_writable, guarded


@guarded
def sweep(
    model: model_options.ModelName,
    text: model_options.Text = None,
    devices: Devices = None,
    placement: PlacementFile = None,
    calibration: model_options.CalibrationFolder = None,
    factors: Annotated[
        str | None, typer.Option(help="Capacity factors by comma; 0: one assignment a unit.")
    ] = None,
    units: Annotated[str, typer.Option(help="By comma: device, expert.")] = "device,expert",
    keeps: Annotated[str, typer.Option(help="By comma, as a policy's keep.")] = "score,random",
    expands: Annotated[
        str, typer.Option(help="By comma: none, own_device, visited_devices, all.")
    ] = "none,own_device",
    mix: model_options.Mix = False,
    tokens: model_options.Tokens = 16384,
    batch_size: model_options.BatchSize = 16,
    sequence_length: model_options.SequenceLength = 256,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for sweep.json, sweep.html and what a killed run goes on from."),
    ] = None,
    dtype: model_options.DType = model_options.DTypeName.auto,
    trust_remote_code: model_options.TrustRemoteCode = False,
    json: model_options.AsJson = False,
) -> None:
    """Try caps of every size and kind on texts: what each costs, and how busy devices stay.

    Every combination is run, with --calibration also each with stand-ins for what is dropped. Caps
    that no other beats, in quality and in the load of the busiest device, are marked.

    \b
    Examples:
      paceline sweep demo --text prose --text german
      paceline sweep demo --calibration demo --factors 1.5,1,0.75,0.5 --out swept
      paceline sweep ./my-moe --text a.txt --text b.txt --placement placed.toml --units device
    """
    from paceline.evaluation.sweep import FACTORS, Axes
    from paceline.evaluation.sweep import sweep as run

    axes = Axes(
        factors=FACTORS if factors is None else tuple(map(_factor, _parts("factors", factors))),
        units=_parts("units", units),
        keeps=_parts("keeps", keeps),
        expands=tuple(None if e == "none" else e for e in _parts("expands", expands)),
        compensates=(False, True) if calibration is not None else (False,),
    )
    list(axes.policies())  # a wrong value is said before the model is loaded
    chosen = on_devices(decided(devices, placement, None))
    if out is not None:
        check_writable(out / "sweep.json") if out.exists() else check_writable(out)

    from paceline.batches import Sampling
    from paceline.cli.models import load, read_texts
    from paceline.cli.progress import progress
    from paceline.files import to_json, write_text
    from paceline.reporting.pages import sweep_page
    from paceline.reporting.sweep_table import sweep_table
    from paceline.stand_ins.file import Calibration

    texts = read_texts(text or [], model)
    fitted = None if calibration is None else Calibration.load(calibration)
    network, tokenizer = load(model, dtype.value, trust_remote_code)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with progress() as tell:
        result = run(
            network,
            tokenizer,
            texts,
            axes=[axes],
            plan=chosen,
            calibration=fitted,
            sampling=Sampling(tokens, batch_size, sequence_length),
            composition="mixed" if mix else "one_text",
            out=out,
            progress=tell,
        )
    result |= {"model": model, "command": shlex.join(["paceline", *sys.argv[1:]])}
    if out is not None:
        write_text(out / "sweep.json", to_json(result), private=True)
        write_text(out / "sweep.md", sweep_table(result), private=True)
        write_text(out / "sweep.html", sweep_page(result), private=True)
    typer.echo(to_json(result) if json else sweep_table(result), nl=False)


def _parts(name: str, text: str) -> tuple[str, ...]:
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise ValueError(f"--{name} {text!r} names nothing: allowed is at least one value.")
    return parts


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        raise ValueError(f"--factors {text}: allowed are numbers >= 0.") from None
    return 1e-9 if factor == 0 else factor
