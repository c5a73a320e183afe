"""`paceline plan`: from a trace to a decision, a placement and a plan file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.output import (
    check_at_least,
    check_writable,
    console,
    emit,
    guarded,
    print_lines,
    progress,
    table,
)
from paceline.cli.sources import DEVICES, read_trace

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.analysis.placing import Wanted
    from paceline.analysis.plan_goal import Goal
    from paceline.traces import Trace


@guarded
def plan(
    trace: options.TraceName,
    model_config: options.ModelConfig = None,
    devices: options.Devices = None,
    hardware: options.Hardware = None,
    place_only: Annotated[
        bool,
        typer.Option("--place-only", help="Search a placement alone, which drops nothing."),
    ] = False,
    judge: options.Judge = None,
    max_mass_loss: Annotated[
        str, typer.Option(help="Share of the gate mass that a cap may lose.")
    ] = "1%",
    min_gain: Annotated[str, typer.Option(help="Gain below which nothing is worth it.")] = "5%",
    batch_tokens: options.BatchTokens = None,
    pool: Annotated[str, typer.Option(help="Of a cap: batch, request or source.")] = "batch",
    replicas: Annotated[
        int, typer.Option(help="Slots per layer beyond one per expert, to compare with.")
    ] = 0,
    groups: Annotated[
        int | None,
        typer.Option(help="Expert groups of a group-limited router. Default: the config's."),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(help="Machines, each with whole groups. Default: groups whole in order."),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Of the weights: bf16, fp8 or fp4. Default: the config's.")
    ] = None,
    link: options.Link = None,
    out: Annotated[
        Path | None, typer.Option(help="Plan file to write; with replicas it holds the map.")
    ] = None,
    maps: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write the placement to in the forms of vLLM, SGLang, TensorRT-LLM."
        ),
    ] = None,
    experts: options.Experts = None,
    k: options.K = None,
    layers: options.Layers = None,
    world_size: options.WorldSize = None,
    physical: options.Physical = False,
    json: options.AsJson = False,
) -> None:
    """Decide from a trace whether to place experts, cap loads, do both, or do nothing.

    Placement comes first, since it drops nothing; then, layer by layer, the cap that saves most
    time for the gate mass it loses. Everything is chosen on half of the trace and judged on the
    other half, and on a second trace where there is one. Times are those of a cost model, for the
    sizes in --model-config and the --hardware (default: h100; `paceline bench hardware` fits it to
    this machine).

    --place-only needs no --model-config. It searches the placement whose busiest device has the
    fewest rows, and compares it with experts in order, heaviest first, and EPLB. `paceline reorder`
    gives a checkpoint that order, so that every engine has the placement; --maps writes what
    engines with replicas read.

    \b
    Examples:
      paceline plan trace --model-config model --devices 8 --hardware h100 --out plan.toml
      paceline plan monday --judge friday --model-config model --max-mass-loss 0.5%
      paceline plan sample:esft_v2lite_law --place-only --out plan.toml
      paceline plan trace --place-only --replicas 8 --model-config model --maps maps
    """
    from paceline.analysis.hardware import BYTES
    from paceline.analysis.placing import Wanted
    from paceline.model_config import read_model_config

    check_at_least(1, devices=devices)
    check_writable(out, maps if maps is None or not maps.is_dir() else None)
    if precision is not None and precision not in BYTES:
        raise ValueError(f"--precision must be one of {', '.join(BYTES)}, got {precision}.")
    if model_config is not None:
        config = read_model_config(model_config)
        groups = config.expert_groups if groups is None else groups
        layers = layers or config.hidden_layers
    places = Wanted(
        DEVICES if devices is None else devices, replicas, 1 if groups is None else groups, nodes
    )
    goal = None
    if not place_only:
        if model_config is None:
            raise ValueError(
                "a decision needs the model's sizes: give --model-config, or --place-only for a "
                "placement alone."
            )
        shares = _share("--max-mass-loss", max_mass_loss), _share("--min-gain", min_gain)
        goal = goal_of(model_config, hardware, places, precision, link, pool, *shares)

    def read(name: str) -> Trace:
        return read_trace(
            name, experts=experts, k=k, layers=layers, model_config=model_config,
            world_size=world_size, physical=physical,
        )  # fmt: skip

    source, other = read(trace), None if judge is None else read(judge)
    if goal is None:
        result = _place(source, places, other, batch_tokens, out, maps, layers,
                        model_config, precision)  # fmt: skip
    else:
        result = _decide(source, goal, other, batch_tokens, out, maps, layers)
    emit(result, json, _show_placement if place_only else _show)


def goal_of(
    config: Path,
    hardware: str | None,
    places: Wanted,
    precision: str | None = None,
    link: float | None = None,
    pool: str = "batch",
    max_mass_loss: float = 0.01,
    min_gain: float = 0.05,
) -> Goal:
    """Return what a plan is to reach, from options.

    Raises:
        ValueError: if the config, the hardware or a number is none that can be used.
    """
    from paceline.analysis.cost import layer_shape
    from paceline.analysis.hardware import hardware_of, linked
    from paceline.analysis.plan_goal import Goal

    if link is not None and not link > 0:
        raise ValueError(f"--link must be above 0, got {link}.")
    device = linked(hardware_of(hardware or "h100"), None if link is None else link * 1e9, None)
    shape = layer_shape(config, precision or device.precision or None)
    return Goal(places, shape, device, max_mass_loss, min_gain, pool)


def _share(name: str, text: str) -> float:
    """Read a share, written as 0.01 or 1%."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ValueError(f"{name} must be a share like 0.01 or 1%, got {text}.") from None
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be from 0 to below 1 (100%), got {text}.")
    return value


