"""Pictures of results/paper_figures.json: the paper's Figures 7, 8 and 9 on our traces and model.

    python research/paper_pictures.py figure9 --out figure9.svg
    python research/paper_pictures.py all --out FOLDER        SVG of each

Written as .svg or .png (needs the extra `figures` and a Chrome or Chromium) or .html, by ending.
docs/figures holds those of docs/study.md. `python research/paper_figures.py all --write` measures
anew what is drawn here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from paceline.reporting.style import ACCENT, BEFORE, INK, MUTED, axis, layout

RESULTS = Path(__file__).resolve().parent / "results" / "paper_figures.json"
WIDTH, HEIGHT = 1000, 460
COLOURS = (ACCENT, BEFORE, "#6a4fb3", "#d08a1d", INK)
SYMBOLS = ("circle", "square", "diamond", "x", "triangle-up")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
"""A line has a colour, a marker and a dash of its own: no colour tells anything alone."""
METHODS = ("none", "Expert Drop", "Token Drop, 1.5", "Token Drop, 1", "Expanded Drop, 1")
"""Whose loads are drawn."""

Rows = Sequence[Mapping[str, Any]]


def figure7(rows: Rows) -> go.Figure:
    """Draw the dropped share against the capacity factor, a line per trace and unit."""
    traffics = list(dict.fromkeys(row["traffic"] for row in rows))
    lines = []
    for row in rows:
        gammas = [name for name in row if name not in ("traffic", "unit")]
        number = traffics.index(row["traffic"])
        unit = row["unit"]
        lines.append(
            go.Scatter(
                x=[float(gamma) for gamma in gammas],
                y=[100 * row[gamma] for gamma in gammas],
                name=f"{row['traffic']}, cap a{'n' if unit == 'expert' else ''} {unit}",
                mode="lines+markers",
                line={"color": COLOURS[number], "dash": "solid" if unit == "expert" else "dot"},
                marker={"symbol": SYMBOLS[number] + ("" if unit == "expert" else "-open"),
                        "size": 8},
            )
        )  # fmt: skip
    return _drawn(lines, axis("capacity factor"), axis("dropped assignments (%)"))


def figure8(rows: Rows, most: int = 16) -> go.Figure:
    """Draw the mean gate score by rank; of the samples only the chosen experts' are recorded."""
    lines = [
        go.Scatter(
            x=list(range(1, len(row["mean_score"][:most]) + 1)),
            y=row["mean_score"][:most],
            name=f"{row['traffic']} ({row['k']} a token)",
            mode="lines+markers",
            line={"color": COLOURS[number], "dash": DASHES[number]},
            marker={"symbol": SYMBOLS[number], "size": 9},
        )
        for number, row in enumerate(rows)
    ]
    return _drawn(lines, axis("rank of the expert in a token's scores", dtick=1),
                  axis("mean gate score", rangemode="tozero"))  # fmt: skip


def figure9(rows: Rows) -> go.Figure:
    """Loads of the experts of the least balanced layer, before and after every method."""
    worst = max((row for row in rows if row["method"] == "none"), key=lambda r: r["peak_to_mean"])
    drawn = [row for row in rows if row["layer"] == worst["layer"] and row["method"] in METHODS]
    lines = [
        go.Scatter(
            x=list(range(1, len(row["loads"]) + 1)),
            y=row["loads"],
            name="no cap" if row["method"] == "none" else row["method"],
            mode="lines+markers",
            line={"color": COLOURS[number], "dash": DASHES[number], "width": 1.5},
            marker={"symbol": SYMBOLS[number], "size": 7},
        )
        for number, row in enumerate(drawn)
    ]
    figure = _drawn(
        lines,
        axis(f"experts of layer {worst['layer']}, busiest without a cap first", zeroline=False),
        axis("load / mean without a cap", rangemode="tozero"),
    )
    figure.add_hline(y=1, line={"color": MUTED, "dash": "dot", "width": 1})
    return figure


FIGURES: dict[str, Callable[[Rows], go.Figure]] = {
    "figure7": figure7,
    "figure8": figure8,
    "figure9": figure9,
}


def _drawn(lines: Sequence[go.Scatter], x: Any, y: Any) -> go.Figure:
    legend = {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0}
    return go.Figure(list(lines), layout(HEIGHT, xaxis=x, yaxis=y, legend=legend))


def write(figure: go.Figure, path: Path) -> None:
    """Write a figure in the form that its name ends with."""
    if path.suffix == ".html":
        figure.write_html(path, include_plotlyjs=True)
    else:
        figure.write_image(path, width=WIDTH, height=HEIGHT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=(*FIGURES, "all"))
    parser.add_argument("--out", type=Path, required=True, help="file; with all a folder")
    parser.add_argument("--results", type=Path, default=RESULTS, help="what paper_figures.py wrote")
    options = parser.parse_args()
    found = json.loads(options.results.read_text(encoding="utf-8"))
    if options.which != "all":
        write(FIGURES[options.which](found[options.which]), options.out)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        write(draw(found[name]), options.out / f"{name}.svg")


if __name__ == "__main__":
    main()
