"""Plotly figures of loads as plain JSON-able dictionaries: {"data": [...], "layout": {...}}.

Built as dictionaries and not through plotly.graph_objects: the page needs only the JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.reporting.style import ACCENT, AFTER, BEFORE, MUTED, PALE, axis, layout, level

Figure = dict[str, Any]

LINE_LOOKS = {  # distinct by marker and dash too, not by colour alone
    "busiest device": (BEFORE, "circle", "solid"),
    "with the policy": (AFTER, "diamond", "dash"),
    "busiest expert": (PALE, "square", "dot"),
    "experts in order": (BEFORE, "circle", "solid"),
    "experts placed": (AFTER, "diamond", "dash"),
}
"""Name of a line -> its colour, marker and dash."""


def relative(loads: Sequence[float]) -> list[float]:
    """Divide loads by their mean, rounded for the page, [units].

    >>> relative([6, 2])
    [1.5, 0.5]
    """
    total = sum(loads)
    return [round(load * len(loads) / total, 4) if total > 0 else 0.0 for load in loads]


def bars(
    names: Sequence[str],
    series: Mapping[str, Sequence[float]],
    colours: Sequence[str],
    x_title: str,
    y_title: str,
    *,
    decimals: int = 3,
    patterns: Sequence[str] = (),
    **more: Any,
) -> Figure:
    """Draw a group of bars per name, relative to a mean at 1.

    Args:
        names: of the groups, [groups].
        series: title -> load / mean load, [groups].
        decimals: of the values shown on hover.
        patterns: of each series, to tell them apart without colour; none: plain.
        more: further fields of the layout.
    """
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": title,
            "x": list(names),
            "y": list(values),
            "marker": {"color": colour},
            "hovertemplate": f"%{{x}}, {title}<br>%{{y:.{decimals}f}} × mean<extra></extra>",
        }
        for (title, values), colour in zip(series.items(), colours, strict=True)
    ]
    for bar, pattern in zip(data, patterns, strict=False):
        bar["marker"] |= {"pattern": {"shape": pattern, "fillmode": "overlay"}}
    shape = {
        "barmode": "group",
        "bargap": 0.25,
        "xaxis": axis(x_title),
        "yaxis": axis(y_title, rangemode="tozero"),
        "shapes": [level(1.0)],
    }
    return {"data": data, "layout": layout(360, **{**shape, **more})}


def peak_bars(names: Sequence[str], device: Sequence[float], expert: Sequence[float]) -> Figure:
    """Draw peak-to-mean of devices and experts, a pair of bars per group of batches."""
    series = {"busiest device": device, "busiest expert": expert}
    figure = bars(
        names, series, (ACCENT, PALE), "text in the batch", "load / mean load", decimals=2
    )
    for bar in figure["data"]:
        text = [f"{value:.2f}" for value in bar["y"]]
        bar |= {"text": text, "textposition": "outside", "cliponaxis": False}
    return figure


def device_bars(
    before: Sequence[float], after: Mapping[str, Sequence[float]], cap: float
) -> Figure:
    """Draw device loads (relative to the mean before) without a cap and with it.

    Args:
        before: [devices].
        after: title -> loads with the cap, [devices]; one entry.
        cap: of the loads, relative to the mean.
    """
    return bars(
        [f"device {device}" for device in range(len(before))],
        {"no cap": before, **after},
        (BEFORE, AFTER),
        "emulated device",
        "load / mean load before the cap",
        shapes=[level(1.0), level(cap, "dash", AFTER)],
        annotations=[_note(cap, f"cap: {cap:g} × mean"), _note(1.0, "mean")],
    )


def line(
    name: str,
    x: Sequence[Any],
    y: Sequence[float | None],
    look: tuple[str, str, str],
    hover: str,
    labels: Sequence[str] = (),
) -> dict[str, Any]:
    """Draw points joined by a line; a look is colour, marker and dash, a label is hover text."""
    colour, symbol, dash = look
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": list(x),
        "y": [None if value is None else round(value, 4) for value in y],
        "customdata": list(labels),
        "line": {"color": colour, "width": 2, "dash": dash},
        "marker": {"size": 9, "symbol": symbol, "color": colour},
        "hovertemplate": f"{hover}<extra></extra>",
    }


def layer_peaks(
    names: Sequence[str], series: Mapping[str, Sequence[float | None]], x_title: str = "layer"
) -> Figure:
    """Draw peak-to-mean by layer, a line per series.

    Args:
        names: of the layers, [layers].
        series: one of LINE_LOOKS -> load / mean load, [layers]; None where a layer has no load.
    """
    data = [
        line(
            title,
            names,
            values,
            LINE_LOOKS[title],
            f"{x_title} %{{x}}, {title}<br>%{{y:.2f}} × mean",
        )
        for title, values in series.items()
    ]
    shape = {
        "xaxis": axis(x_title, type="category"),
        "yaxis": axis("busiest / mean", rangemode="tozero"),
        "shapes": [level(1.0)],
    }
    return {"data": data, "layout": layout(360, **shape)}


def _note(value: float, text: str) -> dict[str, Any]:
    """Label a horizontal line at its right end."""
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
