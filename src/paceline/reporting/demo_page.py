"""The page of `paceline demo`: index.html beside results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.reporting import figures
from paceline.reporting.files import to_json, write_text
from paceline.reporting.page import render
from paceline.reporting.style import load_colours

KINDS = {"one_domain": "One-domain batches", "mixed": "Mixed batches"}
CHOSEN = "device-1.25-score"


def write_demo(results: Mapping[str, Any], folder: Path) -> None:
    """Write both files; the texts are public and only counts are shown, so both are readable.

    Raises:
        OSError: if the folder can't be written.
    """
    write_text(folder / "results.json", to_json(results), private=False)
    write_text(folder / "index.html", demo_page(results), private=False)


def demo_page(results: Mapping[str, Any]) -> str:
    """The HTML page of a demo run."""
    return render(
        "demo.html.j2",
        demo_figures(results),
        title="Paceline demo: stragglers in a Mixture-of-Experts model",
        results=results,
        kinds=KINDS,
        chosen=_chosen(results),
        chosen_key=CHOSEN,
        floor=figures.FLOOR,
    )


def demo_figures(results: Mapping[str, Any]) -> dict[str, figures.Figure]:
    """All figures, by the id of their place on the page."""
    return {
        "map-one-domain": _map(results, _domain_panels(results)),
        "map-mixed": _map(results, {"mixed": results["stragglers"]["mixed"]["layers"]}),
        "peaks": _peaks(results),
        "devices": _devices(results),
        **{f"balance-{kind}": _quality(results, kind, timed=False) for kind in KINDS},
        **{f"time-{kind}": _quality(results, kind, timed=True) for kind in KINDS},
    }


def _chosen(results: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(row for row in results["policies"] if row["key"] == CHOSEN)


def _domain_panels(results: Mapping[str, Any]) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Layers of every domain, the most unbalanced domain first."""
    domains = results["stragglers"]["one_domain"]["by_domain"]
    order = sorted(domains, key=lambda d: -domains[d]["overall"]["device_peak_to_mean"])
    return {domain: domains[domain]["layers"] for domain in order}


def _map(
    results: Mapping[str, Any], panels: Mapping[str, Sequence[Mapping[str, Any]]]
) -> figures.Figure:
    names = [f"layer {n}" for n in range(results["model"]["layers"])]
    loads = {
        title: [figures.relative(layer["expert_loads_before"]) for layer in layers]
        for title, layers in panels.items()
    }
    figure = figures.load_map(loads, results["model"]["experts_per_device"], names)
    # One scale for all maps of the page, so that colours can be compared.
    highest = max(
        max(figures.relative(layer["expert_loads_before"]))
        for part in (*_domain_panels(results).values(), results["stragglers"]["mixed"]["layers"])
        for layer in part
    )
    figure["data"][0] |= {"zmax": highest, "colorscale": load_colours(highest)}
    return figure


def _peaks(results: Mapping[str, Any]) -> figures.Figure:
    stragglers = results["stragglers"]
    groups = {
        **{d: x["overall"] for d, x in stragglers["one_domain"]["by_domain"].items()},
        "all mixed": stragglers["mixed"]["overall"],
    }
    return figures.peak_bars(
        list(groups),
        [round(x["device_peak_to_mean"], 4) for x in groups.values()],
        [round(x["expert_peak_to_mean"], 4) for x in groups.values()],
    )


def _devices(results: Mapping[str, Any]) -> figures.Figure:
    example, row = results["example"], _chosen(results)
    mean = example["assignments"] / results["model"]["devices"]
    loads = {
        key: [round(load / mean, 4) for load in values]
        for key, values in example["device_loads"].items()
    }
    base = results["policies"][0]["key"]
    return figures.device_bars(loads[base], {row["label"]: loads[CHOSEN]}, row["capacity_factor"])


def _quality(results: Mapping[str, Any], kind: str, *, timed: bool) -> figures.Figure:
    rows = []
    for row in results["policies"][1:]:
        part = row[kind]
        speedup = part["emulated"]["speedup"]
        rows.append(
            {
                "label": row["label"],
                "family": row["family"],
                "change": round(100 * part["perplexity_change"]["mean"], 4),
                "peak": round(part["device_peak_to_mean"], 4),
                "speedup": round(speedup["median"], 4),
                "low": round(speedup["minimum"], 4),
                "high": round(speedup["maximum"], 4),
            }
        )
    if timed:
        title = "emulated speed-up of the expert part (no cap / policy, ×)"
        return figures.scatter(rows, "speedup", title, spread=True)
    return figures.scatter(rows, "peak", "busiest device after the policy (load / mean)")
