"""Heat map of expert loads: where the stragglers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.reporting.style import INK, axis, layout, load_colours


def load_map(
    panels: Mapping[str, Sequence[Sequence[float]]], sizes: Sequence[int], names: Sequence[str]
) -> dict[str, Any]:
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
        "device that hosts the expert (a column is an expert)",
        tickvals=[start + (size - 1) / 2 for start, size in zip(starts, sizes, strict=True)],
        ticktext=[str(device) for device in range(len(sizes))],
        tickangle=0,
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
