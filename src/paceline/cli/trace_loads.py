"""`paceline loads` on a trace: its balance, policies and plans tried on it, and its page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from paceline.cli.output import (
    command_line,
    emit,
    print_end,
    print_lines,
    print_table,
    print_verdict,
    progress,
    run_facts,
    writing,
)
from paceline.cli.sources import DEVICES, placements_of, read_trace, with_devices

if TYPE_CHECKING:
    from paceline.analysis.results import PlanResult
    from paceline.plan import Plan
    from paceline.traces import Trace
    from paceline.traces.results import Simulation, TraceLoads

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
    from paceline.traces.trace import repeats, without

    chosen: Any = rows
    return without(trace, chosen, repeats(trace))


# -- balance ---------------------------------------------------------------------------------------


def balance(trace: Trace, plan: Plan, batch_tokens: int | None, as_json: bool) -> None:
    """Print how uneven the loads of a trace are.

    Raises:
        ValueError: if the plan doesn't fit the trace, or counts would have to be cut.
    """
    from paceline.analysis.placing import plan_maps
    from paceline.analysis.verdict import trace_verdict
    from paceline.traces.loads import trace_loads

    layers = trace.header.layers
    plan.check_model([layer.experts for layer in layers], [layer.k or 1 for layer in layers])
    placements = [own.placement for own in plan_maps(with_devices(plan), trace)]
    with progress() as tell:
        found = trace_loads(trace, placements, batch_tokens, tell)
    verdict = trace_verdict(found)
    emit(
        found,
        as_json,
        lambda result: _show_balance(result, verdict),
        verdict=verdict,
        command=command_line(),
    )


def _show_balance(result: TraceLoads, verdict: list[str]) -> None:
    from paceline.text import percent, times

    def factor(value: float | None) -> str:
        return "-" if value is None else times(value)

    print_verdict(verdict)
    print_table(
        "Busiest device by rows / mean, over batches",
        ("layer", "mean", "p95", "max", "waits", "pooled", "expert", "active"),
        [
            (
                layer.name,
                *map(factor, (device.mean, device.p95, device.max)),
                percent(layer.straggler_loss),
                factor(layer.pooled_device_peak_to_mean),
                factor(layer.expert_peak_to_mean.mean),
                f"{layer.active_experts.mean:.1f}/{layer.experts}" if layer.active_experts else "-",
            )
            for layer, device in ((each, each.device_peak_to_mean) for each in result.layers)
        ],
        fold=True,
    )
    most = result.overall.most_active_experts
    tokens = "" if result.tokens is None else f"{result.tokens:,} tokens, "
    lines = [
        f"{count_of(result.batches, result.batches_are, result.batch_tokens)}, {tokens}"
        f"{result.devices} devices. Mean: weighted by time. Pooled: all batches as one. Expert: "
        "busiest expert / mean. Active: experts with a row, mean over batches"
        + ("." if most is None else f"; the device with the most has {most:.1f}.")
    ]
    if len(result.groups) > 1:
        for group in result.groups:
            count = "" if group.tokens is None else f", {group.tokens:,} tokens"
            lines.append(
                f"{group.phase}, {group.modality}{count}: busiest device by these rows alone "
                f"{factor(group.device_peak_to_mean)} the mean"
            )
    print_lines([*lines, *(f"Note: {note}." for note in result.notes)])
    print_end([], [["plan", result.trace, "--place-only", "--devices", str(result.devices)]])


def count_of(batches: int, unit: str, batch_tokens: int | None = None) -> str:
    """Say how many batches there are, and what a batch is.

    >>> count_of(2, "request"), count_of(1, "forward", 1024)
    ('2 batches (requests)', '1 batch of 1,024 tokens')
    """
    many = "batch" if batches == 1 else "batches"
    if batch_tokens is not None:
        return f"{batches:,} {many} of {batch_tokens:,} tokens"
    return f"{batches:,} {many} ({unit}{'' if batches == 1 else 's'})"


# -- policies, plans and placements ----------------------------------------------------------------


def cases(
    policies: Sequence[str], plans: Sequence[Path], placements: Sequence[Path], devices: int | None
) -> dict[str, Plan]:
    """Return everything to compare by name; the first, without a cap, is the reference.

    Every policy is tried on every placement. A plan without placements is tried on the first. Where
    only plans name devices, the reference has those of the first, experts in order.

    Raises:
        ValueError: if a file can't be read, or options contradict each other.
    """
    from paceline.plan import Plan
    from paceline.policy import CapacityPolicy

    if placements and devices is not None:
        raise ValueError("--placement and --devices both place the experts: give one of them.")
    places = {str(path): placements_of(path).placements for path in placements}
    read = {str(file): Plan.load(file) for file in plans}
    if not places:
        placed = next((own for own in read.values() if own.placements), None)
        named = (DEVICES,) if placed is None else _devices(placed)
        places = {"": named if devices is None else (devices,)}
    caps = {text: (CapacityPolicy.parse(text),) for text in policies}
    found = {}
    for where, placement in places.items():
        for name, cap in {NO_CAP: (), **caps}.items():
            found[f"{name}, {where}" if len(places) > 1 else name] = Plan(cap, placement)
    first = next(iter(places.values()))
    for name, plan in read.items():
        found[name] = plan if plan.placements else Plan(plan.policies, first)
    return found


def _devices(plan: Plan) -> tuple[int, ...]:
    """Return the number of devices of a plan's placements: one, or one per layer."""
    counts = tuple(own if isinstance(own, int) else own.num_devices for own in plan.placements)
    return counts[:1] if len(set(counts)) == 1 else counts


