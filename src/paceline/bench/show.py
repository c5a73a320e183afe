"""Results of `paceline bench` as tables on a terminal and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.bench.layer_timing import LayerRow
from paceline.bench.model_timing import ModelRow
from paceline.bench.run import EMULATED, Results
from paceline.reporting.figures import Figure
from paceline.reporting.pages import render
from paceline.reporting.style import ACCENT, BEFORE, INK, STAGE_COLOURS, axis, layout
from paceline.text import percent

Row = LayerRow | ModelRow


def show(results: Results) -> None:
    """Print the results of `bench layer` or `bench model`."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    devices, rows = results.devices, results.policies
    title = f"{results.workload['label']}, {devices.count} {devices.kind}"
    console.print(title, style="bold")
    ratios = ("bound", "speed-up", "min", "max", "of bound")
    layers = [row for row in rows if isinstance(row, LayerRow)]
    if layers:
        _print(console, ["busiest/mean", "dropped", "ms", *ratios], [
            [_name(r), f"{r.peak_to_mean:.2f}", percent(r.dropped_share),
             f"{1e3 * r.seconds['median']:.2f}", *_ratios(r)] for r in layers
        ])  # fmt: skip
        _print(console, [*layers[0].stages, "sent MB"], [
            [_name(r), *(f"{1e3 * stage['median']:.2f}" for stage in r.stages.values()),
             "-" if r.bytes_sent is None else f"{r.bytes_sent / 1e6:.2f}"] for r in layers
        ], title="Stages, ms")  # fmt: skip
        console.print("Stages are medians, of the device that computes longest.")
    else:
        _print(console, ["first ms", "prefill/s", "decode/s", *ratios], [
            [_name(r), f"{1e3 * r.first_token_seconds['median']:.1f}",
             f"{r.prefill_tokens_a_second['median']:.0f}",
             "-" if r.decode_tokens_a_second is None
             else f"{r.decode_tokens_a_second['median']:.1f}", *_ratios(r)]
            for r in rows if isinstance(r, ModelRow)
        ])  # fmt: skip
        console.print("Tokens per second are of all ranks; the speed-up is of the first token.")
    if devices.kind == EMULATED:
        console.print("Emulated: one process played all devices, and nothing was sent.")


_QUIET = 0.03  # relative difference of two runs of one case on a quiet machine


def show_fit(result: Mapping[str, Any]) -> None:
    """Print the results of `bench hardware`."""
    from rich.console import Console

    console, hardware = Console(highlight=False), result["hardware"]
    console.print(
        f"{hardware['flops'] / 1e9:.0f} GFLOP/s in large products, "
        f"{hardware['memory'] / 1e9:.1f} GB/s of weights, {hardware['per_expert'] * 1e6:.0f} us "
        "per expert."
    )
    _print(console, ["rows per expert", "measured ms", "model's error"], [
        [f"{case['hidden']} x {case['expert_size']}",
         f"{sum(case['rows']) / len(case['rows']):.1f}",
         f"{case['seconds'] * 1e3:.2f}", f"{case['error']:+.0%}"] for case in result["held_out"]
    ], title="Layers that took no part in the fit", first="hidden x size")  # fmt: skip
    console.print(
        f"{result['held_out_within_15_percent']} of {len(result['held_out'])} of them within 15%, "
        f"the worst off by {result['held_out_worst']:.0%}; of {result['decode_cases']} decode "
        f"cases (few rows per expert, weights dominate) {result['decode_within_15_percent']}."
    )
    if result["each_size_left_out"]:
        console.print(
            "Of the others, each size left out of the fit in turn: "
            f"{result['each_size_left_out_within_15_percent']} of {result['each_size_left_out']} "
            f"within 15%, the worst off by {result['each_size_left_out_worst']:.0%}."
        )
    console.print(f"The fastest two runs of a case differ by {result['unrest']:.0%}.")
    if result["unrest"] > _QUIET:
        console.print("The machine was not quiet: the fit can't be better than its timings.")


def _print(
    console: Any,
    headers: list[str],
    lines: list[list[str]],
    title: str = "",
    first: str = "policy",
) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, title=title or None, title_justify="left")
    table.add_column(first)
    for header in headers:
        table.add_column(header, justify="right")
    for line in lines:
        table.add_row(*line)
    console.print(table)


def _name(row: Row) -> str:
    return row.policy.replace("capacity_factor=", "").replace(",", "\n")


def _ratios(row: Row) -> list[str]:
    faster = row.speedup
    values = (row.bound, faster["median"], faster["min"], faster["max"])
    return [f"{value:.2f}" for value in (*values, row.share_of_bound["median"])]


def bench_page(results: Results) -> str:
    """Return a self-contained HTML page of the results, as `--html` writes it."""
    rows = results.policies
    names = [row.policy.replace(",", "<br>") for row in rows]
    return render(
        "bench.html.j2",
        {"time": _times(names, rows), "speedup": _speedups(names, rows)},
        title="Paceline: benchmark",
        results=results,
        layer=isinstance(rows[0], LayerRow),
    )


def _times(names: list[str], rows: Sequence[Row]) -> Figure:
    """Draw milliseconds of every policy, medians: of a layer by stage, or to the first token."""
    series: dict[str, tuple[list[float], str]] = {}
    if layers := [row for row in rows if isinstance(row, LayerRow)]:
        for stage, colour in STAGE_COLOURS.items():
            series[stage] = ([row.stages[stage]["median"] for row in layers], colour)
    else:
        firsts = [r.first_token_seconds["median"] for r in rows if isinstance(r, ModelRow)]
        series["first token"] = (firsts, ACCENT)
    bars = [
        {
            "type": "bar",
            "name": name,
            "x": names,
            "y": [round(1e3 * value, 4) for value in seconds],
            "marker": {"color": colour},
            "hovertemplate": "%{x}<br>" + name + ": %{y:.3f} ms<extra></extra>",
        }
        for name, (seconds, colour) in series.items()
    ]
    shape = {
        "barmode": "stack",
        "xaxis": axis("", type="category"),
        "yaxis": axis("milliseconds, median", rangemode="tozero"),
    }
    return {"data": bars, "layout": layout(420, **shape)}


def _speedups(names: list[str], rows: Sequence[Row]) -> Figure:
    """Draw the measured speed-up of every policy with its range, and the bound of the loads."""
    middle = [row.speedup["median"] for row in rows]
    points = {
        "type": "scatter",
        "mode": "markers",
        "name": "measured, median with min and max",
        "x": names,
        "y": middle,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [row.speedup["max"] - m for row, m in zip(rows, middle, strict=True)],
            "arrayminus": [m - row.speedup["min"] for row, m in zip(rows, middle, strict=True)],
        },
        "marker": {"size": 10, "color": BEFORE},
    }
    bounds = {
        "type": "scatter",
        "mode": "markers",
        "name": "bound from the loads",
        "x": names,
        "y": [row.bound for row in rows],
        "marker": {"symbol": "line-ew-open", "size": 26, "color": INK, "line": {"width": 3}},
    }
    shape = layout(420, xaxis=axis("", type="category"), yaxis=axis("speed-up over no cap (×)"))
    return {"data": [points, bounds], "layout": shape}
