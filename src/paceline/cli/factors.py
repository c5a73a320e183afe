"""`paceline factors`: one bound on a model's expert time, shared out over its layers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import model_options
from paceline.cli.decided import Devices, PlanFile, decided, on_devices
from paceline.cli.errors import check_writable, guarded


@guarded
def factors(
    model: model_options.ModelName,
    policy: Annotated[
        str,
        typer.Option(help="Of every layer, like capacity_factor=0.75; its factor is the bound."),
    ],
    out: Annotated[Path, typer.Option(help="Plan file to write, with a policy for each layer.")],
    plan: PlanFile = None,
    calibration: model_options.CalibrationFolder = None,
    devices: Devices = None,
    text: model_options.Text = None,
    tokens: model_options.Tokens = 16384,
    batch_size: model_options.BatchSize = 16,
    sequence_length: model_options.SequenceLength = 256,
    dtype: model_options.DType = model_options.DTypeName.auto,
    trust_remote_code: model_options.TrustRemoteCode = False,
    json: model_options.AsJson = False,
) -> None:
    """Give every layer a factor of its own: more room where a cap costs more, by the same bound.

    Each layer is capped alone, at seven factors: how far the model's next-token distributions move
    from those without a cap says how sensitive it is. Then the factors are chosen whose mean,
    weighted by what layers compute, is at most that of --policy, and whose losses add up to least.
    Judge the plan on other text: paceline eval --plan.

    \b
    Examples:
      paceline factors demo --policy capacity_factor=0.75 --out plan.toml
      paceline factors ./my-moe --policy capacity_factor=1,compensate=true --text a.txt
      --text b.txt --plan calibrated/plan.toml --out plan.toml
    """
    from paceline.evaluation.sensitivity import bound_of
    from paceline.policy import CapacityPolicy

    base = CapacityPolicy.parse(policy)
    bound_of(base)
    places = on_devices(decided(devices, None, plan))
    check_writable(out)

    from paceline.batches import Sampling
    from paceline.cli.models import load, read_texts
    from paceline.cli.progress import progress
    from paceline.evaluation.sensitivity import measure_layers
    from paceline.stand_ins.file import Calibration

    texts = read_texts(text or [], model)
    folder = places.calibration_folder() if calibration is None else calibration
    fitted = None if folder is None else Calibration.load(folder)
    network, tokenizer = load(model, dtype.value, trust_remote_code)
    with progress() as tell:
        found = measure_layers(
            network,
            tokenizer,
            texts,
            base,
            plan=places,
            calibration=fitted,
            sampling=Sampling(tokens, batch_size, sequence_length),
            progress=tell,
        )
    beside = None if folder is None else os.path.relpath(folder, out.absolute().parent)
    chosen = places.replace(policies=found.share(base), calibration=beside, layers=len(found.names))
    chosen.save(out)
    result = found.to_dict(base) | {"plan": str(out)}
    if json:
        from paceline.files import to_json

        typer.echo(to_json(result), nl=False)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = "Layers capped alone: divergence from the model without a cap, in millinats a token"
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, collapse_padding=True
    )
    table.add_column("layer", no_wrap=True)
    for name in ("at the bound", "its factor", "at its factor"):
        table.add_column(name, justify="right")
    for layer in result["layers"]:
        table.add_row(
            layer["name"],
            f"{1e3 * layer['at_bound']:.2f}",
            f"{layer['factor']:.2f}",
            f"{1e3 * layer['at_factor']:.2f}",
        )
    console = Console(highlight=False)
    console.print(table)
    alike, own = (
        sum(layer[name] for layer in result["layers"]) for name in ("at_bound", "at_factor")
    )
    console.print(
        f"Together {1e3 * own:.2f} instead of {1e3 * alike:.2f}, on {result['tokens']:,} tokens, "
        f"if what layers cost adds up; written: {result['plan']}",
        markup=False,
    )
