"""The plot of a benchmark: stages of every policy, and its speed-up beside its bound."""

from __future__ import annotations

from typing import Any

_COLOURS = {
    "gate": "#8d99ae",
    "route": "#e07a5f",
    "dispatch": "#81b29a",
    "experts": "#3d5a80",
    "combine": "#f2cc8f",
}


def page(results: dict[str, Any]) -> str:
    """A self-contained HTML page of `paceline bench` results."""
    from plotly.subplots import make_subplots

    rows = results["policies"]
    names = [row["policy"].replace(",", "<br>") for row in rows]
    layer = "stages" in rows[0]
    left = "Time of the layer" if layer else "Time to the first token"
    figure = make_subplots(rows=1, cols=2, subplot_titles=(left, "Speed-up over no cap"))
    if layer:
        for stage, colour in _COLOURS.items():
            times = [row["stages"][stage]["median"] * 1e3 for row in rows]
            figure.add_bar(x=names, y=times, name=stage, marker_color=colour, row=1, col=1)
    else:
        times = [row["first_token_seconds"]["median"] * 1e3 for row in rows]
        figure.add_bar(x=names, y=times, name="first token", marker_color="#3d5a80", row=1, col=1)
    measured = [row["speedup"] for row in rows]
    middle = [value["median"] for value in measured]
    figure.add_scatter(
        x=names,
        y=middle,
        error_y={
            "type": "data",
            "array": [v["max"] - m for v, m in zip(measured, middle, strict=True)],
            "arrayminus": [m - v["min"] for v, m in zip(measured, middle, strict=True)],
        },
        mode="markers",
        name="measured, median with min and max",
        marker={"size": 10, "color": "#e07a5f"},
        row=1,
        col=2,
    )
    figure.add_scatter(
        x=names,
        y=[row["bound"] for row in rows],
        mode="markers",
        name="bound from the loads",
        marker={"symbol": "line-ew-open", "size": 26, "color": "#293241", "line": {"width": 3}},
        row=1,
        col=2,
    )
    figure.update_yaxes(title_text="milliseconds, median", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="times", row=1, col=2)
    devices = results["devices"]
    figure.update_layout(
        barmode="stack",
        template="plotly_white",
        title=f"{results['workload']['label']}: {devices['count']} {devices['kind']}",
        legend={"orientation": "h", "y": -0.25},
    )
    html: str = figure.to_html(include_plotlyjs=True, full_html=True)
    return html
