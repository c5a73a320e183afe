"""Picture of quality against the experts that a decode step reads, rule by rule.

    python research/active_picture.py --out docs/figures/active_experts.svg

Written as .svg or .png (needs the extra `figures` and a Chrome or Chromium) or .html, by ending.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from paceline.reporting.style import ACCENT, BEFORE, INK, axis, layout

ROOT = Path(__file__).resolve().parent.parent
RESULTS = (
    ROOT / "benchmarks" / "results" / "active_experts.json",
    ROOT / "research" / "results" / "active_rules.json",
)
WIDTH, HEIGHT = 1100, 520
WAYS = {
    # name in the picture: family, stand-ins, colour, marker, dash
    "max_active, stand-ins, placed": ("max_active, placed", True, ACCENT, "star", "solid"),
    "max_active, stand-ins": ("max_active", True, ACCENT, "circle", "solid"),
    "max_active": ("max_active", False, ACCENT, "circle-open", "dot"),
    "Lynx, rebuilt": ("Lynx", False, "#d08a1d", "square", "dash"),
    "XShare, rebuilt": ("XShare", False, "#2e8b57", "triangle-up", "dash"),
    "OEA, rebuilt": ("OEA", False, "#6a4fb3", "diamond", "dashdot"),
    "top-k truncation": ("top-k truncation", False, BEFORE, "x", "longdash"),
}


def picture(rows: Sequence[Mapping[str, Any]], kind: str, batches: Sequence[int]) -> go.Figure:
    """Draw perplexity change against experts read by the busiest device, a panel per batch size."""
    titles = [f"{batch} sequences, {kind}" for batch in batches]
    figure = make_subplots(cols=len(batches), shared_yaxes=True, subplot_titles=titles)
    for column, batch in enumerate(batches, 1):
        here = [r for r in rows if r["kind"] == kind and r["batch"] == batch]
        for name, (family, stand_ins, colour, symbol, dash) in WAYS.items():
            mine = [r for r in here if r["family"] == family and r["stand_ins"] == stand_ins]
            mine = [r for r in mine if not isinstance(r.get("most"), list)]
            mine.sort(key=lambda r: r["most_active_after"])
            figure.add_scatter(
                row=1,
                col=column,
                x=[r["most_active_after"] for r in mine],
                y=[100 * max(r["perplexity_change"]["mean"], 1e-4) for r in mine],
                error_y={
                    "array": [100 * r["perplexity_change"]["standard_error"] for r in mine],
                    "thickness": 1,
                },
                mode="lines+markers",
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                line={"color": colour, "dash": dash},
                marker={"symbol": symbol, "size": 9, "color": colour},
            )
    figure.update_layout(layout(HEIGHT, legend={"orientation": "h", "y": 1.14, "x": 0}))
    figure.update_xaxes(axis("experts read by the device that reads most, of 4"))
    figure.update_yaxes(axis("", type="log", tickvals=[0.01, 0.1, 1, 10], ticksuffix="%"))
    figure.update_yaxes(title="perplexity change", col=1)
    figure.update_layout(font={"color": INK})
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, nargs="+", default=RESULTS)
    parser.add_argument("--kind", default="one domain", choices=["one domain", "mixed"])
    given = parser.parse_args()
    rows = [
        row
        for file in given.results
        for row in json.loads(file.read_text(encoding="utf-8"))["results"]
    ]
    figure = picture(rows, given.kind, sorted({row["batch"] for row in rows}))
    if given.out.suffix == ".html":
        figure.write_html(given.out, include_plotlyjs=True)
    else:
        figure.write_image(given.out, width=WIDTH, height=HEIGHT)


if __name__ == "__main__":
    main()
