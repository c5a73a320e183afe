"""`paceline demo` and its page: figures, and findings in sentences computed from the results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.analysis.verdict import ceiling, waiting
from paceline.bench.emulated import ExpertTime
from paceline.demo.assets import shipped_decode, shipped_sweep
from paceline.demo.run import (
    KIND,
    DemoResult,
    Findings,
    LayerTable,
    PolicyPart,
    PolicyRow,
    run_demo,
)
from paceline.demo.settings import HEADLINE, KINDS, DemoSettings
from paceline.evaluation.results import PerplexityChange
from paceline.files import MOST_TEXT, read_plain, write_text
from paceline.progress import Progress
from paceline.reporting.figures import Figure, device_bars, load_map, peak_bars, relative
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
from paceline.text import percent, signed_percent, times

_SMALL_GAIN = 1.02  # a median speed-up below this is noise
_SMALL_CHANGE = 0.0005


def write_demo(
    out: str | Path = "paceline-demo",
    *,
    settings: DemoSettings | None = None,
    progress: Progress | None = None,
    command: str = "paceline demo",
) -> DemoResult:
    """Run the demo and write `index.html` and `results.json`; the texts are public, so both are.

    Args:
        out: folder, created if need be.
        settings: size of the run; None is the full one.
        progress: called after every batch.
        command: of the user, for the page's footer.

    Raises:
        FileNotFoundError: if the model or the texts are missing from the installation.
        OSError: if `out` can't be written.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)  # fail before the work, not after it
    result = run_with_findings(settings, progress, command)
    save_demo(result, folder)
    return result


def run_with_findings(
    settings: DemoSettings | None = None,
    progress: Progress | None = None,
    command: str = "paceline demo",
) -> DemoResult:
    """Run the demo and add its findings; parameters and errors are those of `write_demo`."""
    result = run_demo(settings, progress, command)
    result.findings = findings(result)
    return result


