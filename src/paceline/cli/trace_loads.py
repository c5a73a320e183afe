"""`paceline loads TRACE`: the balance of recorded traffic, every figure with its axes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.trace_options import batches_said

if TYPE_CHECKING:
    from paceline.plan import Plan
    from paceline.traces import Trace

_TELLING = 0.05  # a share of repeated rows that is worth a line
_MANY = 8  # devices, where nobody says


def loads_of_trace(trace: Trace, plan: Plan, batch_tokens: int | None, json: bool) -> None:
    """Print the loads of a trace.

    Args:
        trace: any.
        plan: where experts are; 8 devices in order where it doesn't say.
        batch_tokens: tokens a batch; None: as the trace has them.
        json: print JSON, and nothing else.

    Raises:
        ValueError: if the plan doesn't fit, or names a policy, or counts are to be cut.
    """
    from paceline.cli.progress import progress
    from paceline.settings import read_placement
    from paceline.traces.loads import trace_loads

    if plan.policies:
        raise ValueError("a policy is tried on a trace with `paceline simulate TRACE --policy ...`")
    layers = trace.header.layers
    plan.check_model([layer.experts for layer in layers], [layer.k or 1 for layer in layers])
    placements = []
    for index, layer in enumerate(layers):
        given = plan.placement_of(index)
        placed = read_placement(_MANY if given is None else given, layer.experts, layer.name)
        if placed is not None:
            placements.append(placed)
    with progress() as tell:
        result = trace_loads(trace, placements, batch_tokens, tell)
    result |= {"verdict": verdict(result), "command": shlex.join(["paceline", *sys.argv[1:]])}
    if json:
        from paceline.files import to_json

        typer.echo(to_json(result), nl=False)
    else:
        _show(result)


def verdict(result: Mapping[str, Any]) -> list[str]:
    """Sentences for a result of `trace_loads`: the wait, the ceiling, and what to make of it."""
    from paceline.text import percent, times

    overall = result["overall"]
    lines = [
        f"An average device waits {percent(overall['straggler_loss'], 0)} of the experts' time for "
        f"the busiest of {result['devices']} (sum over batches and layers of the busiest device's "
        f"rows {times(overall['device_peak_to_mean'])} the mean); perfectly balanced, the expert "
        f"part would be at most {times(overall['perfect_balance_speedup'])} as fast.",
    ]
    if result["batches"] == 1:
        lines.append(
            "It is one batch: batches are less even than their sum, so smaller ones wait longer."
        )
    elif result["batches_are"] in ("request", "sample"):
        lines.append(
            f"A batch here is a {result['batches_are']}, which no layer computes alone: "
            "--batch-tokens cuts the tokens into batches as you run them."
        )
    return lines + _rows_said(result.get("rows"))


def _rows_said(rows: Mapping[str, Any] | None) -> list[str]:
    """What repeats, and the figure without it."""
    from paceline.text import percent, times

    if rows is None or rows["repeated_share"] < _TELLING:
        return []
    said = []
    for name, share, what in (
        ("commonest", rows["commonest_share"], "are one and the same row in every layer"),
        ("repeats", rows["repeated_share"], "repeat an earlier row in every layer"),
    ):
        without = rows.get(f"without_{name}")
        if share < _TELLING or without is None:
            continue
        peak = times(without["device_peak_to_mean"])
        said.append(
            f"{percent(share, 0)} of the tokens {what}: a dummy row of the engine, or a prompt "
            f"that requests share; without them the busiest device has {peak} the mean."
        )
    return said


def _show(result: Mapping[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from paceline.text import percent, times

    def factor(value: float | None) -> str:
        return "-" if value is None else times(value)

    console = Console(highlight=False)
    table = Table(
        title="Busiest device by rows / mean, over batches",
        title_justify="left", box=box.SIMPLE, pad_edge=False, collapse_padding=True,
    )  # fmt: skip
    table.add_column("layer", overflow="fold")
    for name in ("mean", "p95", "max", "waits", "pooled", "expert", "active"):
        table.add_column(name, justify="right")
    for layer in result["layers"]:
        device, active = layer["device_peak_to_mean"], layer.get("active_experts")
        table.add_row(
            layer["name"],
            *(factor(device[name]) for name in ("mean", "p95", "max")),
            percent(layer["straggler_loss"]),
            factor(layer["pooled_device_peak_to_mean"]),
            factor(layer["expert_peak_to_mean"]["mean"]),
            "-" if active is None else f"{active['mean']:.1f}/{layer['experts']}",
        )
    console.print(table)
    most = result["overall"].get("most_active_experts")
    tokens = "" if result["tokens"] is None else f"{result['tokens']:,} tokens, "
    console.print(
        f"{batches_said(result)}, {tokens}{result['devices']} devices. Mean: weighted by time. "
        "Pooled: all batches as one. Expert: busiest expert / mean. Active: experts with a row, a "
        "batch's mean" + ("." if most is None else f"; the device with the most has {most:.1f}."),
        markup=False,
    )
    if len(result["groups"]) > 1:
        for group in result["groups"]:
            count = "" if group["tokens"] is None else f", {group['tokens']:,} tokens"
            console.print(
                f"{group['phase']}, {group['modality']}{count}: busiest device by these rows alone "
                f"{factor(group['device_peak_to_mean'])} the mean",
                markup=False,
            )
    for line in result["verdict"]:
        console.print(line, markup=False)
    for note in result["notes"]:
        console.print(f"Note: {note}.", markup=False)
