"""Plotly figures of loads as plain JSON-able dictionaries: {"data": [...], "layout": {...}}.

Built as dictionaries and not through plotly.graph_objects: the page needs only the JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.reporting.style import (
    ACCENT,
    AFTER,
    BEFORE,
    INK,
    LOOKS,
    MUTED,
    PALE,
    axis,
    layout,
    level,
    load_colours,
    upright,
)

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
        bar |= {"textangle": -90, "textfont": {"size": 11}, "constraintext": "none"}
    figure["layout"]["yaxis"]["range"] = [0, 1.25 * max(*device, *expert)]
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


def load_map(
    panels: Mapping[str, Sequence[Sequence[float]]],
    devices: Sequence[Sequence[int]],
    names: Sequence[str],
) -> Figure:
    """Draw a heat map of expert loads by layer.

    With several panels "menu" has the values of each, [layers, experts].

    A row holds a layer's experts in order of their devices, so that a device is one block
    whatever its experts are; lines separate the devices.

    Args:
        panels: title -> loads relative to the layer's mean, [layers, experts].
        devices: of each expert, [layers, experts].
        names: layer names, [layers].
    """
    highest = max(max(map(max, rows)) for rows in panels.values())
    orders = [sorted(range(len(row)), key=row.__getitem__) for row in devices]
    blocks = [_blocks(row) for row in devices]
    alike = all(block == blocks[0] for block in blocks)

    def ordered(rows: Sequence[Sequence[float]]) -> list[list[float]]:
        return [[row[e] for e in order] for row, order in zip(rows, orders, strict=True)]

    trace = {
        "type": "heatmap",
        "z": ordered(next(iter(panels.values()))),
        "y": list(names),
        "customdata": [
            [[expert, row[expert]] for expert in order]
            for row, order in zip(devices, orders, strict=True)
        ],
        "zmin": 0,
        "zmax": highest,
        "colorscale": load_colours(highest),
        "colorbar": {"title": {"text": "load /<br>mean"}, "thickness": 12, "len": 1},
        "hovertemplate": "expert %{customdata[0]} on device %{customdata[1]}, %{y}"
        "<br>%{z:.2f} × mean<extra></extra>",
        "xgap": 1,
        "ygap": 1,
    }
    experts = max(map(len, devices))
    shown = {start: device for device, start in blocks[0]} if alike else {}
    ends = [*list(shown)[1:], experts]
    x_axis = axis(
        "device that hosts the expert (a column is an expert)"
        if alike
        else "experts in order of their devices, which differ by layer",
        tickvals=[(start + end - 1) / 2 for start, end in zip(shown, ends, strict=True)]
        if alike
        else [],
        ticktext=[str(device) for device in shown.values()],
        tickangle=0,
        range=[-0.5, experts - 0.5],
    )
    shape = layout(
        120 + 34 * len(names),
        xaxis=x_axis,
        yaxis=axis("", autorange="reversed"),
        shapes=_lines(blocks, alike),
    )
    figure: Figure = {"data": [trace], "layout": shape}
    if len(panels) > 1:  # the page has a menu of its own, which a finger can open
        figure["menu"] = {title: ordered(rows) for title, rows in panels.items()}
    return figure


def _blocks(devices: Sequence[int]) -> list[tuple[int, int]]:
    """Return (device, first column) of every device that hosts an expert."""
    return [(device, sum(other < device for other in devices)) for device in sorted(set(devices))]


def _lines(blocks: Sequence[Sequence[tuple[int, int]]], alike: bool) -> list[dict[str, Any]]:
    """Draw a line before every device but the first: across all layers, or one per layer."""
    last = len(blocks) - 0.5
    places = (
        [(start, -0.5, last) for _, start in blocks[0][1:]]
        if alike
        else [
            (start, layer - 0.5, layer + 0.5)
            for layer, block in enumerate(blocks)
            for _, start in block[1:]
        ]
    )
    return [
        {
            "type": "line",
            "x0": start - 0.5,
            "x1": start - 0.5,
            "y0": top,
            "y1": bottom,
            "line": {"color": INK, "width": 1.5},
        }
        for start, top, bottom in places
    ]


# -- a ladder of bounds ----------------------------------------------------------------------------


def ladder_figure(ladder: Mapping[str, Any]) -> Figure:
    """Draw the perplexity change of every rung, with its 95% interval, against its bound."""
    rungs = ladder["rungs"]
    errors = [100 * 1.96 * (rung["standard_error"] or 0) for rung in rungs]
    colour, symbol, _ = LOOKS[0]
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "rungs",
                "x": [round(rung["device_peak_to_mean"], 4) for rung in rungs],
                "y": [round(100 * rung["change"], 4) for rung in rungs],
                "error_y": {"type": "data", "array": [round(e, 4) for e in errors], "width": 4},
                "customdata": [[f"{rung['bound']:g}"] for rung in rungs],
                "marker": {"size": 10, "color": colour, "symbol": symbol},
                "line": {"width": 1.5, "color": colour},
                "hovertemplate": "rung %{customdata[0]}<br>busiest device %{x:.2f}× the mean"
                "<br>perplexity %{y:+.2f}%<extra></extra>",
            }
        ],
        "layout": layout(
            360,
            showlegend=False,
            xaxis=axis("busiest device / mean load"),
            yaxis=axis("perplexity change (%)"),
            shapes=[upright(round(ladder["baseline"]["device_peak_to_mean"], 4))],
        ),
    }


def ladder_texts(ladder: Mapping[str, Any]) -> Figure:
    """Draw the change of every text at every rung, a line per text."""
    rungs, names = ladder["rungs"], list(ladder["baseline"]["by_text"])
    lines = []
    for number, name in enumerate(names):
        turn, at = divmod(number, len(LOOKS))
        colour, symbol, dash = LOOKS[at]
        lines.append({
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": [f"{rung['bound']:g}" for rung in rungs],
            "y": [round(100 * rung["by_text"][name], 4) for rung in rungs],
            "marker": {"size": 8, "color": colour, "symbol": symbol + ("-open" if turn else "")},
            "line": {"width": 1.5, "color": colour, "dash": dash},
            "hovertemplate": name + ", rung %{x}<br>perplexity %{y:+.2f}%<extra></extra>",
        })  # fmt: skip
    return {
        "data": lines,
        "layout": layout(
            360 + 22 * len(names),
            xaxis=axis("rung", type="category"),
            yaxis=axis("perplexity change (%)"),
        ),
    }
