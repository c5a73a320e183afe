"""Tables of `paceline bench` on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def show(results: dict[str, Any]) -> None:
    """Print the results of `bench layer` or `bench model`."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    devices, rows = results["devices"], results["policies"]
    title = f"{results['workload']['label']}, {devices['count']} {devices['kind']}"
    console.print(title, style="bold")
    if "stages" in rows[0]:
        _print(
            console, Table(box=box.SIMPLE), ["busiest/mean", "dropped", "ms"], rows, _layer_cells
        )
        stages = Table(box=box.SIMPLE, title="Stages, ms", title_justify="left")
        stages.add_column("policy")
        for name in (*rows[0]["stages"], "sent MB"):
            stages.add_column(name, justify="right")
        for row in rows:
            times = (f"{stage['median'] * 1e3:.2f}" for stage in row["stages"].values())
            sent = row["bytes_sent"]
            stages.add_row(_wrapped(row), *times, "-" if sent is None else f"{sent / 1e6:.2f}")
        console.print(stages)
        console.print("Stages are medians, of the device that computes longest.")
    else:
        headers = ["first ms", "prefill/s", "decode/s"]
        _print(console, Table(box=box.SIMPLE), headers, rows, _model_cells)
        console.print("Tokens a second, of all ranks together; the speed-up is of the first token.")
    if devices["kind"] == "emulated devices":
        console.print("Emulated: one process played all devices, and nothing was sent.")


def _print(
    console: Any,
    table: Any,
    headers: list[str],
    rows: list[dict[str, Any]],
    cells: Callable[[dict[str, Any]], list[str]],
) -> None:
    table.add_column("policy")
    for header in (*headers, "bound", "speed-up", "min", "max", "of bound"):
        table.add_column(header, justify="right")
    for row in rows:
        faster = row["speedup"]
        ratios = [row["bound"], faster["median"], faster["min"], faster["max"]]
        shown = [f"{value:.2f}" for value in (*ratios, row["share_of_bound"]["median"])]
        table.add_row(_wrapped(row), *cells(row), *shown)
    console.print(table)


def _wrapped(row: dict[str, Any]) -> str:
    return str(row["policy"]).replace("capacity_factor=", "").replace(",", "\n")


def _layer_cells(row: dict[str, Any]) -> list[str]:
    milliseconds = row["seconds"]["median"] * 1e3
    return [f"{row['peak_to_mean']:.2f}", f"{row['dropped_share']:.1%}", f"{milliseconds:.2f}"]


def _model_cells(row: dict[str, Any]) -> list[str]:
    decode = row.get("decode_tokens_a_second")
    return [
        f"{row['first_token_seconds']['median'] * 1e3:.1f}",
        f"{row['prefill_tokens_a_second']['median']:.0f}",
        "-" if decode is None else f"{decode['median']:.1f}",
    ]
