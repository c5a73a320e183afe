"""The figures of a trace's page, as Plotly dictionaries, as Plotly objects, and as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.analysis.cap_words import IN_ORDER, PLACED, lost, way_of
from paceline.files import whole_file
from paceline.reporting.figures import Figure, bars, layer_peaks, line, relative
from paceline.reporting.load_map import load_map
from paceline.reporting.style import ACCENT, AFTER, BEFORE, INK, axis, layout

FORMATS = ("svg", "png")
_LOOKS = {  # told apart by marker and dash too, not by colour alone
    (IN_ORDER, "device"): (ACCENT, "circle", "solid"),
    (PLACED, "device"): ("#6a4fb3", "diamond", "dash"),
    (IN_ORDER, "expert"): ("#d08a1d", "square", "dot"),
    (PLACED, "expert"): (INK, "x", "dashdot"),
}
_HOVER = ", %{customdata}<br>%{y:.3f}×, %{x:.2f}% lost"


def trace_figures(result: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw the figures of a result of `cap_study`: name -> dictionary of "data" and "layout".

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
    plain = {p: way_of(result, p, None, None) for p in result["expert_to_device"]}
    peaks = {f"experts {p}": [x["busiest_device"] for x in w["layers"]] for p, w in plain.items()}
    figures["layers"] = layer_peaks(names, peaks, x_title="")
    figures["devices"] = _devices({p: device_loads(way) for p, way in plain.items()})
    if result["keep"]:
        figures["frontier"] = _frontier(result)
    if result.get("planned"):
        figures["planned"] = _planned(result["planned"])
    return figures


def plotly_figures(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures as `plotly.graph_objects.Figure`, to show and change in a notebook.

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
            raise ValueError(f"format must be {' or '.join(FORMATS)}, got {name!r}.")
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
    """Add up the rows of each device over all layers, [devices].

    >>> device_loads({"layers": [{"device_loads": [1, 2]}, {"device_loads": [3, 4]}]})
    [4, 6]
    """
    return [sum(loads) for loads in zip(*(x["device_loads"] for x in way["layers"]), strict=True)]


def _devices(loads: Mapping[str, Sequence[float]]) -> Figure:
    """Draw every device's load without a cap; the page's slider redraws the second series."""
    before = loads[IN_ORDER]
    mean = sum(before) / len(before)
    series = {"in order, no cap": before, "as chosen": loads.get(PLACED, before)}
    return bars(
        [f"device {device}" for device in range(len(before))],
        {
            name: [round(value / mean, 4) if mean else 0 for value in values]
            for name, values in series.items()
        },
        (BEFORE, AFTER),
        "",
        "rows / mean without a cap",
        patterns=("/", ""),
    )


def _frontier(result: Mapping[str, Any]) -> Figure:
    """Draw gain in rows to wait for against the loss, a line per unit and placement."""
    data = []
    for (placement, unit), look in _LOOKS.items():
        ways = [
            w for w in result["ways"] if w["placement"] == placement and w["unit"] in (unit, None)
        ]
        ways.sort(key=lambda w: (lost(w), -(w["gamma"] or 99)))
        if ways:
            labels = ["no cap" if w["gamma"] is None else f"{w['gamma']:g} × mean" for w in ways]
            name, gains = f"cap per {unit}, experts {placement}", [w["gain"] for w in ways]
            shares = [round(100 * lost(w), 4) for w in ways]
            data.append(line(name, shares, gains, look, name + _HOVER, labels))
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
    """Draw the planner's frontier: modelled time against gate mass, caps chosen layer by layer."""
    part = planned["other_trace"] or planned["second_half"]
    data = []
    for base, placement in (("in_order", IN_ORDER), ("placed", PLACED)):
        points = [p for p in part["frontier"] if p["placement"] == base]
        points.sort(key=lambda p: p["budget"])
        labels = [f"chosen to lose {100 * p['budget']:g}%" for p in points]
        name, gains = f"experts {placement}", [1 + p["gain"] for p in points]
        shares = [round(100 * lost(p), 4) for p in points]
        data.append(line(name, shares, gains, _LOOKS[placement, "device"], name + _HOVER, labels))
    return _against(data, "gate mass", "MoE layers, modelled: gain")


def _against(data: list[dict[str, Any]], lost_part: str, gain: str) -> Figure:
    return {
        "data": data,
        "layout": layout(
            440,
            xaxis=axis(f"share of the {lost_part} lost (%)", rangemode="tozero"),
            yaxis=axis(f"{gain} (×)"),
            legend={"orientation": "h", "yanchor": "top", "y": -0.2, "x": 0},
        ),
    }
