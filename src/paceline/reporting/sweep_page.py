"""Figures and page of a sweep over caps: quality against the busiest device, and a dial below 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.reporting.figures import FLOOR, Figure, scatter
from paceline.reporting.page import render
from paceline.reporting.style import INK
from paceline.reporting.sweep_table import factor, families, family

_COLOURS = ("#0b6e8f", "#2e8b57", "#c8553d", "#d08a1d", "#6a4fb3", "#8d99a6", "#1d2733", "#b0578d")


def sweep_figure(result: Mapping[str, Any]) -> Figure:
    """Perplexity change against the load of the busiest device, a line a kind of cap.

    Below 1 a cap takes work from every device: a dial between work and quality.
    """
    points = result["points"]
    rows = [
        {
            "family": family(point),
            "label": f"{family(point)}, {factor(point['capacity_factor'])} × mean",
            "short": factor(point["capacity_factor"]),
            "change": round(100 * point["change"], 4),
            "x": round(point["device_peak_to_mean"], 4),
        }
        for point in points
    ]
    base = result["baseline"]["device_peak_to_mean"]
    widest = max(base, *(row["x"] for row in rows))
    figure = scatter(
        rows,
        "busiest device (load / mean load without a cap)",
        reference=round(base, 4),
        x_range=(-0.05 * widest, round(1.08 * widest, 3)),
        highest=max(row["change"] for row in rows),
    )
    colours: dict[str, str] = {}
    for trace in figure["data"]:
        own, _, expanded = trace["name"].partition(", expanded to ")
        kind = own + expanded.partition(",")[2]  # expanded or not: one colour, dashed or not
        colour = colours.setdefault(kind, _COLOURS[len(colours) % len(_COLOURS)])
        trace["line"] |= {"color": colour, "dash": "dash" if expanded else "solid"}
        trace["marker"] |= {"color": colour, "size": 6 if expanded else 8, "symbol": "circle"}
        trace["textfont"] |= {"color": colour, "size": 10}
        if expanded:
            trace["mode"] = "lines+markers"
    best = sorted((p for p in points if p["on_frontier"]), key=lambda p: p["device_peak_to_mean"])
    figure["data"].append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "nothing here beats these",
            "x": [round(p["device_peak_to_mean"], 4) for p in best],
            "y": [max(round(100 * p["change"], 4), FLOOR) for p in best],
            "line": {"color": INK, "width": 6},
            "opacity": 0.18,
            "hoverinfo": "skip",
        }
    )
    figure["layout"]["height"] = 560
    return figure


def sweep_page(result: Mapping[str, Any]) -> str:
    """The HTML page of a result of `sweep`."""
    return render(
        "sweep.html.j2",
        {"sweep": sweep_figure(result)},
        title="Paceline: caps of every size",
        results=result,
        **sweep_values(result),
        families=families(result["points"]),
        factor=factor,
    )


def sweep_values(result: Mapping[str, Any] | None, note: str = "") -> dict[str, Any]:
    """What the template of the section names; its figure goes under "sweep".

    Args:
        result: of `sweep`, or read back; None: no section.
        note: what else to say of how it was measured.
    """
    words = [] if result is None else sweep_words(result)
    return {"swept": result, "swept_words": words, "swept_note": note}


def sweep_words(result: Mapping[str, Any]) -> list[str]:
    """What the sweep says, a sentence each: at the mean, and the dial below it."""
    lines = []
    for size, what in ((1.0, "every device at most at the mean"), (0.5, "half of the work")):
        near = [p for p in result["points"] if p["device_peak_to_mean"] <= size + 1e-9]
        if not near:
            continue
        best = _simplest(near)
        plain = [p for p in near if not p["compensate"]]
        said = (
            f"Busiest device at most {size:g} × the mean ({what}): "
            f"{100 * best['change']:+.2f}% perplexity with {family(best)} at "
            f"{factor(best['capacity_factor'])}"
        )
        if best["compensate"] and plain:
            least = _simplest(plain)
            said += f"; {100 * least['change']:+.2f}% without stand-ins ({family(least)})"
        lines.append(said + ".")
    return lines


def _simplest(points: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The smallest change, or one within its standard error that does without expansion."""
    best = min(points, key=lambda p: p["change"])
    near = [p for p in points if p["change"] <= best["change"] + (best["standard_error"] or 0)]
    return min(near, key=lambda p: (p["expand"] is not None, p["change"]))
