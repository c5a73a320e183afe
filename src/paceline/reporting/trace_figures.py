"""The figures of `paceline report`, as Plotly dictionaries, as Plotly objects, and as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.analysis.cap_words import IN_ORDER, PLACED, lost, way_of
from paceline.files import whole_file
from paceline.reporting.figures import Figure, relative
from paceline.reporting.load_map import load_map
from paceline.reporting.style import ACCENT, AFTER, BEFORE, INK, MUTED, axis, layout

FORMATS = ("svg", "png")
_LOOKS = {  # told apart by marker and dash too, not by colour alone
    (IN_ORDER, "device"): (ACCENT, "circle", "solid"),
    (PLACED, "device"): ("#6a4fb3", "diamond", "dash"),
    (IN_ORDER, "expert"): ("#d08a1d", "square", "dot"),
    (PLACED, "expert"): (INK, "x", "dashdot"),
}
_PATTERNS = {IN_ORDER: "/", PLACED: ""}


def trace_figures(result: Mapping[str, Any]) -> dict[str, Figure]:
    """Name -> figure as a dictionary {"data", "layout"}, of a result of `cap_study`.

    `map` and `map_placed` are the loads of every expert, `layers` the busiest device of every
    layer, `devices` all devices of all layers, `frontier` gain against what is lost, and `planned`
    the planner's own frontier, where there is one.
    """
    figures: dict[str, Figure] = {}
    loads = result["loads"]["layers"]
    names = result["layers"]
    if len({layer["experts"] for layer in loads}) == 1:  # one map needs one number of experts
        table = {"": [relative(layer["expert_loads"]) for layer in loads]}
        for name, placement in (("map", IN_ORDER), ("map_placed", PLACED)):
            if placement in result["expert_to_device"]:
                figures[name] = load_map(table, result["expert_to_device"][placement], names)
    placements = list(result["expert_to_device"])
    figures["layers"] = _layers(
        names,
        {p: [x["busiest_device"] for x in way_of(result, p, None, None)["layers"]]
         for p in placements},
    )  # fmt: skip
    figures["devices"] = _devices(
        {p: device_loads(way_of(result, p, None, None)) for p in placements}
    )
    if result["keep"]:
        figures["frontier"] = _frontier(result)
    if result.get("planned"):
        figures["planned"] = _planned(result["planned"])
    return figures


def plotly_figures(result: Mapping[str, Any]) -> dict[str, Any]:
    """The same figures as `plotly.graph_objects.Figure`, to show and change in a notebook.

    >>> from paceline.analysis.cap_study import cap_study
    >>> from paceline.traces import sample
    >>> sorted(plotly_figures(cap_study(sample("esft_v2lite_law"))))
    ['devices', 'frontier', 'layers', 'map', 'map_placed']
    """
    import plotly.graph_objects as go

    return {name: go.Figure(figure) for name, figure in trace_figures(result).items()}


def write_figures(
    result: Mapping[str, Any], folder: Path, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Write every figure as NAME.svg and NAME.png, readable by their owner only.

    Plotly draws them with kaleido, which needs a Chrome or Chromium on the machine.

    Args:
        result: of `cap_study`.
        folder: made where it isn't there.
        formats: of `FORMATS`.

    Raises:
        ImportError: if kaleido isn't installed.
        ValueError: if a format is unknown, or there is no browser to draw with.
        OSError: if the folder can't be written.
    """
    for name in formats:
        if name not in FORMATS:
            raise ValueError(f"format {name!r} is not allowed: it is {' or '.join(FORMATS)}.")
    try:
        import kaleido  # noqa: F401
    except ImportError:
        raise ImportError(
            "figures as SVG and PNG need kaleido: pip install 'paceline[figures]'"
        ) from None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = []
    for name, figure in plotly_figures(result).items():
        for kind in formats:
            try:
                drawn = figure.to_image(format=kind, width=1100, height=figure.layout.height)
            except RuntimeError as error:
                raise ValueError(f"no figure can be drawn: {error}") from None
            path = folder / f"{name}.{kind}"
            with whole_file(path) as file:
                file.write_bytes(drawn)
            written.append(path)
    return written


def device_loads(way: Mapping[str, Any]) -> list[float]:
    """[devices] rows of each device, all layers added up.

    >>> device_loads({"layers": [{"device_loads": [1, 2]}, {"device_loads": [3, 4]}]})
    [4, 6]
    """
    return [sum(loads) for loads in zip(*(x["device_loads"] for x in way["layers"]), strict=True)]


