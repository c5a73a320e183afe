"""`paceline plan`: from a trace to a decision and a plan file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.errors import guarded
from paceline.cli.model_options import AsJson
from paceline.cli.trace_options import Devices, TraceName


@guarded
def plan(
    trace: TraceName,
    model_config: Annotated[Path, typer.Option(help="The model's config.json, or its folder.")],
    devices: Devices = 8,
    hardware: Annotated[
        str,
        typer.Option(help="A preset (h100, h200, b200, h20, a100, l40s, mi300x), or a file."),
    ] = "h100",
    judge: Annotated[
        str | None, typer.Option(help="Another trace of the same model, to judge on as well.")
    ] = None,
    max_mass_loss: Annotated[
        str, typer.Option(help="Share of the gate mass that a cap may lose.")
    ] = "1%",
    min_gain: Annotated[str, typer.Option(help="Gain below which nothing is worth it.")] = "5%",
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a batch. Default: the trace's forwards, or 1024.")
    ] = None,
    pool: Annotated[str, typer.Option(help="Of a cap: batch, request or source.")] = "batch",
    replicas: Annotated[int, typer.Option(help="Compare with so many replicas a layer.")] = 0,
    groups: Annotated[
        int | None, typer.Option(help="Expert groups of the router; default: the config's.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Machines, each with whole groups.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="Of the weights: bf16, fp8 or fp4. Default: the config's.")
    ] = None,
    link: Annotated[
        float | None, typer.Option(help="GB/s between devices, instead of the hardware's.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Plan file to write.")] = None,
    json: AsJson = False,
) -> None:
    """Is imbalance costing you anything, and what should you do: place, cap, both, or nothing?

    Placement first, since it loses nothing; then, layer by layer, the cap that saves most time for
    the gate mass it drops. Chosen on half of the trace and judged on the other half, and on a
    second trace where there is one. Times are a cost model's (paceline calibrate-hardware).

    \b
    Examples:
      paceline plan trace/ --model-config model/ --devices 8 --hardware h100 --out plan.toml
      paceline plan monday/ --judge friday/ --model-config model/ --max-mass-loss 0.5%
    """
    from paceline.analysis.cost import layer_shape
    from paceline.analysis.hardware import BYTES, hardware_of, linked
    from paceline.analysis.placing import Wanted
    from paceline.analysis.plan_goal import Goal
    from paceline.analysis.planner import make_plan
    from paceline.cli.progress import progress
    from paceline.cli.trace_options import read_trace
    from paceline.model_config import read_model_config

    if out is not None and not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    if precision is not None and precision not in BYTES:
        raise ValueError(f"--precision must be one of {', '.join(BYTES)}, got {precision}")
    if link is not None and not link > 0:
        raise ValueError(f"--link must be above 0, got {link}")
    device = linked(hardware_of(hardware), None if link is None else link * 1e9, None)
    goal = Goal(
        Wanted(
            devices,
            replicas,
            read_model_config(model_config).expert_groups if groups is None else groups,
            nodes,
        ),
        layer_shape(model_config, precision or device.precision or None),
        device,
        _share("--max-mass-loss", max_mass_loss),
        _share("--min-gain", min_gain),
        pool,
    )
    read = read_trace(trace, model_config=model_config)
    other = None if judge is None else read_trace(judge, model_config=model_config)
    with progress() as tell:
        found, result = make_plan(read, goal, other, batch_tokens, tell)
    result["plan"] = None if out is None else str(out)
    if out is not None:
        found.save(out)
    if json:
        from paceline.files import to_json

        typer.echo(to_json(result), nl=False)
    else:
        _show(result)


def _share(name: str, text: str) -> float:
    """A share, as 0.01 or 1%."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ValueError(f"{name} must be a share like 0.01 or 1%, got {text}") from None
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be from 0 to below 1 (100%), got {text}")
    return value


def _show(result: Mapping[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for name, title in (
        ("second_half", f"{result['trace']}, second half"),
        ("other_trace", (result["other_trace"] or {}).get("trace", "")),
    ):
        if result[name] is not None:
            console.print(_ways(result[name], f"{title}, on {result['hardware']} x "
                                f"{result['devices']}"))  # fmt: skip
            console.print(_frontier(result[name]))
            if result[name]["active"]:
                console.print(_active(result[name]))
    if result["variants"]:
        console.print(_variants(result))
    for note in result["notes"]:
        console.print(f"Note: {note}", markup=False)
    console.print(f"Decision: {result['decision']}", style="bold")
    for line in result["verdict"]:
        console.print(f"- {line}", markup=False)
    if result["plan"] is not None:
        console.print(f"Written: {result['plan']}", markup=False)


def _table(title: str) -> Any:
    from rich import box
    from rich.table import Table

    return Table(
        title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, collapse_padding=True
    )


def _ways(part: Mapping[str, Any], title: str) -> Any:
    """The four ways, a row each."""
    table = _table(title)
    table.add_column("way", no_wrap=True)
    for name in ("us a step", "gain", "dropped", "mass lost", "MB sent", "MB received"):
        table.add_column(name, justify="right")
    for name, way in part["ways"].items():
        table.add_row(
            name,
            f"{way['microseconds']:.0f}",
            f"{way['gain']:+.1%}",
            f"{way['dropped_share']:.2%}",
            _mass(way["gate_mass_lost"]),
            f"{way['bytes_sent'] / 1e6:.1f}",
            f"{way['receive_buffer_bytes'] / 1e6:.1f}",
        )
    return table


def _frontier(part: Mapping[str, Any]) -> Any:
    """Gain against what is lost."""
    table = _table("Caps by the gate mass they may lose")
    table.add_column("placement", no_wrap=True)
    for name in ("budget", "gain", "dropped", "mass lost"):
        table.add_column(name, justify="right")
    for point in part["frontier"]:
        table.add_row(
            "placed" if point["placement"] == "placed" else "in order",
            f"{point['budget']:.2%}",
            f"{point['gain']:+.1%}",
            f"{point['dropped_share']:.2%}",
            _mass(point["gate_mass_lost"]),
        )
    return table


def _active(part: Mapping[str, Any]) -> Any:
    """What capping active experts would give."""
    table = _table("max_active: experts that a device reads, where batches are small (decode)")
    table.add_column("placement", no_wrap=True)
    for name in ("max_active", "reads", "gain", "dropped", "mass lost"):
        table.add_column(name, justify="right")
    for point in part["active"]:
        table.add_row(
            "placed" if point["placement"] == "placed" else "in order",
            str(point["max_active"]),
            f"{point['most_active_experts']:.2f}",
            f"{point['gain']:+.1%}",
            f"{point['dropped_share']:.2%}",
            _mass(point["gate_mass_lost"]),
        )
    return table


def _variants(result: Mapping[str, Any]) -> Any:
    """What other settings of the chosen caps would give."""
    table = _table("Place and cap, with another setting")
    table.add_column("setting", no_wrap=True)
    for name in ("gain", "dropped", "mass lost"):
        table.add_column(name, justify="right")
    for point in result["variants"]:
        table.add_row(
            point["change"],
            f"{point['gain']:+.1%}",
            f"{point['dropped_share']:.2%}",
            _mass(point["gate_mass_lost"]),
        )
    return table


def _mass(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.2%}"
