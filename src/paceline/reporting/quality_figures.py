"""Quality against load: figures, tables and sentences on caps of every size, and on decode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from paceline.reporting.figures import Figure
from paceline.reporting.style import INK, LOOKS, axis, layout, upright
from paceline.text import percent, signed_percent, times

FLOOR = 0.01
"""Percent: smaller changes are drawn here on the logarithmic axis."""

_DECODE_LOOKS = {
    "dropped alone": ("dash", "-open"),
    "stand-ins": ("solid", ""),
    "stand-ins, placed": ("dot", ""),
}
"""Way -> dash, and the end of the marker's name, which begins with that of the batch size."""


def scatter(
    rows: Sequence[Mapping[str, Any]],
    x_title: str,
    reference: float,
    x_range: tuple[float, float],
    highest: float,
) -> Figure:
    """Draw perplexity change (logarithmic, percent) against another figure, a line per family.

    Args:
        rows: with label, short (text at the marker), family, change (percent) and x;
            with low and high the range is drawn as a horizontal bar.
        x_title: horizontal axis title, with the unit.
        reference: x of a dotted vertical line: where no cap is.
        x_range: horizontal range, so that figures side by side can share it.
        highest: highest change (percent) of all figures that share the scale.
    """
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        lines.setdefault(row["family"], []).append(row)
    y_range = [math.log10(FLOOR) - 0.35, math.log10(max(highest, 1)) + 0.35]
    shown = _uncovered(rows, x_range, y_range)
    return {
        "data": [
            _line(name, members, x_title, LOOKS[number % len(LOOKS)], shown)
            for number, (name, members) in enumerate(lines.items())
        ],
        "layout": layout(
            360 + 22 * len(lines),
            xaxis=axis(x_title, range=list(x_range)),
            yaxis=axis(
                "perplexity change (%)",
                type="log",
                range=y_range,
                tickvals=[0.01, 0.1, 1, 10, 100, 1000],
                ticktext=["≤ 0.01", "0.1", "1", "10", "100", "1000"],
            ),
            shapes=[upright(reference)],
        ),
    }


_APART = (0.07, 0.05)  # shares of the plot's width and height that a label takes


def _uncovered(
    rows: Sequence[Mapping[str, Any]], x_range: tuple[float, float], y_range: Sequence[float]
) -> set[int]:
    """Return the ids of rows whose labels cover no earlier one; the others are shown on hover."""
    wide, high = x_range[1] - x_range[0], y_range[1] - y_range[0]
    places: list[tuple[float, float]] = []
    shown = set()
    for row in rows:
        if row["change"] <= FLOOR:
            continue
        x, y = row["x"] / wide, math.log10(row["change"]) / high
        if all(abs(x - a) > _APART[0] or abs(y - b) > _APART[1] for a, b in places):
            places.append((x, y))
            shown.add(id(row))
    return shown


def _line(
    name: str,
    members: Sequence[Mapping[str, Any]],
    x_title: str,
    look: tuple[str, str, str],
    shown: set[int],
) -> dict[str, Any]:
    colour, symbol, dash = look
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers+text",
        "name": name,
        "x": [row["x"] for row in members],
        "y": [max(row["change"], FLOOR) for row in members],
        "text": [row["short"] if id(row) in shown else "" for row in members],
        "textposition": "top right",
        "textfont": {"size": 11, "color": colour},
        "cliponaxis": False,
        "customdata": [[row["label"], row["change"]] for row in members],
        "marker": {"size": 10, "color": colour, "symbol": symbol},
        "line": {"width": 1.5, "color": colour, "dash": dash},
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


def _row(line: str, setting: str, short: str, change: float, x: float) -> dict[str, Any]:
    return {
        "family": line,
        "label": f"{line}, {setting}",
        "short": short,
        "change": round(100 * change, 4),
        "x": round(x, 4),
    }


def _recolour(trace: dict[str, Any], colour: str) -> None:
    for part in ("line", "marker", "textfont"):
        trace[part] |= {"color": colour}


# -- caps of every size ----------------------------------------------------------------------------


