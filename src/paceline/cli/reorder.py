"""`paceline reorder`: a checkpoint whose experts are in the planned order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.output import check_folder, emit, guarded, progress
from paceline.cli.sources import folder_of, quiet

_CHECK_BELOW = 4 << 30  # bytes of weights, which take twice that in float32


@guarded
def reorder(
    model: options.Model,
    plan: options.RequiredPlan,
    out: Annotated[Path, typer.Option(help="Folder to write, which must not exist.")],
    check: Annotated[
        bool | None,
        typer.Option(
            "--check/--no-check",
            help="Run both on random tokens and compare. Default: below 4 GB of weights.",
        ),
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.AsJson = False,
) -> None:
    """Write a checkpoint again with its experts in the order of a plan's placements.

    Every engine places experts in order: the first on the first device, and so on. With experts,
    router rows, biases and quantisation scales in the planned order, that is the planned
    placement, in any engine and without its knowing. The model computes what it did.

    \b
    Examples:
      paceline plan trace --place-only --devices 8 --out plan.toml
      paceline reorder ./my-moe --plan plan.toml --out ./my-moe-placed
    """
    from paceline.checkpoint.folder import TOLERANCE, open_checkpoint, output_difference
    from paceline.checkpoint.reorder import planned_maps
    from paceline.checkpoint.reorder import reorder as write
    from paceline.plan import Plan

    check_folder(parents=False, out=out)
    if out.exists():
        raise ValueError(f"--out {out} exists: a checkpoint is written into a new folder.")
    wanted = Plan.load(plan)
    checkpoint = open_checkpoint(folder_of(model))
    maps = planned_maps(checkpoint, wanted)
    size = sum((checkpoint.folder / shard).stat().st_size for shard in checkpoint.shards)
    compared: list[float] = []

    def compare(made: Path) -> None:
        quiet()
        compared.append(output_difference(checkpoint.folder, made, trust_remote_code))
        if not compared[0] <= TOLERANCE:
            raise ValueError(
                f"{model} can't be reordered: in another order its outputs differ by "
                f"{compared[0]:.2g} (allowed is {TOLERANCE:g}), so {out} was not made."
            )

    compares = size < _CHECK_BELOW if check is None else check
    with progress() as tell:
        write(checkpoint, maps, out, tell, wanted, compare if compares else None)
    result: dict[str, Any] = {
        "schema": "paceline-reorder/1",
        "model": model,
        "out": str(out),
        "layers": len(checkpoint.layers()),
        "devices": maps[0].num_devices,
        "tensors_moved": sum(len(layer.tensors) for layer in checkpoint.layers()),
        "output_difference": compared[0] if compared else None,
    }
    emit(result, json, _show)


def _show(result: Mapping[str, Any]) -> None:
    out, difference = result["out"], result["output_difference"]
    typer.echo(
        f"{out}: experts of {result['layers']} layers in the planned order for "
        f"{result['devices']} devices."
    )
    if difference is None:
        typer.echo("Not compared with the original (--check does it).")
    else:
        typer.echo(f"Its outputs differ from the original's by {difference:.1g}.")
    typer.echo(f"For Paceline, use its own plan: {Path(out) / 'plan.toml'}")
