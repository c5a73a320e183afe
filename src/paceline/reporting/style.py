"""Colours and the common look of all figures."""

from __future__ import annotations

from typing import Any

INK, MUTED, GRID, PAPER = "#1d2733", "#5b6875", "#e3e8ee", "#ffffff"
ACCENT, BEFORE, AFTER, PALE = "#0b6e8f", "#c8553d", "#0b6e8f", "#a9c1cc"
PAGE = {
    "ink": INK,
    "muted": MUTED,
    "line": "#dde4ea",
    "paper": PAPER,
    "wash": "#f4f7f9",
    "accent": ACCENT,
}
"""Colours of a page around its figures."""

STAGE_COLOURS = {
    "gate": "#8d99a6",
    "route": "#c8553d",
    "dispatch": "#6a4fb3",
    "experts": "#0b6e8f",
    "combine": "#d08a1d",
}
"""Colours of the stages of a MoE layer."""

LOOKS = (
    ("#0b6e8f", "circle", "solid"),
    ("#c8553d", "square", "dash"),
    ("#6a4fb3", "diamond", "dot"),
    ("#d08a1d", "triangle-up", "dashdot"),
    ("#2e8b57", "x", "longdash"),
    ("#8d99a6", "star", "longdashdot"),
    ("#b0578d", "triangle-down", "solid"),
    ("#1d6fd0", "cross", "dash"),
)
"""Colour, marker and dash of the lines of a figure, in order: they differ in each."""

DARK = {
    INK: "#e6ebf0", MUTED: "#a3b1bf", GRID: "#2f3b47", PAPER: "#17212b", "#dde4ea": "#2f3b47",
    "#f4f7f9": "#0f161d", "#e9f4f8": "#1d3644", ACCENT: "#4fb3d4", PALE: "#5f7f8d",
    "#6a4fb3": "#a591e0", "#1d6fd0": "#6fa8ea",
}  # fmt: skip
"""Colour -> the colour in its place where the reader prefers a dark page."""

# Loads relative to the mean: blue is idle, pale is the mean, red is a straggler.
_COLD, _MEAN, _HOT, _HOTTEST = "#2f6f9f", "#f6f3ec", "#e0763f", "#7d1420"


def load_colours(highest: float) -> list[list[Any]]:
    """Return a colour scale over [0, highest] with the mean (1.0) pale, whatever the highest is."""
    mean = 1 / max(highest, 1.01)
    middle = mean + (1 - mean) * 0.45
    return [[0, _COLD], [mean, _MEAN], [middle, _HOT], [1, _HOTTEST]]


def layout(height: int, **more: Any) -> dict[str, Any]:
    """Return the layout of all figures; on a dark page its colours become those of `DARK`."""
    return {
        "height": height,
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', sans-serif", "color": INK},
        "margin": {"l": 62, "r": 18, "t": 20, "b": 56},
        "legend": {
            "orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "font": {"size": 11},
        },
        "hoverlabel": {"bgcolor": INK, "font": {"color": PAPER}},
        **more,
    }  # fmt: skip


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis with a title."""
    return {
        "title": {"text": title, "standoff": 10},
        "gridcolor": GRID,
        "zerolinecolor": GRID,
        "linecolor": MUTED,
        "automargin": True,
        **more,
    }


def level(value: float, dash: str = "dot", colour: str = MUTED) -> dict[str, Any]:
    """Return a horizontal line across the plot."""
    return _line(colour, dash, xref="paper", x0=0, x1=1, y0=value, y1=value)


def upright(value: float) -> dict[str, Any]:
    """Return a dotted vertical line across the plot."""
    return _line(MUTED, "dot", yref="paper", y0=0, y1=1, x0=value, x1=value)


def _line(colour: str, dash: str, **ends: Any) -> dict[str, Any]:
    return {"type": "line", **ends, "line": {"color": colour, "width": 1.5, "dash": dash}}