def sweep_figure(result: Mapping[str, Any]) -> Figure:
    """Draw perplexity change against the load of the busiest device, a line per kind of cap.

    Below 1 a cap takes work from every device: a dial between work and quality.
    """
    points = result["points"]
    rows = []
    for point in points:
        size = factor(point["capacity_factor"])
        peak = point["device_peak_to_mean"]
        rows.append(_row(family(point), f"{size} × mean", size, point["change"], peak))
    base = result["baseline"]["device_peak_to_mean"]
    widest = max(base, *(row["x"] for row in rows))
    figure = scatter(
        rows,
        "busiest device / mean load",
        reference=round(base, 4),
        x_range=(-0.05 * widest, round(1.08 * widest, 3)),
        highest=max(row["change"] for row in rows),
    )
    kinds: dict[str, int] = {}
    for trace in figure["data"]:
        own, _, expanded = trace["name"].partition(", expanded to ")
        how, _, rest = expanded.partition(", ")
        number = kinds.setdefault(f"{own}, {rest}" if rest else own, len(kinds))
        if how == "own device":  # the only way by default: a shorter name fits a phone
            trace["name"] = ", ".join(filter(None, (own, "expanded", rest)))
        colour, symbol, _ = LOOKS[number % len(LOOKS)]
        _recolour(trace, colour)
        # expanded or not: one colour and shape, open and dashed or filled and solid
        trace["line"] |= {"dash": "dash" if expanded else "solid"}
        trace["marker"] |= {"size": 8, "symbol": f"{symbol}-open" if expanded else symbol}
        trace["textfont"] |= {"size": 10}
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
    return figure


def sweep_values(
    result: Mapping[str, Any] | None, note: str = "", apart: str = ""
) -> dict[str, Any]:
    """Return the values of the template sweep_section; its figure goes under "sweep".

    Args:
        result: of `sweep`, or read back; None: no section.
        note: further words on how it was measured.
        apart: why its figures differ from others on the page.
    """
    words = [] if result is None else sweep_words(result)
    return {"swept": result, "swept_words": words, "swept_note": note, "swept_apart": apart}


def sweep_words(result: Mapping[str, Any]) -> list[str]:
    """Write the result of a sweep as sentences: at the mean, and the dial below it."""
    lines = []
    for size, meaning in ((1.0, "Every device at the mean"), (0.5, "Half of the work")):
        near = [p for p in result["points"] if p["device_peak_to_mean"] <= size + 1e-9]
        if not near:
            continue
        best = _simplest(near)
        plain = [p for p in near if not p["compensate"]]
        line = f"{meaning}: {signed_percent(best['change'])} perplexity"
        if best["compensate"] and plain:
            without = signed_percent(_simplest(plain)["change"])
            line += f" with stand-ins, {without} without"
        lines.append(f"{line}.")
    return lines


