"""`paceline place`: which expert should live on which device, from a trace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.errors import guarded
from paceline.cli.model_options import AsJson
from paceline.cli.trace_options import (
    Devices,
    Experts,
    K,
    Layers,
    ModelConfig,
    TraceName,
    WorldSize,
)

if TYPE_CHECKING:
    from paceline.traces import Trace


@guarded
def place(
    trace: TraceName,
    devices: Devices = 8,
    judge: Annotated[
        str | None, typer.Option(help="Another trace of the same model, to judge on as well.")
    ] = None,
    replicas: Annotated[int, typer.Option(help="Slots a layer beyond one an expert.")] = 0,
    groups: Annotated[
        int | None,
        typer.Option(help="Expert groups of a group-limited router; default: the config's."),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(help="Machines, each with whole groups. Default: groups whole in order."),
    ] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of a batch to judge on. Default: the trace's forwards, or 1024."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Plan file to write; with replicas it holds the map.")
    ] = None,
    maps: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write the maps to in the forms of vLLM, SGLang, TensorRT-LLM."
        ),
    ] = None,
    model_config: ModelConfig = None,
    precision: Annotated[
        str | None, typer.Option(help="Of the weights: bf16, fp8 or fp4. Default: the config's.")
    ] = None,
    experts: Experts = None,
    k: K = None,
    layers: Layers = None,
    world_size: WorldSize = None,
    json: AsJson = False,
) -> None:
    """Search the placement whose busiest device has the fewest rows, batch after batch.

    Lossless: nothing is dropped. Compared with experts in order, heaviest first, and EPLB; fitted
    on one half of the trace and judged on the other, and on a second trace where there is one. The
    plan that is written is fitted on all of the trace. `paceline reorder` gives a checkpoint that
    order, so that every engine has the placement; --maps writes what engines with replicas read.

    \b
    Examples:
      paceline place sample:esft_v2lite_law --devices 8 --out plan.toml
      paceline place trace/ --judge other-trace/ --devices 8 --replicas 8 --model-config model/
    """
    from paceline.analysis.cost import layer_shape
    from paceline.analysis.expert_map_files import write_maps
    from paceline.analysis.hardware import BYTES
    from paceline.analysis.placing import Wanted
    from paceline.analysis.placing import place as search
    from paceline.analysis.plan_judge import layer_plan
    from paceline.cli.progress import progress
    from paceline.cli.trace_options import read_trace
    from paceline.model_config import read_model_config

    for name, folder in (("--out", out and out.parent), ("--maps", maps and maps.parent)):
        if folder is not None and not folder.absolute().is_dir():
            raise ValueError(f"{name}: there is no folder {folder}")
    if precision is not None and precision not in BYTES:
        raise ValueError(f"--precision must be one of {', '.join(BYTES)}, got {precision}")
    if model_config is not None:
        config = read_model_config(model_config)
        groups = config.expert_groups if groups is None else groups
        layers = layers or config.hidden_layers
    wanted = Wanted(devices, replicas, 1 if groups is None else groups, nodes)

    def read(name: str) -> Trace:
        return read_trace(
            name,
            experts=experts,
            k=k,
            layers=layers,
            model_config=model_config,
            world_size=world_size,
        )

    given, other = read(trace), None if judge is None else read(judge)
    with progress() as tell:
        found, result = search(given, wanted, other, batch_tokens, tell)
    result["replica_gb_a_device"] = None
    if replicas and model_config is not None:
        from paceline.analysis.expert_map import replica_bytes

        shape = layer_shape(model_config, precision)
        cost = replica_bytes(found, shape.hidden, shape.expert_size, BYTES[shape.precision])
        result["replica_gb_a_device"] = cost / 1e9
    result["plan"] = None if out is None else str(out)
    if out is not None:
        layer_plan(given, found, []).save(out)
    names = [layer.name for layer in given.header.layers]
    written = [] if maps is None else write_maps(found, names, layers, maps)
    result["maps"] = [str(path) for path in written]
    if json:
        from paceline.files import to_json

        typer.echo(to_json(result | {"slots": [list(m.slots) for m in found]}), nl=False)
    else:
        _show(result)


_NAMES = {
    "in_order": "experts in order",
    "heaviest_first": "heaviest first",
    "eplb": "EPLB, no replicas",
    "search": "Paceline",
    "eplb_replicas": "EPLB, with replicas",
    "search_replicas": "Paceline, with replicas",
}


def _show(result: Mapping[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from paceline.text import times

    parts = {
        "same batches": result["same_batches"],
        "second half": result["second_half"],
        "other trace": result["other_trace"],
    }
    table = Table(
        title=f"Busiest of {result['devices']} devices x mean, over batches, mean over layers",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("placement", no_wrap=True)
    for name, part in parts.items():
        if part is not None:
            table.add_column(name, justify="right")
    for way, name in _NAMES.items():
        if way in result["same_batches"]["ways"]:
            cells = [p["ways"][way]["device_peak_to_mean"] for p in parts.values() if p is not None]
            table.add_row(name, *map(times, cells))
    console = Console(highlight=False)
    console.print(table)
    for note in result["notes"]:
        console.print(f"Note: {note}", markup=False)
    for line in result["verdict"]:
        console.print(line, markup=False)
    if result["replica_gb_a_device"] is not None:
        console.print(f"Replicas take {result['replica_gb_a_device']:.2f} GB of a device.")
    elif result["replicas"]:
        console.print("What replicas take of a device's memory: say --model-config.")
    for path in [result["plan"], *result["maps"]]:
        if path is not None:
            console.print(f"Written: {path}", markup=False)