def compare(
    trace: Trace,
    plans: Mapping[str, Plan],
    batch_tokens: int | None,
    without: str | None,
    as_json: bool,
) -> None:
    """Print what every plan drops and gains on the batches of a trace.

    Raises:
        ValueError: if the trace has counts alone, a plan doesn't fit it, or plans are for different
            numbers of devices.
    """
    from paceline.traces.simulate import simulate

    if batch_tokens is not None:
        trace = trace.regrouped(batch_tokens)
    with progress() as tell:
        found = simulate(trace, plans, progress=tell)
    emit(
        found,
        as_json,
        lambda result: _show_comparison(result, batch_tokens, _devices(plans[result.reference])),
        batch_tokens=batch_tokens,
        without=without,
    )


def _show_comparison(
    result: Simulation, batch_tokens: int | None, devices: tuple[int, ...]
) -> None:
    from paceline.text import percent, times

    plans = {name: plan.overall for name, plan in result.plans.items()}
    where = f", on {devices[0]} devices" if len(devices) == 1 else ""
    print_table(
        f"All layers and batches of the trace, one after the other{where}",
        ("plan", "busiest device", "p95", "gain", "dropped", "gate mass lost", "active"),
        [
            (
                name,
                *("-" if peak is None else times(peak) for peak in (peaks.mean, peaks.p95)),
                times(plan.gain),
                percent(plan.dropped_share),
                "unknown" if plan.gate_mass_lost is None else percent(plan.gate_mass_lost),
                f"{plan.most_active_experts:.2f}",
            )
            for name, plan in plans.items()
            for peaks in [plan.device_peak_to_mean]
        ],
        fold=True,
    )
    lines = [
        f"{count_of(result.batches, result.batches_are, batch_tokens)}. Busiest device: rows / "
        "mean before any cap, weighted by time; p95 over batches and layers. Gain: over "
        f"{result.reference} on the same devices, from the loads of the expert part, no timing. "
        "Active: experts with a row on the device with the most of "
        "them, whose weights it reads."
    ]
    idle = {name: plan.capped_nothing for name, plan in result.plans.items()}
    lines += [f"{name}: {why}" for name, why in idle.items() if why is not None]
    if any(plan.batches_below_min_expert_load for plan in plans.values()):
        lines.append(
            "Some batches are below min_expert_load. capacity_factor caps nothing there (unless a "
            "policy says min_expert_load=0), while max_active does: such batches wait for weights, "
            "so what max_active gains is the ratio of Active, not Gain."
        )
    print_lines([*lines, *(f"Note: {note}." for note in result.notes)])


