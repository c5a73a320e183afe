"""Self-contained HTML pages: no request leaves them, Plotly is inlined once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.analysis.results import CapStudy, PlanResult
from paceline.analysis.verdict import IN_ORDER
from paceline.files import write_text
from paceline.reporting.figures import (
    ladder_figure,
    ladder_texts,
    layer_peaks,
    load_map,
    relative,
)
from paceline.reporting.quality_figures import (
    factor,
    families,
    sweep_figure,
    sweep_values,
)
from paceline.reporting.style import DARK, PAGE
from paceline.reporting.trace_figures import trace_figures
from paceline.text import percent, signed_percent, times


def render(template: str, figures: Mapping[str, Any], **values: Any) -> str:
    """Fill a template of `reporting/templates`.

    Args:
        figures: element id -> Plotly figure as a dictionary.
        values: names in the template; strings are escaped.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=PackageLoader("paceline.reporting", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent, "signed": signed_percent, "times": times, "headline": headline,
    }  # fmt: skip
    return environment.get_template(template).render(
        figures=figures, plotly_js=get_plotlyjs(), colours=PAGE, dark=DARK, **values
    )


_HEADLINE_WORDS = 15


def headline(verdict: str) -> str:
    """Shorten a verdict to a headline: its first sentence without what stands in brackets.

    >>> headline("An average device waits 38% (1.60× the mean). Perfect balance would help.")
    'An average device waits 38%.'
    """
    sentence = re.sub(r" \([^)]*\)", "", re.split(r"(?<=\.) ", verdict, maxsplit=1)[0])
    if len(sentence.split()) > _HEADLINE_WORDS and ":" in sentence:
        sentence = sentence.partition(":")[0] + "."
    return sentence


def write_page(page: str, path: Path) -> None:
    """Write a page of a user's loads, readable by its owner only: loads reveal some of the text.

    Raises:
        OSError: if the file can't be written.
    """
    write_text(path, page, private=True)


def loads_page(result: Mapping[str, Any]) -> str:
    """Return the page of a model's loads, from a result of `observe_loads` with `verdict`."""
    layers = result["layers"]
    names = [str(number) for number in range(len(layers))]
    peaks = {"busiest device": [x["device_peak_to_mean_before"] for x in layers]}
    if result["policy"] is not None:
        peaks["with the policy"] = [x["device_peak_to_mean_after"] for x in layers]
    peaks["busiest expert"] = [x["expert_peak_to_mean_before"] for x in layers]
    plots = {"peaks": layer_peaks(names, peaks)}
    if len({layer["experts"] for layer in layers}) == 1:  # one map needs one number of experts
        loads = [relative(layer["expert_loads_before"]) for layer in layers]
        devices = [layer["expert_to_device"] for layer in layers]
        plots["map"] = load_map({"": loads}, devices, [f"layer {name}" for name in names])
    return render(
        "loads.html.j2", plots, title="Paceline: expert loads", results=result, plots=list(plots)
    )


def report_page(study: CapStudy, planned: PlanResult | None, more: Mapping[str, Any]) -> str:
    """Return the page of a trace.

    Its slider works on the study's own figures, which the page holds as JSON.

    Args:
        study: a result of `cap_study`.
        planned: a result of `make_plan`, where there is one.
        more: system information, the command, and where there are any: `sweep`, `plan_text`,
            `plan_file` and `plan_link`.
    """
    figures, swept, result = trace_figures(study, planned), more.get("sweep"), study.to_dict()
    shown = figures if swept is None else {**figures, "sweep": sweep_figure(swept)}
    gammas = sorted({way.gamma for way in study.ways if way.gamma is not None})
    return render(
        "report.html.j2",
        shown,
        title=f"Paceline: {study.model or study.trace}",
        results={**result, "planned": planned, **more},
        plots=list(figures),
        gammas=gammas,
        **sweep_values(swept),
        slider={
            "gammas": [*gammas, None],
            "layers": study.layers,
            "ways": result["ways"],
            "reference": IN_ORDER,
        },
    )


def sweep_page(result: Mapping[str, Any]) -> str:
    """Return the page of a result of `sweep`."""
    return render(
        "sweep.html.j2",
        {"sweep": sweep_figure(result)},
        title="Paceline: caps of every size",
        results=result,
        **sweep_values(result),
        families=families(result["points"]),
        factor=factor,
        idle=sorted({p["capped_nothing"] for p in result["points"] if p.get("capped_nothing")}),
    )


def ladder_page(ladder: Mapping[str, Any]) -> str:
    """Return the page of the ladder of `paceline tune`."""
    return render(
        "ladder.html.j2",
        {"ladder": ladder_figure(ladder), "texts": ladder_texts(ladder)},
        title="Paceline: a ladder of bounds",
        results=ladder,
        chosen=next((r for r in ladder["rungs"] if r["bound"] == ladder["chosen"]), None),
    )
