"""Sentences derived from the demo's figures: what was found, and what was not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.demo.plan import HEADLINE, KINDS
from paceline.text import percent, signed_percent, times

_SMALL_GAIN = 1.02  # a median speed-up below this is not worth the name
_SMALL_CHANGE = 0.0005


def certain(change: Mapping[str, Any]) -> bool:
    """Whether a perplexity change is at least two standard errors from zero."""
    error = change["standard_error"]
    return error is None or abs(change["mean"]) >= 2 * error


def cost(change: Mapping[str, Any]) -> str:
    """What a policy does to perplexity, in words that respect the sampling error."""
    text = signed_percent(change["mean"])
    if not certain(change):
        return f"changes perplexity by {text}, which this much text can't tell from zero"
    if abs(change["mean"]) < _SMALL_CHANGE:
        return f"changes perplexity by {text}, next to nothing"
    if change["mean"] > 0:
        return f"costs {text} perplexity"
    return f"lowers perplexity by {percent(-change['mean'], 2)}"


def gain(emulated: Mapping[str, Any]) -> str:
    """What a policy does to the slowest emulated device's expert time, in words."""
    ratio = emulated["speedup"]
    spread = f"{times(ratio['median'])} (from {ratio['min']:.2f} to {ratio['max']:.2f})"
    if ratio["median"] < 1 / _SMALL_GAIN:
        return f"slows the slowest emulated device down: {spread} as fast"
    if ratio["median"] < _SMALL_GAIN:
        return f"saves the slowest emulated device no time worth the name: {spread} as fast"
    sure = "" if ratio["min"] > 1 else ", though not in every round"
    return f"makes the slowest emulated device's expert work {spread} as fast{sure}"


def headline(results: Mapping[str, Any]) -> str:
    """The sentence for the top of the page; sampling error and spread stand in the findings."""
    straggler = results["stragglers"]["one_domain"]["overall"]
    row = _row(results, HEADLINE)
    part, factor = row["one_domain"], row["capacity_factor"]
    change, ratio = part["perplexity_change"], part["emulated"]["speedup"]
    text = signed_percent(change["mean"])
    price = (
        f"{text} perplexity" if certain(change) else f"no measurable change in perplexity ({text})"
    )
    saving = "saves the slowest device no expert time (emulated)"
    if ratio["median"] >= _SMALL_GAIN:
        sure = "emulated" if ratio["min"] > 1 else "emulated, not in every round"
        saving = f"makes the slowest device's expert work {times(ratio['median'])} as fast ({sure})"
    alone = _rows(results, f"device-{factor:g}-score")
    without = ""
    if alone is not None:
        dropped = signed_percent(alone[0]["one_domain"]["perplexity_change"]["mean"])
        without = f" ({dropped} where dropped assignments leave nothing)"
    return (
        f"The busiest of {results['model']['devices']} devices carries "
        f"{times(straggler['device_peak_to_mean'])} the mean load. Compensated Drop at "
        f"{factor:g}× {saving} for {price}{without}."
    )


def findings(results: Mapping[str, Any]) -> dict[str, Any]:
    """Headline and the list of findings, all computed from the results."""
    lines: list[str | None] = [_waiting(results, kind) for kind in KINDS]
    lines += [
        *(_cap(results, kind) for kind in KINDS),
        _placed(results),
        _half(results),
        _device_or_expert(results),
        _score_or_random(results),
    ]
    lines += [_stand_ins(results), *(_expansion(results, factor) for factor in ("1.25", "1"))]
    return {"headline": headline(results), "lines": [line for line in lines if line]}