def _layers(names: Sequence[str], peaks: Mapping[str, Sequence[float | None]]) -> Figure:
    """Busiest device of every layer, a line a placement."""
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"experts {placement}",
                "x": list(names),
                "y": [None if value is None else round(value, 4) for value in values],
                "line": {"color": colour, "width": 2, "dash": dash},
                "marker": {"size": 9, "symbol": symbol, "color": colour},
                "hovertemplate": "%{x}, experts "
                + placement
                + "<br>busiest device %{y:.2f} × mean<extra></extra>",
            }
            for (placement, values), colour, symbol, dash in zip(
                peaks.items(), (BEFORE, AFTER), ("circle", "diamond"), ("solid", "dash"),
                strict=False,
            )
        ],
        "layout": layout(
            340,
            xaxis=axis("", type="category"),
            yaxis=axis("busiest device / mean", rangemode="tozero"),
            shapes=[_mean_line()],
        ),
    }  # fmt: skip


def _devices(loads: Mapping[str, Sequence[float]]) -> Figure:
    """Every device's load without a cap; the page's slider draws the second series anew."""
    before = loads[IN_ORDER]
    mean = sum(before) / len(before)
    series = {"in order, no cap": before, "as chosen": loads.get(PLACED, before)}
    return {
        "data": [
            {
                "type": "bar",
                "name": name,
                "x": [f"device {device}" for device in range(len(values))],
                "y": [round(value / mean, 4) if mean else 0 for value in values],
                "marker": {"color": colour, "pattern": {"shape": shape, "fillmode": "overlay"}},
                "hovertemplate": "%{x}, " + name + "<br>%{y:.3f} × mean<extra></extra>",
            }
            for (name, values), colour, shape in zip(
                series.items(), (BEFORE, AFTER), _PATTERNS.values(), strict=True
            )
        ],
        "layout": layout(
            360,
            barmode="group",
            bargap=0.25,
            xaxis=axis(""),
            yaxis=axis("rows / mean without a cap", rangemode="tozero"),
            shapes=[_mean_line()],
        ),
    }


def _frontier(result: Mapping[str, Any]) -> Figure:
    """Gain in rows to wait for against what is lost, a line a unit and placement."""
    data = []
    for (placement, unit), (colour, symbol, dash) in _LOOKS.items():
        ways = [
            w for w in result["ways"] if w["placement"] == placement and w["unit"] in (unit, None)
        ]
        if not ways:
            continue
        ways.sort(key=lambda w: (lost(w), -(w["gamma"] or 99)))
        data.append(
            _line(
                f"cap a{'n' if unit == 'expert' else ''} {unit}, experts {placement}",
                [100 * lost(w) for w in ways],
                [w["gain"] for w in ways],
                ["no cap" if w["gamma"] is None else f"{w['gamma']:g} × mean" for w in ways],
                (colour, symbol, dash),
            )
        )
    if result["plan"] is not None:
        plan = result["plan"]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "the plan",
                "x": [100 * lost(plan)],
                "y": [plan["gain"]],
                "marker": {"size": 16, "symbol": "star", "color": BEFORE},
            }
        )
    unknown = any(way["gate_mass_lost"] is None for way in result["ways"])
    return _against(data, "assignments" if unknown else "gate mass", "rows to wait for: gain")


def _planned(planned: Mapping[str, Any]) -> Figure:
    """The planner's frontier: modelled time against gate mass, caps chosen layer by layer."""
    part = planned["other_trace"] or planned["second_half"]
    data = []
    for base, placement in (("in_order", IN_ORDER), ("placed", PLACED)):
        points = [p for p in part["frontier"] if p["placement"] == base]
        points.sort(key=lambda p: p["budget"])
        data.append(
            _line(
                f"experts {placement}",
                [100 * lost(p) for p in points],
                [1 + p["gain"] for p in points],
                [f"chosen to lose {100 * p['budget']:g}%" for p in points],
                _LOOKS[(placement, "device")],
            )
        )
    return _against(data, "gate mass", "MoE layers, modelled: gain")


def _line(
    name: str,
    x: Sequence[float],
    y: Sequence[float],
    labels: Sequence[str],
    look: tuple[str, str, str],
) -> dict[str, Any]:
    colour, symbol, dash = look
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [round(value, 4) for value in x],
        "y": [round(value, 4) for value in y],
        "customdata": list(labels),
        "line": {"color": colour, "width": 1.5, "dash": dash},
        "marker": {"size": 9, "symbol": symbol, "color": colour},
        "hovertemplate": name + ", %{customdata}<br>%{y:.3f}×, %{x:.2f}% lost<extra></extra>",
    }


def _against(data: list[dict[str, Any]], what: str, gain: str) -> Figure:
    return {
        "data": data,
        "layout": layout(
            440,
            xaxis=axis(f"share of the {what} lost (%)", rangemode="tozero"),
            yaxis=axis(f"{gain} (×)"),
            legend={"orientation": "h", "yanchor": "top", "y": -0.2, "x": 0},
        ),
    }


def _mean_line() -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": 1,
        "y1": 1,
        "line": {"color": MUTED, "width": 1.5, "dash": "dot"},
    }