def save_demo(result: DemoResult, folder: Path) -> None:
    """Write `index.html` and `results.json` into a folder, created if need be.

    Raises:
        OSError: if the folder can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "results.json", result.to_json(), private=False)
    write_text(folder / "index.html", demo_page(result), private=False)


def holds_other_results(folder: Path) -> bool:
    """Return True if `save_demo` would replace files that are not of a demo."""
    names = ("results.json", "index.html")
    if not any((folder / name).exists() for name in names):
        return False
    try:
        found = json.loads(read_plain(folder / names[0], MOST_TEXT))
        return not str(found["schema"]).startswith(KIND)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return True


def demo_page(result: DemoResult) -> str:
    """Render the HTML page of a demo run."""
    swept, decoded = (
        None if found is None else found.to_dict() for found in (shipped_sweep(), shipped_decode())
    )
    shipped = {"sweep": sweep_figure(swept)} if swept else {}
    shipped |= {"decode": decode_figure(decoded)} if decoded else {}
    return render(
        "demo.html.j2",
        {**demo_figures(result), **shipped},
        title="Paceline demo: stragglers in a Mixture-of-Experts model",
        results=result.to_dict(),
        kinds={kind: words.capitalize() for kind, words in KINDS.items()},
        chosen=_chosen(result),
        chosen_key=HEADLINE,
        floor=FLOOR,
        **decode_values(decoded),
        **sweep_values(
            swept, "; not in this run, its figures come with the package", _apart(result, swept)
        ),
    )


def _apart(result: DemoResult, swept: Mapping[str, Any] | None) -> str:
    """Say why the sweep has another figure for the cap of the headline."""
    row = _chosen(result)
    same = [
        point
        for point in (swept or {"points": []})["points"]
        if (point["unit"], point["compensate"], point["expand"]) == ("device", True, None)
        and point["capacity_factor"] == row.capacity_factor
    ]
    if not same:
        return ""
    there = signed_percent(row.one_domain.perplexity_change.mean)
    return (
        "The sweep was measured apart from this run: on other sequences, and it drops by score, "
        "not by how well a stand-in fits. So the same cap costs "
        f"{signed_percent(same[0]['change'])} here, and {there} above."
    )


# -- figures ---------------------------------------------------------------------------------------


def demo_figures(result: DemoResult) -> dict[str, Figure]:
    """Draw all figures, by the id of their place on the page."""
    domains = result.stragglers["one_domain"].by_domain or {}
    order = sorted(domains, key=lambda name: -domains[name].overall.device_peak_to_mean)
    by_domain = {name: domains[name].layers for name in order}  # the most unbalanced first
    mixed = {"mixed": result.stragglers["mixed"].layers}
    # One scale for all maps of the page, so that colours can be compared.
    tables = [layer for layers in (*by_domain.values(), *mixed.values()) for layer in layers]
    highest = max(max(relative(layer.expert_loads_before)) for layer in tables)
    groups = {name: domain.overall for name, domain in domains.items()}
    groups["all mixed"] = result.stragglers["mixed"].overall
    return {
        "map-one-domain": _map(result, by_domain, highest),
        "map-mixed": _map(result, mixed, highest),
        "peaks": peak_bars(
            list(groups),
            [round(balance.device_peak_to_mean, 4) for balance in groups.values()],
            [round(balance.expert_peak_to_mean, 4) for balance in groups.values()],
        ),
        "devices": _devices(result),
        **{f"balance-{kind}": _quality(result, kind, timed=False) for kind in KINDS},
        **{f"time-{kind}": _quality(result, kind, timed=True) for kind in KINDS},
    }


def _chosen(result: DemoResult) -> PolicyRow:
    row = result.row(HEADLINE)
    assert row is not None
    return row


def _map(result: DemoResult, panels: Mapping[str, Sequence[LayerTable]], highest: float) -> Figure:
    names = [f"layer {n}" for n in range(result.model["layers"])]
    loads = {
        title: [relative(layer.expert_loads_before) for layer in layers]
        for title, layers in panels.items()
    }
    figure = load_map(loads, [result.model["expert_to_device"]] * len(names), names)
    figure["data"][0] |= {"zmax": highest, "colorscale": load_colours(highest)}
    return figure


def _devices(result: DemoResult) -> Figure:
    example, row = result.example, _chosen(result)
    mean = example.assignments / result.model["devices"]
    before, after = (
        [round(load / mean, 4) for load in example.device_loads[key]]
        for key in (result.policies[0].key, HEADLINE)
    )
    return device_bars(before, {row.label: after}, row.capacity_factor or 0.0)


def _quality(result: DemoResult, kind: str, *, timed: bool) -> Figure:
    """Draw perplexity change against balance or time; both kinds of batches share the scales."""
    base, *rows = result.policies
    points = {each: [_point(row, row.part(each), timed) for row in rows] for each in KINDS}
    every = [point for part in points.values() for point in part]
    ends = [point[key] for point in every for key in ("x", "low", "high") if key in point]
    ends += [1.0] if timed else [1.0, base.one_domain.device_peak_to_mean]
    margin = 0.06 * (max(ends) - min(ends))
    return scatter(
        points[kind],
        "speed-up of expert work (×)" if timed else "busiest device / mean load",
        reference=1.0 if timed else round(base.part(kind).device_peak_to_mean, 4),
        x_range=(round(min(ends) - margin, 3), round(max(ends) + margin, 3)),
        highest=max(point["change"] for point in every),
    )


def _point(row: PolicyRow, part: PolicyPart, timed: bool) -> dict[str, Any]:
    speedup = part.emulated["speedup"]
    return {
        "label": row.label,
        "short": f"{row.capacity_factor:g}",
        "family": row.family,
        "change": round(100 * part.perplexity_change.mean, 4),
        "x": round(speedup["median"] if timed else part.device_peak_to_mean, 4),
        **({"low": round(speedup["min"], 4), "high": round(speedup["max"], 4)} if timed else {}),
    }


# -- findings --------------------------------------------------------------------------------------


def findings(result: DemoResult) -> Findings:
    """Put the figures into words; a reduced run lacks the policies of some sentences."""
    parts = {row.key: row.one_domain for row in result.policies}
    lines = [*(_waiting(result, kind) for kind in KINDS), *(_cap(result, kind) for kind in KINDS)]

    def changes(*keys: str) -> list[str]:
        return [signed_percent(parts[key].perplexity_change.mean) for key in keys]

    def drops(*keys: str) -> list[str]:
        return [percent(parts[key].dropped_share) for key in keys]

    def say(sentence: str, *keys: str) -> None:
        if all(key in parts for key in keys):
            lines.append(sentence.format(change=changes(*keys), drop=drops(*keys)))

    say(
        "With experts placed by the same calibration {drop[1]} is dropped instead of {drop[0]}, "
        "for {change[1]} perplexity.",
        HEADLINE,
        f"{HEADLINE}-placed",
    )
    say(
        "Below 1× a compensated cap trades expert work for quality: at 0.5× {drop[0]} of it is "
        "gone, for {change[0]} perplexity.",
        "compensated-0.5",
    )
    say(
        "With every device held to at most the mean load, capping devices changes perplexity by "
        "{change[0]} and drops {drop[0]}; capping every expert changes it by {change[1]} and "
        "drops {drop[1]} (one-domain batches).",
        "device-1-score",
        "expert-1-score",
    )
    say(
        "The choice of what to drop matters: at the same cap per expert (1.0×), keeping the "
        "highest scores changes perplexity by {change[0]}, a random choice by {change[1]}.",
        "expert-1-score",
        "expert-1-random",
    )
    say(
        "Where every expert is capped at 1×, stand-ins cut the loss from {change[0]} to "
        "{change[1]}.",
        "expert-1-score",
        "compensated-expert-1",
    )
    for factor in ("1.25", "1"):
        if (part := parts.get(f"expanded-{factor}")) and part.against_counterpart:
            lines.append(_expansion(float(factor), part, *changes(f"device-{factor}-score")))
    return Findings(headline=_headline(result, parts), lines=lines)


def _headline(result: DemoResult, parts: Mapping[str, PolicyPart]) -> str:
    """Sum the run up in at most 15 words."""
    part = parts[HEADLINE]
    change, ratio = part.perplexity_change, part.emulated["speedup"]
    price = f"for {signed_percent(change.mean)} perplexity"
    if not _certain(change):
        price = "without measurably changing perplexity"
    if ratio["median"] < _SMALL_GAIN:
        return f"Compensated Drop saves no expert time here, {price} (emulated)."
    sure = "" if ratio["min"] > 1 else "mostly, "
    faster = f"makes expert work {times(ratio['median'])} as fast"
    return f"Compensated Drop {faster}, {sure}{price} (emulated)."


def _waiting(result: DemoResult, kind: str) -> str:
    overall = result.stragglers[kind].overall
    peak, devices = overall.device_peak_to_mean, int(result.model["devices"])
    worst = f"; worst layer and batch {times(overall.device_peak_to_mean_worst)}"
    return f"{waiting(peak, devices, worst, KINDS[kind])} {ceiling(peak)}"


def _cap(result: DemoResult, kind: str) -> str:
    row = _chosen(result)
    part = row.part(kind)
    worst, change = max(part.perplexity_change.by_domain.items(), key=lambda item: item[1])
    return (
        f"Compensated Drop at {row.capacity_factor:g}× the mean on {KINDS[kind]} drops "
        f"{percent(part.dropped_share)} of the assignments, {_cost(part.perplexity_change)} "
        f"(most on {worst}: {signed_percent(change)}), and {_gain(part.emulated)}."
    )


def _expansion(factor: float, part: PolicyPart, plain: str) -> str:
    assert part.against_counterpart is not None
    change = part.against_counterpart.perplexity_change
    median = part.against_counterpart.speedup["median"]
    if not _certain(change):
        effect = "does nothing for quality that this much text can show"
    else:
        effect = "improves quality" if change.mean < 0 else "costs quality"
    price = (
        "with no measured cost in time"
        if median > 1 / _SMALL_GAIN
        else f"and takes the slowest device {percent(1 / median - 1, 0)} longer"
    )
    return (
        f"Expanded Drop at {factor:g}× {effect}: perplexity "
        f"{signed_percent(part.perplexity_change.mean)} against {plain} for Token Drop at the same "
        f"cap, {price} (one-domain batches)."
    )


def _certain(change: PerplexityChange) -> bool:
    """Return True if a change is at least two standard errors from zero."""
    error = change.standard_error
    return error is None or abs(change.mean) >= 2 * error


def _cost(change: PerplexityChange) -> str:
    text = signed_percent(change.mean)
    if not _certain(change):
        return f"changes perplexity by {text}, which this much text can't tell from zero"
    if abs(change.mean) < _SMALL_CHANGE:
        return f"changes perplexity by {text}, next to nothing"
    if change.mean > 0:
        return f"costs {text} perplexity"
    return f"lowers perplexity by {percent(-change.mean, 2)}"


def _gain(emulated: ExpertTime) -> str:
    ratio = emulated["speedup"]
    spread = f"{times(ratio['median'])} (from {ratio['min']:.2f} to {ratio['max']:.2f})"
    if ratio["median"] < 1 / _SMALL_GAIN:
        return f"slows the slowest emulated device down: {spread} as fast"
    if ratio["median"] < _SMALL_GAIN:
        return f"saves the slowest emulated device no measurable time: {spread} as fast"
    sure = "" if ratio["min"] > 1 else ", though not in every round"
    return f"makes the slowest emulated device's expert work {spread} as fast{sure}"