# -- the page --------------------------------------------------------------------------------------


def study(
    source: str,
    planned: PlanResult | None,
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

    The parameters are the options of `paceline loads`; `planned` is the content of the source where
    that is the JSON of `paceline plan`, and `facts` are the options that describe a trace's file.

    Raises:
        ValueError: if options contradict each other or don't fit the trace.
    """
    from paceline.analysis.cap_study import cap_study
    from paceline.analysis.placing import PlacementSpec
    from paceline.analysis.planner import make_plan
    from paceline.cli.plan import goal_of
    from paceline.evaluation.sweep_results import read_sweep
    from paceline.model_config import read_model_config

    config: Path | None = facts["model_config"]
    if hardware is not None and config is None:
        raise ValueError("--hardware needs --model-config: a decision needs the model's sizes.")
    if planned is not None:
        if devices not in (None, planned.devices) or hardware is not None:
            raise ValueError(f"{source} says devices and hardware already: leave them out.")
        source, devices = planned.trace, planned.devices
        batch_tokens = planned.batch_tokens if batch_tokens is None else batch_tokens
        if judge is None and planned.other_trace is not None:
            judge = planned.other_trace.trace
    elif plan is not None and plan.placements and devices is not None:
        raise ValueError("--devices and the plan both place the experts: give one of them.")
    swept = None if sweep is None else read_sweep(sweep).to_dict()
    trace = without_rows(read_trace(source, **facts), without)
    other = None if judge is None else read_trace(judge, **facts)
    with progress() as tell:
        found = cap_study(trace, devices or DEVICES, batch_tokens, plan, tell, other)
        if hardware is not None and config is not None:
            spec = PlacementSpec(found.devices, groups=read_model_config(config).expert_groups)
            goal = goal_of(config, hardware, spec)
            made, planned = make_plan(trace, goal, other, batch_tokens, tell)
            plan = made if plan is None else plan
    more: dict[str, Any] = {
        "planned": planned and planned.to_dict(),
        "sweep": swept,
        "plan_text": None if plan is None else plan.to_toml(),
        **_linked(plan_file or (planned and planned.plan), html),
        **run_facts(),
    }
    written: list[Path] = []
    lines = [*found.verdict, *(planned.verdict if planned else [])]
    with writing() as write:
        if html is not None:
            from paceline.reporting.pages import report_page, write_page

            page = report_page(found, planned, more)
            if write("html", html, lambda: write_page(page, html)):
                written.append(html)
        if figures is not None:
            from paceline.reporting.trace_figures import write_figures

            write(
                "figures", figures,
                lambda: written.extend(write_figures(found, figures, planned=planned)),
            )  # fmt: skip
        emit(found, as_json, lambda _: _show_study(lines, written), **more)


def _show_study(lines: list[str], written: list[Path]) -> None:
    print_verdict(lines)
    print_end(written)


def read_planned(source: str) -> PlanResult | None:
    """Read the JSON of `paceline plan --json`; None if the source is something else.

    Raises:
        ValueError: if the file is cut off, or is a plan file, which names no trace.
    """
    from paceline.analysis.planner import SCHEMA, read_plan_result

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
    return read_plan_result(path.read_bytes(), source)


def _linked(plan: Any, page: Path | None) -> dict[str, str | None]:
    """Return the plan file, and the link to it from the page."""
    if not isinstance(plan, (str, Path)):
        return {"plan_file": None, "plan_link": None}
    folder = Path() if page is None else page.absolute().parent
    link = Path(os.path.relpath(Path(plan).absolute(), folder)).as_posix()
    return {"plan_file": str(plan), "plan_link": quote(link)}
