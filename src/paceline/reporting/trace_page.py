"""The page of `paceline report`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.analysis.cap_words import IN_ORDER
from paceline.files import write_text
from paceline.reporting.page import render
from paceline.reporting.sweep_page import sweep_figure, sweep_values
from paceline.reporting.trace_figures import trace_figures


def write_report(result: Mapping[str, Any], path: Path) -> None:
    """Write the page, readable by its owner only: loads say something about the text.

    Raises:
        OSError: if the file can't be written.
    """
    write_text(path, report_page(result), private=True)


def report_page(result: Mapping[str, Any]) -> str:
    """The HTML page of a result of `cap_study` with `environment`, and `planned` where it is known.

    Its slider works on the result's own figures, which the page holds as JSON.
    """
    figures, swept = trace_figures(result), result.get("sweep")
    shown = figures if swept is None else {**figures, "sweep": sweep_figure(swept)}
    gammas = sorted({way["gamma"] for way in result["ways"] if way["gamma"] is not None})
    return render(
        "report.html.j2",
        shown,
        title=f"Paceline: {result['model'] or result['trace']}",
        results=result,
        plots=list(figures),
        gammas=gammas,
        **sweep_values(swept),
        slider={
            "gammas": [*gammas, None],
            "layers": result["layers"],
            "ways": result["ways"],
            "reference": IN_ORDER,
        },
    )
