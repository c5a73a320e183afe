"""`paceline simulate`: what policies and placements would do on recorded traffic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import trace_options as options
from paceline.cli.errors import guarded
from paceline.cli.model_options import AsJson

if TYPE_CHECKING:
    from paceline.plan import Plan

NO_CAP = "no cap"


@guarded
def simulate(
    trace: options.TraceName,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="To try, like capacity_factor=1.25; may be repeated."),
    ] = None,
    plan: Annotated[
        list[Path] | None,
        typer.Option(help="Plan file (TOML) to try: policies and placements; may be repeated."),
    ] = None,
    devices: Annotated[int, typer.Option(help="Devices that share the experts in order.")] = 8,
    batch_tokens: options.BatchTokens = None,
    without: Annotated[
        str | None,
        typer.Option(
            help="Leave out rows: commonest (dummy rows?), or repeats (all but the first)."
        ),
    ] = None,
    experts: options.Experts = None,
    k: options.K = None,
    layers: options.Layers = None,
    model_config: options.ModelConfig = None,
    physical: options.Physical = False,
    json: AsJson = False,
) -> None:
    """Route every batch of a trace under every policy and plan: what is dropped, what it gains.

    The same router as an attached model's, on the same batches. Gains are bounds from the loads of
    the experts' part: nothing is timed, and what a drop does to quality a trace can't tell. The
    first row, experts in order and no cap, is what gains refer to.

    \b
    Examples:
      paceline simulate sample:esft_v2lite_law --batch-tokens 1024 --policy capacity_factor=1.0
      paceline simulate trace --policy capacity_factor=1.25 --policy capacity_factor=2,unit=expert
      paceline simulate decode_trace --policy max_active=3,min_expert_load=64
      paceline simulate trace --plan plan.toml --json
    """
    from paceline.cli.progress import progress
    from paceline.traces.simulate import simulate as run

    if devices < 1:
        raise ValueError(f"--devices {devices} is not allowed: it is at least 1.")
    plans = _plans(policy or [], plan or [], devices)
    found = options.read_trace(
        trace, experts=experts, k=k, layers=layers, model_config=model_config, physical=physical
    )
    found = _without(found, without)
    if batch_tokens is not None:
        found = found.regrouped(batch_tokens)
    with progress() as tell:
        result = run(found, plans, progress=tell)
    result |= {"batch_tokens": batch_tokens, "without": without}
    if json:
        from paceline.files import to_json

        typer.echo(to_json(result), nl=False)
    else:
        _show(result)


def _plans(policies: list[str], files: list[Path], devices: int) -> dict[str, Plan]:
    """Everything to try by name, no cap first."""
    from paceline.plan import Plan
    from paceline.policy import CapacityPolicy

    plans = {NO_CAP: Plan(placements=(devices,))}
    for text in policies:
        plans[text] = Plan((CapacityPolicy.parse(text),), (devices,))
    for file in files:
        read = Plan.load(file)
        plans[str(file)] = read if read.placements else Plan(read.policies, (devices,))
    return plans


def _without(trace: Any, which: str | None) -> Any:
    from paceline.traces.rows import repeats, without

    if which is None:
        return trace
    if which not in ("commonest", "repeats"):
        raise ValueError(f"--without {which} is not allowed: it is commonest or repeats.")
    chosen: Any = which
    return without(trace, chosen, repeats(trace))


def _show(result: Mapping[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from paceline.text import percent, times

    table = Table(
        title="All layers and batches of the trace, one after the other", title_justify="left",
        box=box.SIMPLE, pad_edge=False, collapse_padding=True,
    )  # fmt: skip
    table.add_column("plan", overflow="fold")
    for name in ("busiest device", "p95", "gain", "dropped", "gate mass lost", "active"):
        table.add_column(name, justify="right")
    too_small = False
    for name, of_plan in result["plans"].items():
        overall = of_plan["overall"]
        peak, lost = overall["device_peak_to_mean"], overall["gate_mass_lost"]
        too_small |= overall["batches_below_min_expert_load"] > 0
        table.add_row(
            name,
            times(peak["mean"]) if peak["mean"] is not None else "-",
            times(peak["p95"]) if peak["p95"] is not None else "-",
            times(overall["gain"]),
            percent(overall["dropped_share"]),
            "unknown" if lost is None else percent(lost),
            f"{overall['most_active_experts']:.2f}",
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{options.batches_said(result)}. Busiest device: rows / mean "
        "before any cap, weighted by time; p95 over batches and layers. Gain: from the loads of "
        "the experts' part, no timing. Active: experts with a row on the device with the most, "
        "whose weights it reads.",
        markup=False,
    )
    if too_small:
        console.print(
            "Some batches are below min_expert_load, where capacity_factor caps nothing (unless a "
            "policy says min_expert_load=0) and max_active does: they wait for weights, so what it "
            "gains there is the ratio of Active, not Gain.",
            markup=False,
        )
    for note in result["notes"]:
        console.print(f"Note: {note}.", markup=False)
