"""The page of `paceline demo`: index.html beside results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.demo.assets import shipped_decode, shipped_sweep
from paceline.demo.plan import HEADLINE, KINDS
from paceline.files import to_json, write_text
from paceline.reporting.figures import Figure, device_bars, peak_bars, relative
from paceline.reporting.load_map import load_map
from paceline.reporting.pages import render
from paceline.reporting.quality_figures import (
    FLOOR,
    decode_figure,
    decode_values,
    scatter,
    sweep_figure,
    sweep_values,
)
from paceline.reporting.style import load_colours


def write_demo(results: Mapping[str, Any], folder: Path) -> None:
    """Write both files; the texts are public and only counts are shown, so both are readable.

    Raises:
        OSError: if the folder can't be written.
    """
    write_text(folder / "results.json", to_json(results), private=False)
    write_text(folder / "index.html", demo_page(results), private=False)


def demo_page(results: Mapping[str, Any]) -> str:
    """The HTML page of a demo run."""
    swept, decoded = shipped_sweep(), shipped_decode()
    shipped = {"sweep": sweep_figure(swept)} if swept else {}
    shipped |= {"decode": decode_figure(decoded)} if decoded else {}
    return render(
        "demo.html.j2",
        {**demo_figures(results), **shipped},
        title="Paceline demo: stragglers in a Mixture-of-Experts model",
        results=results,
        kinds={kind: words.capitalize() for kind, words in KINDS.items()},
        chosen=_chosen(results),
        chosen_key=HEADLINE,
        floor=FLOOR,
        **decode_values(decoded),
        **sweep_values(swept, "; not in this run, its figures come with the package"),
    )


def demo_figures(results: Mapping[str, Any]) -> dict[str, Figure]:
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
    return next(row for row in results["policies"] if row["key"] == HEADLINE)


def _domain_panels(results: Mapping[str, Any]) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Layers of every domain, the most unbalanced domain first."""
    domains = results["stragglers"]["one_domain"]["by_domain"]
    order = sorted(domains, key=lambda d: -domains[d]["overall"]["device_peak_to_mean"])
    return {domain: domains[domain]["layers"] for domain in order}


def _map(results: Mapping[str, Any], panels: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    names = [f"layer {n}" for n in range(results["model"]["layers"])]
    loads = {
        title: [relative(layer["expert_loads_before"]) for layer in layers]
        for title, layers in panels.items()
    }
    devices = [results["model"]["expert_to_device"]] * len(names)
    figure = load_map(loads, devices, names)
    # One scale for all maps of the page, so that colours can be compared.
    highest = max(
        max(relative(layer["expert_loads_before"]))
        for part in (*_domain_panels(results).values(), results["stragglers"]["mixed"]["layers"])
        for layer in part
    )
    figure["data"][0] |= {"zmax": highest, "colorscale": load_colours(highest)}
    return figure


def _peaks(results: Mapping[str, Any]) -> Figure:
    stragglers = results["stragglers"]
    groups = {
        **{d: x["overall"] for d, x in stragglers["one_domain"]["by_domain"].items()},
        "all mixed": stragglers["mixed"]["overall"],
    }
    return peak_bars(
        list(groups),
        [round(x["device_peak_to_mean"], 4) for x in groups.values()],
        [round(x["expert_peak_to_mean"], 4) for x in groups.values()],
    )


def _devices(results: Mapping[str, Any]) -> Figure:
    example, row = results["example"], _chosen(results)
    mean = example["assignments"] / results["model"]["devices"]
    loads = {
        key: [round(load / mean, 4) for load in values]
        for key, values in example["device_loads"].items()
    }
    base = results["policies"][0]["key"]
    return device_bars(loads[base], {row["label"]: loads[HEADLINE]}, row["capacity_factor"])


def _quality(results: Mapping[str, Any], kind: str, *, timed: bool) -> Figure:
    """Perplexity change against balance or time; both kinds of batches share the scales."""
    rows = {each: [_point(row, each, timed) for row in results["policies"][1:]] for each in KINDS}
    base = results["policies"][0][kind]["device_peak_to_mean"]
    ends = [row[key] for part in rows.values() for row in part for key in ("x", "low", "high")]
    ends += [1.0, results["policies"][0]["one_domain"]["device_peak_to_mean"]] if not timed else [1]
    margin = 0.06 * (max(ends) - min(ends))
    if not timed:
        rows = {each: [_without_range(row) for row in part] for each, part in rows.items()}
    return scatter(
        rows[kind],
        "emulated speed-up of the expert part (×)" if timed else "busiest device (load / mean)",
        reference=1.0 if timed else round(base, 4),
        x_range=(round(min(ends) - margin, 3), round(max(ends) + margin, 3)),
        highest=max(row["change"] for part in rows.values() for row in part),
    )


def _point(row: Mapping[str, Any], kind: str, timed: bool) -> dict[str, Any]:
    part = row[kind]
    speedup = part["emulated"]["speedup"]
    x = speedup["median"] if timed else part["device_peak_to_mean"]
    return {
        "label": row["label"],
        "short": f"{row['capacity_factor']:g}",
        "family": row["family"],
        "change": round(100 * part["perplexity_change"]["mean"], 4),
        "x": round(x, 4),
        "low": round(speedup["min"], 4) if timed else x,
        "high": round(speedup["max"], 4) if timed else x,
    }


def _without_range(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("low", "high")}
