"""What load figures mean, in plain sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.text import percent, times

LITTLE = 0.05  # an average wait below this is hardly worth a cap
REPEATED = 0.05  # a share of repeated rows that is worth a sentence


def verdict(result: Mapping[str, Any]) -> list[str]:
    """Sentences for a result of `observe_loads`: the wait, the ceiling, what the policy does.

    Where the routing says nothing of real traffic, that comes first and nothing is promised.
    """
    overall, devices = result["overall"], result["devices"]
    peak, loss = overall["device_peak_to_mean_before"], overall["straggler_loss_before"]
    degenerate = bool(result["degenerate"])
    if degenerate:
        lines = [
            f"These loads say nothing of real traffic: {'; '.join(result['degenerate'])}.",
            f"The busiest of {devices} devices has {times(peak)} the mean rows here; what a cap "
            "would gain can't be told from that.",
        ]
    else:
        lines = [
            f"An average device waits {percent(loss, 0)} of the expert time for the busiest of "
            f"{devices}; perfectly balanced, the expert part would be at most {times(peak)} as "
            "fast (from the loads: communication and attention not included)."
        ]
        if loss < LITTLE:
            lines.append("These loads are nearly balanced: a cap has little to gain here.")
    if result["policy"] is not None:
        lines.append(_policy_sentence(result, peak, degenerate))
    return lines


def _policy_sentence(result: Mapping[str, Any], peak: float, degenerate: bool) -> str:
    overall = result["overall"]
    if result["mode"] == "observe":
        return "The policy only observes: nothing is capped."
    if not overall["capped_forwards"]:
        return _never_applied(result)
    would, ending = ("would ", "") if result["mode"] == "shadow" else ("", "s")
    if overall["narrowed_forwards"]:
        return _read_sentence(result, would, ending)
    after = overall["device_peak_to_mean_after"]
    gain = peak / max(after, 1e-9)
    drops = f"{would}drop{ending} {percent(overall['dropped_share'])} of the assignments"
    if degenerate:
        return f"The policy {result['policy']} {drops} here."
    effect = (
        f"allow{ending} the expert part to run {times(gain)} as fast as without it"
        if gain > 1.005
        else f"gain{ending} nothing in time"
    )
    return (
        f"The policy {result['policy']} {drops} and {effect} (busiest device {times(after)} the "
        "mean, from the loads)."
    )


def _read_sentence(result: Mapping[str, Any], would: str, ending: str) -> str:
    """What max_active does: where weights dominate, time is the experts that a device reads."""
    overall = result["overall"]
    before, after = (overall[f"most_active_experts_{when}"] for when in ("before", "after"))
    alone = overall["tokens_without_expert"]
    return (
        f"The policy {result['policy']} {would}drop{ending} {percent(overall['dropped_share'])} of "
        f"the assignments, and the device that reads the weights of most experts {would}read"
        f"{ending} {after:.2f} instead of {before:.2f} a forward. Tokens that {would}lose "
        f"all their routed experts: {alone}."
    )


def _never_applied(result: Mapping[str, Any]) -> str:
    """Why a policy that may cap never did."""
    least, given = result["min_expert_load"], result["tokens_an_expert"]
    if least is None:
        return "The policy capped nothing: it has no capacity_factor."
    if "capacity_factor" not in result["policy"]:
        return (
            f"The policy capped nothing: max_active rules below a mean of {least:g} tokens an "
            f"expert (min_expert_load), and a batch here gives {given:.3g}, or wants no more."
        )
    return (
        f"The policy capped nothing: its cap applies from a mean of {least:g} tokens an expert on "
        f"(min_expert_load), and a batch here gives {given:.3g}."
    )


def trace_verdict(result: Mapping[str, Any]) -> list[str]:
    """Return sentences on a result of `trace_loads`: the wait, the ceiling, and what they mean."""
    overall = result["overall"]
    lines = [
        f"An average device waits {percent(overall['straggler_loss'], 0)} of the experts' time for "
        f"the busiest of {result['devices']} (sum over batches and layers of the busiest device's "
        f"rows {times(overall['device_peak_to_mean'])} the mean); perfectly balanced, the expert "
        f"part would be at most {times(overall['perfect_balance_speedup'])} as fast.",
    ]
    if result["batches"] == 1:
        lines.append(
            "It is one batch: batches are less even than their sum, so smaller ones wait longer."
        )
    elif result["batches_are"] in ("request", "sample"):
        lines.append(
            f"A batch here is a {result['batches_are']}, which no layer computes alone: "
            "--batch-tokens cuts the tokens into batches as you run them."
        )
    return lines + _repeats(result.get("rows"))


def _repeats(rows: Mapping[str, Any] | None) -> list[str]:
    """Say which rows repeat, and the balance without them."""
    if rows is None or rows["repeated_share"] < REPEATED:
        return []
    lines = []
    for name, share, what in (
        ("commonest", rows["commonest_share"], "are one and the same row in every layer"),
        ("repeats", rows["repeated_share"], "repeat an earlier row in every layer"),
    ):
        without = rows.get(f"without_{name}")
        if share < REPEATED or without is None:
            continue
        peak = times(without["device_peak_to_mean"])
        lines.append(
            f"{percent(share, 0)} of the tokens {what}: a dummy row of the engine, or a prompt "
            f"that requests share; without them the busiest device has {peak} the mean."
        )
    return lines