def _simplest(points: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the smallest change, or one within its standard error that needs no expansion."""
    best = min(points, key=lambda p: p["change"])
    near = [p for p in points if p["change"] <= best["change"] + (best["standard_error"] or 0)]
    return min(near, key=lambda p: (p["expand"] is not None, p["change"]))


# -- decode ----------------------------------------------------------------------------------------


def decode_figure(result: Mapping[str, Any]) -> Figure:
    """Draw perplexity change against experts read, a line per batch size, with and without
    stand-ins."""
    points, hosted = result["points"], result["experts_a_device"]
    rows = []
    for point in sorted(points, key=_order):
        most = point["max_active"]
        setting = f"max_active={most}"
        rows.append(_row(_way(point), setting, str(most), point["change"], point["read"]))
    figure = scatter(
        rows,
        f"experts read, busiest device (of {hosted})",
        reference=max(point["read_before"] for point in points),
        x_range=(0.6, hosted + 0.2),
        highest=max(row["change"] for row in rows),
    )
    batches = sorted({point["batch"] for point in points})
    for trace in figure["data"]:
        size, _, way = trace["name"].partition(" sequences, ")
        colour, symbol, _ = LOOKS[batches.index(int(size)) % len(LOOKS)]
        dash, ending = _DECODE_LOOKS[way]
        _recolour(trace, colour)
        trace["line"] |= {"dash": dash}
        trace["marker"] |= {"symbol": symbol + ending}
    return figure


def decode_words(result: Mapping[str, Any]) -> list[str]:
    """Write a sentence per batch size: the deepest cut that costs less than half a percent."""
    lines = []
    for batch, group in groupby(sorted(result["points"], key=_order), lambda p: p["batch"]):
        points = list(group)
        near = [p for p in points if p["stand_ins"] and p["change"] <= 0.005]
        if not near:
            continue
        best = min(near, key=lambda p: (round(p["read"], 1), p["change"]))
        alone = [p for p in points if not p["stand_ins"] and p["max_active"] == best["max_active"]]
        before = max(p["read_before"] for p in points if not p["placed"])  # experts in order
        line = (
            f"{batch} sequences per step: with max_active={best['max_active']} the device that "
            f"reads most reads {best['read']:.2f} of its {result['experts_a_device']} experts, not "
            f"{before:.2f} ({1 - best['read'] / before:.0%} fewer), for "
            f"{100 * best['change']:+.2f}% perplexity with stand-ins"
        )
        if best["placed"]:
            line += " and the experts placed"
        if alone:
            without = "with neither" if best["placed"] else "without"
            line += f", {100 * alone[0]['change']:+.2f}% {without}"
        lines.append(line + ".")
    return lines


def decode_values(result: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values of the template decode_section; its figure goes under "decode"."""
    return {"decoded": result, "decoded_words": [] if result is None else decode_words(result)}


def _order(point: Mapping[str, Any]) -> tuple[int, bool, bool, float]:
    return (point["batch"], point["stand_ins"], point["placed"], point["read"])


def _way(point: Mapping[str, Any]) -> str:
    kind = "stand-ins" if point["stand_ins"] else "dropped alone"
    return f"{point['batch']} sequences, {kind}{', placed' if point['placed'] else ''}"


SMALLEST = 1e-6
"""Factors below this are written as 0: one assignment per unit, whatever the batch."""


def family(point: Mapping[str, Any]) -> str:
    """Name the kind of cap of a point, shared by points of other factors.

    >>> family({"unit": "device", "keep": "score", "expand": None, "compensate": True})
    'Compensated Drop per device'
    """
    kind = "Compensated" if point["compensate"] else "Token"
    words = [f"{kind} Drop per {point['unit']}"]
    if point["expand"] is not None:
        words.append(f"expanded to {point['expand'].replace('_', ' ')}")
    if point["keep"] != "score":
        words.append(point["keep"])
    return ", ".join(words)


def factor(value: float) -> str:
    """Write a capacity factor.

    >>> factor(1.25), factor(1e-9)
    ('1.25', '0')
    """
    return "0" if value < SMALLEST else f"{value:g}"


def families(points: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Group the points by kind of cap, in their order."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for point in points:
        found.setdefault(family(point), []).append(point)
    return found


def sweep_rows(result: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Return what a sweep is of, and its table: header, and a row per cap, a star on the best."""
    base, subject = result["baseline"], result["subject"]
    about = (
        f"{result['model']}: {subject['layers']} MoE layers of {subject['experts']} experts on "
        f"{subject['devices']} devices, {sum(result['tokens_by_text'].values())} tokens of "
        f"{len(result['tokens_by_text'])} texts, {result['batch_size']} sequences of "
        f"{result['sequence_length']} tokens per batch. Without a cap the busiest device has "
        f"{times(base['device_peak_to_mean'])} the mean. A star: no other cap here beats it both "
        "in the busiest device and in perplexity, beyond the error."
    )
    header = ["cap", "factor", "busiest device", "dropped", "perplexity", "next tokens changed", ""]
    rows = []
    for name, points in families(result["points"]).items():
        for point in points:
            error, change = point["standard_error"], f"{100 * point['change']:+.2f}%"
            rows.append([
                name,
                factor(point["capacity_factor"]),
                times(point["device_peak_to_mean"]),
                percent(point["dropped_share"]),
                change if error is None else f"{change} ± {100 * error:.2f}",
                percent(point["changed_next_tokens"]),
                "*" if point["on_frontier"] else "",
            ])  # fmt: skip
    return about, header, rows


def sweep_table(result: Mapping[str, Any]) -> str:
    """Write a sweep as Markdown: a row per cap, those that nothing beats in bold."""
    about, header, rows = sweep_rows(result)
    lines = [about.replace("A star:", "Bold:"), ""]
    lines += [f"| {' | '.join(header[:-1])} |", f"| --- |{' ---: |' * (len(header) - 2)}"]
    for *cells, star in rows:
        shown = [f"**{cell}**" for cell in cells] if star else cells
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"
