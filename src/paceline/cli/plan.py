"""`paceline plan`: from a trace to a decision, a placement and a plan file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.output import (
    check_at_least,
    check_folder,
    check_new,
    check_writable,
    emit,
    guarded,
    print_end,
    print_lines,
    print_table,
    print_verdict,
    progress,
    writing,
)
from paceline.cli.sources import DEVICES, read_trace

if TYPE_CHECKING:
    from paceline.analysis.expert_map import ExpertMap
    from paceline.analysis.placing import PlacementSpec
    from paceline.analysis.plan_goal import Goal
    from paceline.analysis.results import (
        ActivePoint,
        FrontierPoint,
        JudgedPlan,
        PlaceResult,
        PlanResult,
        StepCost,
    )
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
        str,
        typer.Option(
            metavar="<int|auto>",
            help="Slots per layer beyond one per expert; auto: the fewest with which devices have "
            "equally many.",
        ),
    ] = "0",
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
    best_of: Annotated[
        bool,
        typer.Option(
            "--best-of", help="With --place-only: write the method that is best where it is judged."
        ),
    ] = False,
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
    force: options.Force = False,
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
      paceline plan monday --judge friday --place-only --best-of --out plan.toml
    """
    from paceline.analysis.expert_map import FORMS, write_maps
    from paceline.analysis.hardware import BYTES
    from paceline.analysis.placing import PlacementSpec, layer_plan, place, plan_maps
    from paceline.analysis.planner import make_plan
    from paceline.model_config import read_model_config

    check_at_least(1, devices=devices)
    if best_of and not place_only:
        raise ValueError("--best-of needs --place-only: it chooses among placements.")
    check_writable(out=out)
    check_new(force, out=out)
    check_folder(parents=False, maps=maps)
    if maps is not None:
        for name, _ in FORMS.values():
            check_new(force, maps=maps / name)
    if precision is not None and precision not in BYTES:
        raise ValueError(f"--precision must be one of {', '.join(BYTES)}, got {precision}.")
    if model_config is not None:
        config = read_model_config(model_config)
        groups = config.expert_groups if groups is None else groups
        layers = layers or config.hidden_layers
    if not place_only and model_config is None:
        raise ValueError(
            "a decision needs the model's sizes: give --model-config, or --place-only for a "
            "placement alone."
        )
    shares = _share("--max-mass-loss", max_mass_loss), _share("--min-gain", min_gain)
    extra = None if replicas == "auto" else _count("--replicas", replicas)

    def read(name: str) -> Trace:
        return read_trace(
            name, experts=experts, k=k, layers=layers, model_config=model_config,
            world_size=world_size, physical=physical,
        )  # fmt: skip

    source, other = read(trace), None if judge is None else read(judge)
    many = DEVICES if devices is None else devices
    if extra is None:
        extra = -max(layer.experts for layer in source.header.layers) % many
    spec = PlacementSpec(many, extra, 1 if groups is None else groups, nodes)
    goal = None
    if not place_only and model_config is not None:
        goal = goal_of(model_config, hardware, spec, precision, link, pool, *shares)
    more: dict[str, Any] = {"plan": None if out is None else str(out)}
    with progress() as tell:
        if goal is None:
            found, placed = place(source, spec, other, batch_tokens, tell, best_of=best_of)
            made = layer_plan(source, found, [])
            more |= {
                "replica_gb_a_device": _replica_gb(found, model_config, precision),
                "maps": [],
                "slots": [list(own.slots) for own in found],
            }
        else:
            made, decided = make_plan(source, goal, other, batch_tokens, tell)
            found = plan_maps(made, source)

    def save_maps(folder: Path) -> None:
        names = [layer.name for layer in source.header.layers]
        more["maps"] = [str(path) for path in write_maps(found, names, layers, folder)]

    with writing() as write:
        if out is not None and not write("out", out, lambda: made.save(out)):
            more["plan"] = None
        if maps is not None:
            write("maps", maps, lambda: save_maps(maps))
        if goal is None:
            emit(placed, json, lambda result: _show_placement(result, more), **more)
        else:
            emit(decided, json, _show, **more)
        if not json:
            print_end([more["plan"], *more.get("maps", [])], _next(more["plan"], trace, place_only))


def _next(plan: str | None, trace: str, place_only: bool) -> list[list[str]]:
    """Return the commands to run after a plan was written."""
    if plan is None:
        return []
    if place_only:
        return [["loads", trace, "--plan", plan]]
    return [["loads", trace, "--plan", plan], ["serve", "MODEL", "--plan", plan]]