# -- the decision ----------------------------------------------------------------------------------


def _decide(
    trace: Trace,
    goal: Goal,
    judge: Trace | None,
    batch_tokens: int | None,
    out: Path | None,
    maps: Path | None,
    hidden_layers: int | None,
) -> dict[str, Any]:
    from paceline.analysis.expert_map import ExpertMap
    from paceline.analysis.expert_map_files import write_maps
    from paceline.analysis.planner import make_plan
    from paceline.placement import ExpertPlacement

    with progress() as tell:
        found, result = make_plan(trace, goal, judge, batch_tokens, tell)
    if out is not None:
        found.save(out)
    result["plan"] = None if out is None else str(out)
    if maps is not None:
        placed = []
        for index, layer in enumerate(trace.header.layers):
            own = found.placement_of(index)
            assert own is not None  # a decision is for devices
            if not isinstance(own, ExpertPlacement):
                own = ExpertPlacement.contiguous(layer.experts, own)
            placed.append(ExpertMap.of_placement(own))
        names = [layer.name for layer in trace.header.layers]
        result["maps"] = [str(path) for path in write_maps(placed, names, hidden_layers, maps)]
    return result


def _show(result: Mapping[str, Any]) -> None:
    out = console()
    for name, title in (
        ("second_half", f"{result['trace']}, second half"),
        ("other_trace", (result["other_trace"] or {}).get("trace", "")),
    ):
        part = result[name]
        if part is not None:
            out.print(_ways(part, f"{title}, on {result['hardware']} x {result['devices']}"))
            out.print(_frontier(part))
            if part["active"]:
                out.print(_active(part))
    if result["variants"]:
        out.print(_variants(result))
    print_lines(f"Note: {note}" for note in result["notes"])
    out.print(f"Decision: {result['decision']}", style="bold")
    print_lines(
        (f"- {line}" for line in result["verdict"]), [result["plan"], *result.get("maps", [])]
    )


_LOSSES = ("gain", "dropped", "mass lost")


