"""Figure and words of decode: quality against the experts that the busiest device reads."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from paceline.reporting.figures import Figure, scatter

_STYLES = {
    "dropped alone": ("dash", "circle-open"),
    "stand-ins": ("solid", "circle"),
    "stand-ins, placed": ("dot", "diamond"),
}
"""Way -> dash and marker."""

_COLOURS = ("#0b6e8f", "#d08a1d", "#6a4fb3")


def decode_figure(result: Mapping[str, Any]) -> Figure:
    """Perplexity change against experts read, a line a batch size, with stand-ins and without."""
    points, hosted = result["points"], result["experts_a_device"]
    rows = [
        {
            "family": _family(point),
            "label": f"{_family(point)}, max_active={point['max_active']}",
            "short": str(point["max_active"]),
            "change": round(100 * point["change"], 4),
            "x": round(point["read"], 4),
        }
        for point in sorted(points, key=_order)
    ]
    figure = scatter(
        rows,
        f"experts read by the device that reads most, of {hosted}",
        reference=max(point["read_before"] for point in points),
        x_range=(0.6, hosted + 0.2),
        highest=max(row["change"] for row in rows),
    )
    batches = sorted({point["batch"] for point in points})
    for trace in figure["data"]:
        colour = _COLOURS[batches.index(int(trace["name"].split()[0])) % len(_COLOURS)]
        dash, symbol = _STYLES[trace["name"].partition(", ")[2]]
        trace["line"] |= {"color": colour, "dash": dash}
        trace["marker"] |= {"color": colour, "symbol": symbol}
        trace["textfont"] |= {"color": colour}
    return figure


def decode_words(result: Mapping[str, Any]) -> list[str]:
    """What the points say, a sentence a batch size: the best cut that costs no half percent."""
    lines = []
    for batch, group in groupby(sorted(result["points"], key=_order), lambda p: p["batch"]):
        points = list(group)
        left = [p for p in points if p["stand_ins"] and p["change"] <= 0.005]
        if not left:
            continue
        best = min(left, key=lambda p: (round(p["read"], 1), p["change"]))
        alone = [p for p in points if not p["stand_ins"] and p["max_active"] == best["max_active"]]
        before = max(p["read_before"] for p in points if not p["placed"])  # experts in order
        less = 1 - best["read"] / before
        said = (
            f"{batch} sequences a step: max_active={best['max_active']} has the device that reads "
            f"most read {best['read']:.2f} of its {result['experts_a_device']} experts, not "
            f"{before:.2f} ({less:.0%} fewer), for {100 * best['change']:+.2f}% "
            "perplexity with stand-ins"
        )
        if best["placed"]:
            said += " and the experts placed"
        if alone:
            said += (
                f", {100 * alone[0]['change']:+.2f}% with neither"
                if best["placed"]
                else (f", {100 * alone[0]['change']:+.2f}% without")
            )
        lines.append(said + ".")
    return lines


def decode_values(result: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the template of the section names; its figure goes under "decode"; None: no section."""
    return {"decoded": result, "decoded_words": [] if result is None else decode_words(result)}


def _order(point: Mapping[str, Any]) -> tuple[Any, ...]:
    return (point["batch"], point["stand_ins"], point["placed"], point["read"])


def _family(point: Mapping[str, Any]) -> str:
    left = "stand-ins" if point["stand_ins"] else "dropped alone"
    placed = ", placed" if point["placed"] else ""
    return f"{point['batch']} sequences, {left}{placed}"