def _count(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{name} must be a whole number >= 0, or auto, got {text}.")
    return int(text)


def goal_of(
    config: Path,
    hardware: str | None,
    spec: PlacementSpec,
    precision: str | None = None,
    link: float | None = None,
    pool: str = "batch",
    max_mass_loss: float = 0.01,
    min_gain: float = 0.05,
) -> Goal:
    """Return the goal of a plan, from options.

    Raises:
        ValueError: if the config, the hardware or a number can't be used.
    """
    from paceline.analysis.cost import layer_shape
    from paceline.analysis.hardware import hardware_of, linked
    from paceline.analysis.plan_goal import Goal

    if link is not None and not link > 0:
        raise ValueError(f"--link must be above 0, got {link}.")
    device = linked(hardware_of(hardware or "h100"), None if link is None else link * 1e9, None)
    shape = layer_shape(config, precision or device.precision or None)
    return Goal(spec, shape, device, max_mass_loss, min_gain, pool)


def _share(name: str, text: str) -> float:
    """Read a share, written as 0.01 or 1%."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ValueError(f"{name} must be a share like 0.01 or 1%, got {text}.") from None
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be from 0 to below 1 (100%), got {text}.")
    return value


def _replica_gb(maps: list[ExpertMap], config: Path | None, precision: str | None) -> float | None:
    """Return the memory that replicas take of a device, where a model's sizes are known."""
    from paceline.analysis.cost import layer_shape
    from paceline.analysis.expert_map import replica_bytes
    from paceline.analysis.hardware import BYTES

    if config is None or not any(own.replicas for own in maps):
        return None
    shape = layer_shape(config, precision)
    return replica_bytes(maps, shape.hidden, shape.expert_size, BYTES[shape.precision]) / 1e9


# -- tables ----------------------------------------------------------------------------------------

_LOSSES = ("gain", "dropped", "mass lost")


def _losses(point: StepCost) -> tuple[str, str, str]:
    """Return the cells under gain, dropped and mass lost."""
    mass = point.gate_mass_lost
    lost = "-" if mass is None else f"{mass:.2%}"
    return f"{point.gain:+.1%}", f"{point.dropped_share:.2%}", lost


def _show(result: PlanResult) -> None:
    print_verdict([f"Decision: {result.decision}.", *result.verdict])
    _show_part(result.second_half, f"{result.trace}, second half", result)
    if result.other_trace is not None:
        _show_part(result.other_trace, result.other_trace.trace, result)
    if result.variants:
        print_table(
            "Place and cap, with another setting",
            ("setting", *_LOSSES),
            [(point.change, *_losses(point)) for point in result.variants],
        )
    print_lines([
        f"Per step through the {len(result.layers)} recorded layers. Sent: MB that a device sends, "
        "all layers. Buffer: MB that a device needs to receive the rows of one layer.",
        *(f"Note: {note}." for note in result.notes),
    ])  # fmt: skip


def _show_part(part: JudgedPlan, title: str, result: PlanResult) -> None:
    print_table(
        f"{title}, on {result.hardware} x {result.devices}",
        ("way", "us per step", *_LOSSES, "sent", "buffer"),
        [
            (name, f"{way.microseconds:.0f}", *_losses(way),
             f"{way.bytes_sent / result.devices / 1e6:.1f}",
             f"{way.receive_buffer_bytes / 1e6:.1f}")
            for name, way in part.ways.items()
        ],
    )  # fmt: skip
    print_table(
        "Caps by the gate mass they may lose",
        ("placement", "budget", *_LOSSES),
        [(_where(point), f"{point.budget:.2%}", *_losses(point)) for point in part.frontier],
    )
    if part.active:
        print_table(
            "max_active: experts that a device reads, where batches are small (decode)",
            ("placement", "max_active", "reads", *_LOSSES),
            [
                (_where(point), str(point.max_active), f"{point.most_active_experts:.2f}",
                 *_losses(point))
                for point in part.active
            ],
        )  # fmt: skip


def _where(point: FrontierPoint | ActivePoint) -> str:
    return "placed" if point.placement == "placed" else "in order"


def _show_placement(result: PlaceResult, more: Mapping[str, Any]) -> None:
    from paceline.analysis.verdict import METHODS
    from paceline.text import times

    print_verdict(result.verdict)
    judged = (result.same_batches, result.second_half, result.other_trace)
    parts = [part for part in judged if part is not None]
    names = ("same batches", "second half", "other trace")
    print_table(
        f"Busiest of {result.devices} devices x mean, over batches, mean over layers",
        ("placement", *(n for n, part in zip(names, judged, strict=True) if part is not None)),
        [
            (name, *(times(part.ways[method].device_peak_to_mean) for part in parts))
            for method, name in METHODS.items()
            if method in result.same_batches.ways
        ],
    )
    lines = [f"Note: {note}." for note in result.notes]
    if more["replica_gb_a_device"] is not None:
        lines.append(f"Replicas take {more['replica_gb_a_device']:.2f} GB per device.")
    elif result.replicas:
        lines.append("--model-config tells how much of a device's memory replicas take.")
    print_lines(lines)
