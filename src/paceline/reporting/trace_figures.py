"""The figures of a trace's page, as Plotly dictionaries, as Plotly objects, and as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.analysis.results import CapStudy, CapWay, PlanResult, loss
from paceline.analysis.verdict import IN_ORDER, PLACED
from paceline.files import atomic_file
from paceline.reporting.figures import Figure, bars, layer_peaks, line, load_map, relative
from paceline.reporting.style import ACCENT, AFTER, BEFORE, INK, axis, layout

FORMATS = ("svg", "png")
_LOOKS = {  # distinct by marker and dash too, not by colour alone
    (IN_ORDER, "device"): (ACCENT, "circle", "solid"),
    (PLACED, "device"): ("#6a4fb3", "diamond", "dash"),
    (IN_ORDER, "expert"): ("#d08a1d", "square", "dot"),
    (PLACED, "expert"): (INK, "x", "dashdot"),
}
_HOVER = ", %{customdata}<br>%{y:.3f}×, %{x:.2f}% lost"


def trace_figures(study: CapStudy, planned: PlanResult | None = None) -> dict[str, Figure]:
    """Draw the figures of a result of `cap_study`: name -> dictionary of "data" and "layout".

    `map` and `map_placed` are the loads of every expert, `layers` the busiest device of every
    layer, `devices` all devices of all layers, `frontier` gain against what is lost, and `planned`
    the planner's own frontier, where there is one.
    """
    figures: dict[str, Figure] = {}
    loads = study.loads.layers
    if len({layer.experts for layer in loads}) == 1:  # one map needs one number of experts
        table = {"": [relative(layer.expert_loads) for layer in loads]}
        for name, placement in (("map", IN_ORDER), ("map_placed", PLACED)):
            if placement in study.expert_to_device:
                figures[name] = load_map(table, study.expert_to_device[placement], study.layers)
    plain = {placement: study.way(placement) for placement in study.expert_to_device}
    peaks = {f"experts {p}": [x.busiest_device for x in way.layers] for p, way in plain.items()}
    figures["layers"] = layer_peaks(study.layers, peaks, x_title="")
    figures["devices"] = _devices({p: device_loads(way) for p, way in plain.items()})
    if study.keep:
        figures["frontier"] = _frontier(study)
    if planned is not None:
        figures["planned"] = _planned(planned)
    return figures


def plotly_figures(study: CapStudy, planned: PlanResult | None = None) -> dict[str, Any]:
    """Return the figures as `plotly.graph_objects.Figure`, to show and change in a notebook.

    >>> from paceline.analysis.cap_study import cap_study
    >>> from paceline.traces import sample
    >>> sorted(plotly_figures(cap_study(sample("esft_v2lite_law"))))
    ['devices', 'frontier', 'layers', 'map', 'map_placed']
    """
    import plotly.graph_objects as go

    return {name: go.Figure(figure) for name, figure in trace_figures(study, planned).items()}


def write_figures(
    study: CapStudy,
    folder: Path,
    formats: Sequence[str] = FORMATS,
    planned: PlanResult | None = None,
) -> list[Path]:
    """Write every figure as NAME.svg and NAME.png, readable by their owner only.

    Plotly draws them with kaleido, which needs a Chrome or Chromium on the machine.

    Args:
        study: a result of `cap_study`.
        folder: made where it isn't there.
        formats: of `FORMATS`.
        planned: a result of `make_plan`, where there is one.

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
    for name, figure in plotly_figures(study, planned).items():
        for kind in formats:
            try:
                drawn = figure.to_image(format=kind, width=1100, height=figure.layout.height)
            except RuntimeError as error:
                raise ValueError(f"no figure can be drawn: {error}") from None
            path = folder / f"{name}.{kind}"
            with atomic_file(path) as file:
                file.write_bytes(drawn)
            written.append(path)
    return written


def device_loads(way: CapWay) -> list[float]:
    """Add up the rows of each device over all layers, [devices]."""
    return [sum(loads) for loads in zip(*(x.device_loads for x in way.layers), strict=True)]


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


def _frontier(study: CapStudy) -> Figure:
    """Draw gain in rows of the busiest device against the loss, a line per unit and placement."""
    data = []
    for (placement, unit), look in _LOOKS.items():
        ways = [w for w in study.ways if w.placement == placement and w.unit in (unit, None)]
        ways.sort(key=lambda way: (loss(way), -(way.gamma or 99)))
        if ways:
            labels = ["no cap" if w.gamma is None else f"{w.gamma:g} × mean" for w in ways]
            name, gains = f"cap per {unit}, experts {placement}", [w.gain for w in ways]
            shares = [round(100 * loss(way), 4) for way in ways]
            data.append(line(name, shares, gains, look, name + _HOVER, labels))
    if study.plan is not None:
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "the plan",
                "x": [100 * loss(study.plan)],
                "y": [study.plan.gain],
                "marker": {"size": 16, "symbol": "star", "color": BEFORE},
            }
        )
    unknown = any(way.gate_mass_lost is None for way in study.ways)
    return _against(
        data, "assignments" if unknown else "gate mass", "gain, rows of the busiest device"
    )


def _planned(planned: PlanResult) -> Figure:
    """Draw the planner's frontier: modelled time against gate mass, caps chosen layer by layer."""
    data = []
    for base, placement in (("in_order", IN_ORDER), ("placed", PLACED)):
        points = [point for point in planned.deciding.frontier if point.placement == base]
        points.sort(key=lambda point: point.budget)
        labels = [f"chosen to lose {100 * point.budget:g}%" for point in points]
        name, gains = f"experts {placement}", [1 + point.gain for point in points]
        shares = [round(100 * loss(point), 4) for point in points]
        data.append(line(name, shares, gains, _LOOKS[placement, "device"], name + _HOVER, labels))
    return _against(data, "gate mass", "gain, modelled time")


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
