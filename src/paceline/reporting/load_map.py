"""Heat map of expert loads: where the stragglers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.reporting.style import INK, axis, layout, load_colours


def load_map(
    panels: Mapping[str, Sequence[Sequence[float]]],
    devices: Sequence[Sequence[int]],
    names: Sequence[str],
) -> dict[str, Any]:
    """Draw a heat map of expert loads by layer; with several panels a menu switches between them.

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
                    {"label": title, "method": "restyle", "args": [{"z": [ordered(rows)]}]}
                    for title, rows in panels.items()
                ],
            }
        ]
    return {"data": [trace], "layout": shape}


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
