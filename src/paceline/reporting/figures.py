"""Plotly figures as plain JSON-able dictionaries: {"data": [...], "layout": {...}}.

Built as dictionaries and not through plotly.graph_objects: the page needs only the JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.reporting.style import (
    ACCENT,
    AFTER,
    BEFORE,
    FAMILY_COLOURS,
    FAMILY_SYMBOLS,
    INK,
    MUTED,
    axis,
    layout,
    load_colours,
)

Figure = dict[str, Any]
FLOOR = 0.01  # percent; smaller changes are drawn here on the logarithmic axis


def relative(loads: Sequence[float], sizes: Sequence[int] | None = None) -> list[float]:
    """Loads divided by their unit's mean, rounded for the page, [units]."""
    sizes = [1] * len(loads) if sizes is None else sizes
    total, experts = sum(loads), sum(sizes)
    if total <= 0:
        return [0.0] * len(loads)
    return [
        round(x * experts / (total * n), 4) if n else 0.0 for x, n in zip(loads, sizes, strict=True)
    ]


def load_map(
    panels: Mapping[str, Sequence[Sequence[float]]], sizes: Sequence[int], names: Sequence[str]
) -> Figure:
    """Heat map of expert loads by layer; with several panels a menu switches between them.

    Args:
        panels: title -> loads relative to the layer's mean, [layers, experts].
        sizes: experts of each device, in expert order, [devices].
        names: layer names, [layers].
    """
    highest = max(max(map(max, rows)) for rows in panels.values())
    experts = sum(sizes)
    starts = [sum(sizes[:d]) for d in range(len(sizes))]
    first = next(iter(panels.values()))
    trace = {
        "type": "heatmap",
        "z": [list(row) for row in first],
        "y": list(names),
        "zmin": 0,
        "zmax": highest,
        "colorscale": load_colours(highest),
        "colorbar": {"title": {"text": "load /<br>mean"}, "thickness": 12, "len": 1},
        "hovertemplate": "expert %{x}, %{y}<br>%{z:.2f} × mean<extra></extra>",
        "xgap": 1,
        "ygap": 1,
    }
    lines = [
        {
            "type": "line",
            "x0": start - 0.5,
            "x1": start - 0.5,
            "y0": -0.5,
            "y1": len(names) - 0.5,
            "line": {"color": INK, "width": 1.5},
        }
        for start in starts[1:]
    ]
    x_axis = axis(
        "expert, grouped by the device that hosts it",
        tickvals=[start + (size - 1) / 2 for start, size in zip(starts, sizes, strict=True)],
        ticktext=[f"dev {device}" for device in range(len(sizes))],
        range=[-0.5, experts - 0.5],
    )
    shape = layout(
        120 + 34 * len(names),
        xaxis=x_axis,
        yaxis=axis("", autorange="reversed"),
        shapes=lines,
    )
    if len(panels) > 1:
        shape["margin"]["t"] = 56
        shape["updatemenus"] = [
            {
                "x": 0,
                "y": 1.02,
                "xanchor": "left",
                "yanchor": "bottom",
                "bgcolor": "#ffffff",
                "font": {"color": INK},
                "buttons": [
                    {
                        "label": title,
                        "method": "restyle",
                        "args": [{"z": [[list(row) for row in rows]]}],
                    }
                    for title, rows in panels.items()
                ],
            }
        ]
    return {"data": [trace], "layout": shape}


def peak_bars(names: Sequence[str], device: Sequence[float], expert: Sequence[float]) -> Figure:
    """Peak-to-mean of devices and experts, a pair of bars per group of batches."""
    bars = [
        {
            "type": "bar",
            "name": title,
            "x": list(names),
            "y": list(values),
            "text": [f"{value:.2f}" for value in values],
            "textposition": "outside",
            "cliponaxis": False,
            "marker": {"color": colour},
            "hovertemplate": "%{x}<br>" + title + ": %{y:.2f} × mean<extra></extra>",
        }
        for title, values, colour in (
            ("busiest device", device, ACCENT),
            ("busiest expert", expert, "#b9cfd8"),
        )
    ]
    return {
        "data": bars,
        "layout": layout(
            360,
            barmode="group",
            bargap=0.25,
            xaxis=axis("text in the batch"),
            yaxis=axis("load / mean load", rangemode="tozero"),
            shapes=[_level(1.0)],
        ),
    }


