"""Plotly figures as plain JSON-able dictionaries: {"data": [...], "layout": {...}}.

Built as dictionaries and not through plotly.graph_objects: the page needs only the JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.reporting.style import (
    ACCENT,
    AFTER,
    BEFORE,
    FAMILY_COLOURS,
    FAMILY_LABELS,
    FAMILY_SYMBOLS,
    MUTED,
    PALE,
    axis,
    layout,
)

Figure = dict[str, Any]
FLOOR = 0.01  # percent; smaller changes are drawn here on the logarithmic axis


def relative(loads: Sequence[float]) -> list[float]:
    """Loads divided by their mean, rounded for the page, [units].

    >>> relative([6, 2])
    [1.5, 0.5]
    """
    total = sum(loads)
    return [round(load * len(loads) / total, 4) if total > 0 else 0.0 for load in loads]


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
            ("busiest expert", expert, PALE),
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
    colours = {"busiest device": BEFORE, "with the policy": AFTER, "busiest expert": PALE}
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
    colours = [BEFORE, AFTER]
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
    rows: Sequence[Mapping[str, Any]],
    x_title: str,
    reference: float,
    x_range: tuple[float, float],
    highest: float,
) -> Figure:
    """Perplexity change (logarithmic, percent) against another figure, one line per family.

    Args:
        rows: with label, short (text at the marker), family, change (percent) and x;
            with low and high the range is drawn as a horizontal bar.
        x_title: horizontal axis title, with the unit.
        reference: x of a dotted vertical line: where no cap is.
        x_range: horizontal range, so that figures side by side can share it.
        highest: highest change (percent) of all figures that share the scale.
    """
    families: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        families.setdefault(row["family"], []).append(row)
    return {
        "data": [_family(name, members, x_title) for name, members in families.items()],
        "layout": layout(
            430,
            xaxis=axis(x_title, range=list(x_range)),
            yaxis=axis(
                "perplexity change (%, logarithmic)",
                type="log",
                range=[math.log10(FLOOR) - 0.35, math.log10(max(highest, 1)) + 0.35],
                tickvals=[0.01, 0.1, 1, 10, 100, 1000],
                ticktext=["≤ 0.01", "0.1", "1", "10", "100", "1000"],
            ),
            legend={"orientation": "h", "yanchor": "top", "y": -0.2, "x": 0},
            shapes=[_upright(reference)],
        ),
    }


def _family(name: str, members: Sequence[Mapping[str, Any]], x_title: str) -> dict[str, Any]:
    colour = FAMILY_COLOURS.get(name, ACCENT)
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers+text",
        "name": name,
        "x": [row["x"] for row in members],
        "y": [max(row["change"], FLOOR) for row in members],
        "text": [row["short"] if row["change"] > FLOOR else "" for row in members],
        "textposition": FAMILY_LABELS.get(name, "top right"),
        "textfont": {"size": 11, "color": colour},
        "cliponaxis": False,
        "customdata": [[row["label"], row["change"]] for row in members],
        "marker": {"size": 10, "color": colour, "symbol": FAMILY_SYMBOLS.get(name, "circle")},
        "line": {"width": 1.5, "color": colour},
        "hovertemplate": "%{customdata[0]}<br>perplexity %{customdata[1]:+.2f}%"
        f"<br>{x_title}: %{{x:.2f}}<extra></extra>",
    }
    if "low" in members[0]:
        trace["error_x"] = {
            "type": "data",
            "symmetric": False,
            "array": [round(row["high"] - row["x"], 4) for row in members],
            "arrayminus": [round(row["x"] - row["low"], 4) for row in members],
            "thickness": 1,
            "width": 3,
            "color": colour,
        }
    return trace


def _upright(value: float) -> dict[str, Any]:
    """A dotted vertical line across the plot."""
    return {
        "type": "line",
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "x0": value,
        "x1": value,
        "line": {"color": MUTED, "width": 1.5, "dash": "dot"},
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
