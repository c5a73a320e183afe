"""The page of `paceline bench --plot`: stages of every policy, its speed-up beside its bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.reporting.figures import Figure
from paceline.reporting.pages import render
from paceline.reporting.style import ACCENT, BEFORE, INK, STAGE_COLOURS, axis, layout


def bench_page(results: Mapping[str, Any]) -> str:
    """A self-contained HTML page of `paceline bench` results."""
    rows = results["policies"]
    names = [row["policy"].replace(",", "<br>") for row in rows]
    return render(
        "bench.html.j2",
        {"time": _times(names, rows), "speedup": _speedups(names, rows)},
        title="Paceline: benchmark",
        results=results,
        layer="stages" in rows[0],
    )


def _times(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Milliseconds of every policy, medians: of a layer by stage, or to the first token."""
    if "stages" in rows[0]:
        series = {
            stage: ([row["stages"][stage]["median"] for row in rows], colour)
            for stage, colour in STAGE_COLOURS.items()
        }
    else:
        series = {"first token": ([row["first_token_seconds"]["median"] for row in rows], ACCENT)}
    bars = [
        {
            "type": "bar",
            "name": name,
            "x": list(names),
            "y": [round(1e3 * value, 4) for value in seconds],
            "marker": {"color": colour},
            "hovertemplate": "%{x}<br>" + name + ": %{y:.3f} ms<extra></extra>",
        }
        for name, (seconds, colour) in series.items()
    ]
    return {
        "data": bars,
        "layout": layout(
            420,
            barmode="stack",
            xaxis=axis("", type="category"),
            yaxis=axis("milliseconds, median", rangemode="tozero"),
        ),
    }


def _speedups(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Measured speed-up of every policy with its range, and what the loads allow."""
    measured = [row["speedup"] for row in rows]
    middle = [value["median"] for value in measured]
    points = {
        "type": "scatter",
        "mode": "markers",
        "name": "measured, median with min and max",
        "x": list(names),
        "y": middle,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [v["max"] - m for v, m in zip(measured, middle, strict=True)],
            "arrayminus": [m - v["min"] for v, m in zip(measured, middle, strict=True)],
        },
        "marker": {"size": 10, "color": BEFORE},
    }
    bounds = {
        "type": "scatter",
        "mode": "markers",
        "name": "bound from the loads",
        "x": list(names),
        "y": [row["bound"] for row in rows],
        "marker": {"symbol": "line-ew-open", "size": 26, "color": INK, "line": {"width": 3}},
    }
    shape = layout(420, xaxis=axis("", type="category"), yaxis=axis("speed-up over no cap (×)"))
    return {"data": [points, bounds], "layout": shape}
