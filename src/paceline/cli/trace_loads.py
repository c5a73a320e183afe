"""`paceline loads` on a trace: its balance, policies and plans tried on it, and its page."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from paceline.cli.output import (
    check_writable,
    command_line,
    console,
    emit,
    print_lines,
    progress,
    run_facts,
    table,
)
from paceline.cli.sources import DEVICES, placements_of, read_trace

if TYPE_CHECKING:
    from paceline.plan import Plan
    from paceline.traces import Trace

NO_CAP = "no cap"
_MAX_BYTES = 1 << 26


def without_rows(trace: Trace, rows: str | None) -> Trace:
    """Return a trace without its commonest row, or without repeats of earlier rows.

    Raises:
        ValueError: if `rows` is neither commonest nor repeats, or the trace has counts alone.
    """
    if rows is None:
        return trace
    if rows not in ("commonest", "repeats"):
        raise ValueError(f"--without must be commonest or repeats, got {rows}.")
    from paceline.traces.rows import repeats, without

    chosen: Any = rows
    return without(trace, chosen, repeats(trace))


# -- balance ---------------------------------------------------------------------------------------


def balance(trace: Trace, plan: Plan, batch_tokens: int | None, as_json: bool) -> None:
    """Print how uneven the loads of a trace are.

    Args:
        trace: any.
        plan: where experts are; on 8 devices in order unless it says so.
        batch_tokens: tokens per batch; None: as the trace has them.
        as_json: print JSON, and nothing else.

    Raises:
        ValueError: if the plan doesn't fit the trace, or counts would have to be cut.
    """
    from paceline.analysis.verdict import trace_verdict
    from paceline.settings import read_placement
    from paceline.traces.loads import trace_loads

    layers = trace.header.layers
    plan.check_model([layer.experts for layer in layers], [layer.k or 1 for layer in layers])
    placements = []
    for index, layer in enumerate(layers):
        chosen = plan.placement_of(index)
        placed = read_placement(DEVICES if chosen is None else chosen, layer.experts, layer.name)
        if placed is not None:
            placements.append(placed)
    with progress() as tell:
        result = trace_loads(trace, placements, batch_tokens, tell)
    result |= {"verdict": trace_verdict(result), "command": command_line()}
    emit(result, as_json, _show_balance)


def _show_balance(result: Mapping[str, Any]) -> None:
    from paceline.text import percent, times

    def factor(value: float | None) -> str:
        return "-" if value is None else times(value)

    shown = table(
        "Busiest device by rows / mean, over batches", "layer",
        "mean", "p95", "max", "waits", "pooled", "expert", "active", fold=True,
    )  # fmt: skip
    for layer in result["layers"]:
        device, active = layer["device_peak_to_mean"], layer.get("active_experts")
        shown.add_row(
            layer["name"],
            *(factor(device[name]) for name in ("mean", "p95", "max")),
            percent(layer["straggler_loss"]),
            factor(layer["pooled_device_peak_to_mean"]),
            factor(layer["expert_peak_to_mean"]["mean"]),
            "-" if active is None else f"{active['mean']:.1f}/{layer['experts']}",
        )
    console().print(shown)
    most = result["overall"].get("most_active_experts")
    tokens = "" if result["tokens"] is None else f"{result['tokens']:,} tokens, "
    lines = [
        f"{batches(result)}, {tokens}{result['devices']} devices. Mean: weighted by time. "
        "Pooled: all batches as one. Expert: busiest expert / mean. Active: experts with a row, "
        "mean over batches"
        + ("." if most is None else f"; the device with the most has {most:.1f}.")
    ]
    if len(result["groups"]) > 1:
        for group in result["groups"]:
            count = "" if group["tokens"] is None else f", {group['tokens']:,} tokens"
            lines.append(
                f"{group['phase']}, {group['modality']}{count}: busiest device by these rows alone "
                f"{factor(group['device_peak_to_mean'])} the mean"
            )
    print_lines([*lines, *result["verdict"], *(f"Note: {note}." for note in result["notes"])])


def batches(result: Mapping[str, Any]) -> str:
    """Return how many batches a result is over, and what a batch is."""
    count, unit = result["batches"], result["batches_are"]
    many = "batch" if count == 1 else "batches"
    if result["batch_tokens"] is not None:
        return f"{count:,} {many} of {result['batch_tokens']:,} tokens"
    return f"{count:,} {many} ({unit}{'' if count == 1 else 's'})"


# -- policies, plans and placements ----------------------------------------------------------------


def cases(
    policies: Sequence[str], plans: Sequence[Path], placements: Sequence[Path], devices: int | None
) -> dict[str, Plan]:
    """Return everything to compare by name; the first, without a cap, is the reference.

    Every policy is tried on every placement. A plan without placements is tried on the first.

    Raises:
        ValueError: if a file can't be read, or options contradict each other.
    """
    from paceline.plan import Plan
    from paceline.policy import CapacityPolicy

    if placements and devices is not None:
        raise ValueError("--placement and --devices both place the experts: give one of them.")
    places = {str(path): placements_of(path).placements for path in placements}
    places = places or {"": (devices or DEVICES,)}
    caps = {text: (CapacityPolicy.parse(text),) for text in policies}
    found = {}
    for where, placement in places.items():
        for name, cap in {NO_CAP: (), **caps}.items():
            found[f"{name}, {where}" if len(places) > 1 else name] = Plan(cap, placement)
    for file in plans:
        read = Plan.load(file)
        found[str(file)] = (
            read if read.placements else Plan(read.policies, next(iter(places.values())))
        )
    return found


def compare(
    trace: Trace,
    plans: Mapping[str, Plan],
    batch_tokens: int | None,
    without: str | None,
    as_json: bool,
) -> None:
    """Print what every plan drops and gains on the batches of a trace.

    Raises:
        ValueError: if the trace has counts alone, or a plan doesn't fit it.
    """
    from paceline.traces.simulate import simulate

    if batch_tokens is not None:
        trace = trace.regrouped(batch_tokens)
    with progress() as tell:
        result = simulate(trace, plans, progress=tell)
    result |= {"batch_tokens": batch_tokens, "without": without}
    emit(result, as_json, _show_comparison)


def _show_comparison(result: Mapping[str, Any]) -> None:
    from paceline.text import percent, times

    shown = table(
        "All layers and batches of the trace, one after the other", "plan",
        "busiest device", "p95", "gain", "dropped", "gate mass lost", "active", fold=True,
    )  # fmt: skip
    too_small = False
    for name, of_plan in result["plans"].items():
        overall = of_plan["overall"]
        peak, lost = overall["device_peak_to_mean"], overall["gate_mass_lost"]
        too_small |= overall["batches_below_min_expert_load"] > 0
        shown.add_row(
            name,
            times(peak["mean"]) if peak["mean"] is not None else "-",
            times(peak["p95"]) if peak["p95"] is not None else "-",
            times(overall["gain"]),
            percent(overall["dropped_share"]),
            "unknown" if lost is None else percent(lost),
            f"{overall['most_active_experts']:.2f}",
        )
    console().print(shown)
    lines = [
        f"{batches(result)}. Busiest device: rows / mean before any cap, weighted by time; p95 "
        "over batches and layers. Gain: from the loads of the expert part, no timing. Active: "
        "experts with a row on the device with the most of them, whose weights it reads."
    ]
    if too_small:
        lines.append(
            "Some batches are below min_expert_load. capacity_factor caps nothing there (unless a "
            "policy says min_expert_load=0), while max_active does: such batches wait for weights, "
            "so what max_active gains is the ratio of Active, not Gain."
        )
    print_lines([*lines, *(f"Note: {note}." for note in result["notes"])])


# -- the page --------------------------------------------------------------------------------------


def study(
    source: str,
    planned: dict[str, Any] | None,
    facts: Mapping[str, Any],
    judge: str | None,
    without: str | None,
    *,
    devices: int | None,
    batch_tokens: int | None,
    plan: Plan | None,
    plan_file: Path | None,
    hardware: str | None,
    sweep: Path | None,
    html: Path | None,
    figures: Path | None,
    as_json: bool,
) -> None:
    """Print the verdict on a trace, and write its page: loads, every cap, a placement.

    Args:
        source: a trace, or the JSON of `paceline plan`.
        planned: what that JSON says, where the source is one.
        facts: of traces, what their files don't say.
        judge: another trace, to judge on.
        without: rows to leave out of the source.
        devices: that share the experts; None: 8, or as placed.
        batch_tokens: tokens per batch.
        plan: to show beside the caps.
        plan_file: where it was read from.
        hardware: to decide as `paceline plan` does.
        sweep: what caps cost in quality.
        html: page to write.
        figures: folder for its figures.
        as_json: print JSON, and nothing else.

    Raises:
        ValueError: if options contradict each other or don't fit the trace.
    """
    from paceline.analysis.cap_study import cap_study
    from paceline.analysis.placing import Wanted
    from paceline.analysis.planner import make_plan
    from paceline.cli.plan import goal_of
    from paceline.evaluation.sweep_file import read_sweep
    from paceline.model_config import read_model_config

    config: Path | None = facts["model_config"]
    if hardware is not None and config is None:
        raise ValueError("--hardware needs --model-config: a decision needs the model's sizes.")
    check_writable(figures if figures is None or not figures.is_dir() else None)
    if planned is not None:
        if devices not in (None, planned["devices"]) or hardware is not None:
            raise ValueError(f"{source} says devices and hardware already: leave them out.")
        source, devices = planned["trace"], planned["devices"]
        batch_tokens = planned["batch_tokens"] if batch_tokens is None else batch_tokens
        if judge is None and planned["other_trace"] is not None:
            judge = planned["other_trace"]["trace"]
    elif plan is not None and plan.placements and devices is not None:
        raise ValueError("--devices and the plan both place the experts: give one of them.")
    swept = None if sweep is None else read_sweep(sweep)
    trace = without_rows(read_trace(source, **facts), without)
    other = None if judge is None else read_trace(judge, **facts)
    with progress() as tell:
        result = cap_study(trace, devices or DEVICES, batch_tokens, plan, tell, other)
        if hardware is not None and config is not None:
            places = Wanted(result["devices"], groups=read_model_config(config).expert_groups)
            goal = goal_of(config, hardware, places)
            made, planned = make_plan(trace, goal, other, batch_tokens, tell)
            plan = made if plan is None else plan
    result |= {
        "planned": planned,
        "sweep": swept,
        "plan_text": None if plan is None else plan.to_toml(),
        **_linked(plan_file or (planned or {}).get("plan"), html),
        **run_facts(),
    }
    written = []
    if html is not None:
        from paceline.reporting.pages import report_page, write_page

        write_page(report_page(result), html)
        written.append(html)
    if figures is not None:
        from paceline.reporting.trace_figures import write_figures

        written += write_figures(result, figures)
    lines = [*result["verdict"], *(planned["verdict"] if planned else [])]
    emit(result, as_json, lambda _: print_lines(lines, written))


def read_planned(source: str) -> dict[str, Any] | None:
    """Read what `paceline plan --json` printed; None if the source is something else.

    Raises:
        ValueError: if the file is cut off, or is a plan file, which names no trace.
    """
    from paceline.analysis.planner import SCHEMA

    path = Path(source)
    if path.suffix == ".toml" and path.is_file():
        raise ValueError(
            f"{source} is a plan file, which names no trace: say paceline loads TRACE --plan "
            f"{source}."
        )
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return None
    with path.open("rb") as file:
        if f'"schema": "{SCHEMA}"'.encode() not in file.read(4096):
            return None
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError(f"{source} is a plan's JSON that is cut off or broken.") from None
    _check(source, found)
    result: dict[str, Any] = found
    return result


def _check(source: str, found: Mapping[str, Any]) -> None:
    """Check that a plan's JSON has what the page shows."""
    kinds: dict[str, Any] = {
        "trace": str, "devices": int, "decision": str, "verdict": list, "hardware": str,
        "precision": str, "second_half": dict, "other_trace": dict | None,
        "batch_tokens": int | None,
    }  # fmt: skip
    for name, kind in kinds.items():
        if name not in found or not isinstance(found[name], kind):
            raise ValueError(f"{source} has no proper {name}: write it with paceline plan --json.")
    if not found["verdict"] or not all(isinstance(line, str) for line in found["verdict"]):
        raise ValueError(f"{source} has no proper verdict: write it with paceline plan --json.")
    for part in (found["second_half"], found["other_trace"]):
        if part is None:
            continue
        points = part.get("frontier")
        proper = isinstance(points, list) and all(map(_is_point, points))
        if not proper or not isinstance(part.get("trace", ""), str):
            raise ValueError(
                f"{source} has no proper frontier: write it with paceline plan --json."
            )


def _is_point(point: Any) -> bool:
    """Return True for a point of a planner's frontier."""
    if not isinstance(point, dict) or point.get("placement") not in ("in_order", "placed"):
        return False
    mass = point.get("gate_mass_lost", "none")
    numbers = [point.get(name) for name in ("budget", "gain", "dropped_share")]
    return all(isinstance(n, float | int) for n in numbers) and (
        mass is None or isinstance(mass, float | int)
    )


def _linked(plan: Any, page: Path | None) -> dict[str, str | None]:
    """Return the plan file, and the link to it from the page."""
    if not isinstance(plan, (str, Path)):
        return {"plan_file": None, "plan_link": None}
    folder = Path() if page is None else page.absolute().parent
    link = Path(os.path.relpath(Path(plan).absolute(), folder)).as_posix()
    return {"plan_file": str(plan), "plan_link": quote(link)}