def _losses(point: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the cells under gain, dropped and mass lost."""
    mass = point["gate_mass_lost"]
    return (
        f"{point['gain']:+.1%}",
        f"{point['dropped_share']:.2%}",
        "-" if mass is None else f"{mass:.2%}",
    )


def _ways(part: Mapping[str, Any], title: str) -> Table:
    """Return the four ways, one per row."""
    shown = table(title, "way", "us per step", *_LOSSES, "MB sent", "MB received")
    for name, way in part["ways"].items():
        shown.add_row(
            name,
            f"{way['microseconds']:.0f}",
            *_losses(way),
            f"{way['bytes_sent'] / 1e6:.1f}",
            f"{way['receive_buffer_bytes'] / 1e6:.1f}",
        )
    return shown


def _where(point: Mapping[str, Any]) -> str:
    return "placed" if point["placement"] == "placed" else "in order"


def _frontier(part: Mapping[str, Any]) -> Table:
    """Return gains against what is lost."""
    shown = table("Caps by the gate mass they may lose", "placement", "budget", *_LOSSES)
    for point in part["frontier"]:
        shown.add_row(_where(point), f"{point['budget']:.2%}", *_losses(point))
    return shown


def _active(part: Mapping[str, Any]) -> Table:
    """Return the gains of capping active experts."""
    shown = table(
        "max_active: experts that a device reads, where batches are small (decode)",
        "placement", "max_active", "reads", *_LOSSES,
    )  # fmt: skip
    for point in part["active"]:
        reads = f"{point['most_active_experts']:.2f}"
        shown.add_row(_where(point), str(point["max_active"]), reads, *_losses(point))
    return shown


def _variants(result: Mapping[str, Any]) -> Table:
    """Return the gains of other settings of the chosen caps."""
    shown = table("Place and cap, with another setting", "setting", *_LOSSES)
    for point in result["variants"]:
        shown.add_row(point["change"], *_losses(point))
    return shown


# -- a placement alone -----------------------------------------------------------------------------

_NAMES = {
    "in_order": "experts in order",
    "heaviest_first": "heaviest first",
    "eplb": "EPLB, no replicas",
    "search": "Paceline",
    "eplb_replicas": "EPLB, with replicas",
    "search_replicas": "Paceline, with replicas",
}


def _place(
    trace: Trace,
    places: Wanted,
    judge: Trace | None,
    batch_tokens: int | None,
    out: Path | None,
    maps: Path | None,
    hidden_layers: int | None,
    config: Path | None,
    precision: str | None,
) -> dict[str, Any]:
    from paceline.analysis.cost import layer_shape
    from paceline.analysis.expert_map_files import write_maps
    from paceline.analysis.hardware import BYTES
    from paceline.analysis.placing import place
    from paceline.analysis.plan_judge import layer_plan

    with progress() as tell:
        found, result = place(trace, places, judge, batch_tokens, tell)
    result["replica_gb_a_device"] = None
    if places.replicas and config is not None:
        from paceline.analysis.expert_map import replica_bytes

        shape = layer_shape(config, precision)
        cost = replica_bytes(found, shape.hidden, shape.expert_size, BYTES[shape.precision])
        result["replica_gb_a_device"] = cost / 1e9
    result["plan"] = None if out is None else str(out)
    if out is not None:
        layer_plan(trace, found, []).save(out)
    names = [layer.name for layer in trace.header.layers]
    written = [] if maps is None else write_maps(found, names, hidden_layers, maps)
    result["maps"] = [str(path) for path in written]
    return result | {"slots": [list(m.slots) for m in found]}


def _show_placement(result: Mapping[str, Any]) -> None:
    from paceline.text import times

    parts = {
        name: result[key]
        for name, key in (
            ("same batches", "same_batches"),
            ("second half", "second_half"),
            ("other trace", "other_trace"),
        )
        if result[key] is not None
    }
    shown = table(
        f"Busiest of {result['devices']} devices x mean, over batches, mean over layers",
        "placement", *parts,
    )  # fmt: skip
    for way, name in _NAMES.items():
        if way in result["same_batches"]["ways"]:
            cells = [part["ways"][way]["device_peak_to_mean"] for part in parts.values()]
            shown.add_row(name, *map(times, cells))
    console().print(shown)
    lines = [*(f"Note: {note}" for note in result["notes"]), *result["verdict"]]
    if result["replica_gb_a_device"] is not None:
        lines.append(f"Replicas take {result['replica_gb_a_device']:.2f} GB per device.")
    elif result["replicas"]:
        lines.append("--model-config tells how much of a device's memory replicas take.")
    print_lines(lines, [result["plan"], *result["maps"]])
