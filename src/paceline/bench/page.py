"""Page of the results of `paceline bench`."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.bench.layer_timing import LayerRow
from paceline.bench.model_timing import ModelRow
from paceline.bench.run import Results
from paceline.reporting.figures import Figure
from paceline.reporting.pages import render
from paceline.reporting.style import ACCENT, BEFORE, INK, STAGE_COLOURS, axis, layout

Row = LayerRow | ModelRow


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