def _row(results: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return next(row for row in results["policies"] if row["key"] == key)


def _rows(results: Mapping[str, Any], *keys: str) -> list[Mapping[str, Any]] | None:
    """The rows of these keys, or None where a reduced run lacks one."""
    known = {row["key"]: row for row in results["policies"]}
    return [known[key] for key in keys] if all(key in known for key in keys) else None


def _waiting(results: Mapping[str, Any], kind: str) -> str:
    overall = results["stragglers"][kind]["overall"]
    peak = overall["device_peak_to_mean"]
    verdict = "There is little to gain here." if overall["straggler_loss"] < 0.05 else ""
    return (
        f"On {KINDS[kind]} an average device waits {percent(overall['straggler_loss'], 0)} of the "
        f"expert time for the busiest one ({times(peak)} the mean; worst layer and batch "
        f"{times(overall['device_peak_to_mean_worst'])}). Perfect balance would make the expert "
        f"part at most {times(peak)} as fast. {verdict}"
    ).strip()


def _cap(results: Mapping[str, Any], kind: str) -> str:
    row = _row(results, HEADLINE)
    part = row[kind]
    worst, change = max(part["perplexity_change"]["by_domain"].items(), key=lambda item: item[1])
    return (
        f"Compensated Drop at {row['capacity_factor']:g}× the mean on {KINDS[kind]} drops "
        f"{percent(part['dropped_share'])} of the assignments, {cost(part['perplexity_change'])} "
        f"(most on {worst}: {signed_percent(change)}), and {gain(part['emulated'])}."
    )


def _placed(results: Mapping[str, Any]) -> str | None:
    rows = _rows(results, HEADLINE, f"{HEADLINE}-placed")
    if rows is None:
        return None
    in_order, placed = (row["one_domain"] for row in rows)
    return (
        "With experts placed by the same calibration "
        f"{percent(placed['dropped_share'])} is dropped instead of "
        f"{percent(in_order['dropped_share'])}, for "
        f"{signed_percent(placed['perplexity_change']['mean'])} perplexity."
    )


def _half(results: Mapping[str, Any]) -> str | None:
    rows = _rows(results, "compensated-0.5")
    if rows is None:
        return None
    part = rows[0]["one_domain"]
    return (
        f"Below 1× a compensated cap trades expert work for quality: at 0.5× "
        f"{percent(part['dropped_share'])} of it is gone, for "
        f"{signed_percent(part['perplexity_change']['mean'])} perplexity."
    )


def _device_or_expert(results: Mapping[str, Any]) -> str | None:
    rows = _rows(results, "device-1-score", "expert-1-score")
    if rows is None:
        return None
    device, expert = (row["one_domain"] for row in rows)
    return (
        "With every device held to at most the mean load, capping devices changes perplexity by "
        f"{signed_percent(device['perplexity_change']['mean'])} and drops "
        f"{percent(device['dropped_share'])}; capping every expert changes it by "
        f"{signed_percent(expert['perplexity_change']['mean'])} and drops "
        f"{percent(expert['dropped_share'])} (one-domain batches)."
    )


def _score_or_random(results: Mapping[str, Any]) -> str | None:
    rows = _rows(results, "expert-1-score", "expert-1-random")
    if rows is None:
        return None
    score, chance = (row["one_domain"]["perplexity_change"]["mean"] for row in rows)
    return (
        f"What is dropped matters: at the same cap per expert (1.0×), keeping the highest scores "
        f"changes perplexity by {signed_percent(score)}, a random choice by "
        f"{signed_percent(chance)}."
    )


def _stand_ins(results: Mapping[str, Any]) -> str | None:
    rows = _rows(results, "expert-1-score", "compensated-expert-1")
    if rows is None:
        return None
    alone, with_them = (row["one_domain"]["perplexity_change"]["mean"] for row in rows)
    return (
        f"Where every expert is capped at 1×, stand-ins cut the loss from "
        f"{signed_percent(alone)} to {signed_percent(with_them)}."
    )


def _expansion(results: Mapping[str, Any], factor: str) -> str | None:
    rows = _rows(results, f"device-{factor}-score", f"expanded-{factor}")
    if rows is None:
        return None
    plain, expanded = (row["one_domain"] for row in rows)
    against = expanded["against_counterpart"]
    change, speed = against["perplexity_change"], against["speedup"]
    if not certain(change):
        effect = "does nothing for quality that this much text can show"
    else:
        effect = "improves quality" if change["mean"] < 0 else "costs quality"
    price = (
        "with no measured cost in time"
        if speed["median"] > 1 / _SMALL_GAIN
        else f"and takes the slowest device {percent(1 / speed['median'] - 1, 0)} longer"
    )
    return (
        f"Expanded Drop at {float(factor):g}× {effect}: perplexity "
        f"{signed_percent(expanded['perplexity_change']['mean'])} against "
        f"{signed_percent(plain['perplexity_change']['mean'])} for Token Drop at the same cap, "
        f"{price} (one-domain batches)."
    )