def layer_peaks(names: Sequence[str], series: Mapping[str, Sequence[float]]) -> Figure:
    """Peak-to-mean by layer, one line per series.

    Args:
        names: layers, [layers].
        series: title -> load / mean load, [layers].
    """
    colours = {"busiest device": BEFORE, "with the policy": AFTER, "busiest expert": "#9fb6c1"}
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": title,
            "x": list(names),
            "y": [round(value, 4) for value in values],
            "line": {"color": colours.get(title, ACCENT), "width": 2},
            "hovertemplate": "layer %{x}, " + title + "<br>%{y:.2f} × mean<extra></extra>",
        }
        for title, values in series.items()
    ]
    return {
        "data": data,
        "layout": layout(
            360,
            xaxis=axis("layer", type="category"),
            yaxis=axis("load / mean load", rangemode="tozero"),
            shapes=[_level(1.0)],
        ),
    }


def device_bars(
    before: Sequence[float], after: Mapping[str, Sequence[float]], cap: float
) -> Figure:
    """Device loads (relative to the mean before) without a cap and with it."""
    devices = [f"device {device}" for device in range(len(before))]
    series = {"no cap": before, **after}
    colours = [BEFORE, AFTER, "#6a4fb3"]
    return {
        "data": [
            {
                "type": "bar",
                "name": title,
                "x": devices,
                "y": list(values),
                "marker": {"color": colour},
                "hovertemplate": "%{x}, " + title + "<br>%{y:.3f} × mean<extra></extra>",
            }
            for (title, values), colour in zip(series.items(), colours, strict=False)
        ],
        "layout": layout(
            360,
            barmode="group",
            bargap=0.25,
            xaxis=axis("emulated device"),
            yaxis=axis("load / mean load before the cap", rangemode="tozero"),
            shapes=[_level(1.0), _level(cap, "dash", AFTER)],
            annotations=[_note(cap, f"cap: {cap:g} × mean"), _note(1.0, "mean")],
        ),
    }


def scatter(
    rows: Sequence[Mapping[str, Any]], x: str, x_title: str, spread: bool = False
) -> Figure:
    """Perplexity change (logarithmic, percent) against another figure, one line per family.

    Args:
        rows: with label, family, change (percent), and x; low and high if `spread`.
        x: key of the horizontal figure.
        x_title: its axis title, with the unit.
        spread: draw the range low..high as horizontal error bars.
    """
    families: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        families.setdefault(row["family"], []).append(row)
    data = []
    for family, members in families.items():
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines+markers",
            "name": family,
            "x": [row[x] for row in members],
            "y": [max(row["change"], FLOOR) for row in members],
            "customdata": [[row["label"], row["change"]] for row in members],
            "marker": {
                "size": 11,
                "color": FAMILY_COLOURS.get(family, ACCENT),
                "symbol": FAMILY_SYMBOLS.get(family, "circle"),
            },
            "line": {"width": 1.5, "color": FAMILY_COLOURS.get(family, ACCENT)},
            "hovertemplate": "%{customdata[0]}<br>perplexity %{customdata[1]:+.2f}%"
            "<br>" + x_title + ": %{x:.2f}<extra></extra>",
        }
        if spread:
            trace["error_x"] = {
                "type": "data",
                "symmetric": False,
                "array": [row["high"] - row[x] for row in members],
                "arrayminus": [row[x] - row["low"] for row in members],
                "thickness": 1,
                "width": 3,
                "color": MUTED,
            }
        data.append(trace)
    return {
        "data": data,
        "layout": layout(
            430,
            xaxis=axis(x_title),
            yaxis=axis(
                "perplexity change (%, logarithmic)",
                type="log",
                tickvals=[0.01, 0.1, 1, 10, 100, 1000],
                ticktext=["≤ 0.01", "0.1", "1", "10", "100", "1000"],
            ),
            legend={"orientation": "h", "yanchor": "top", "y": -0.2, "x": 0},
        ),
    }


def _level(value: float, dash: str = "dot", colour: str = MUTED) -> dict[str, Any]:
    """A horizontal line across the plot."""
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": value,
        "y1": value,
        "line": {"color": colour, "width": 1.5, "dash": dash},
    }


def _note(value: float, text: str) -> dict[str, Any]:
    """A label at the right end of a horizontal line."""
    return {
        "xref": "paper",
        "x": 1,
        "y": value,
        "text": text,
        "showarrow": False,
        "xanchor": "right",
        "yanchor": "bottom",
        "font": {"size": 11, "color": MUTED},
    }
