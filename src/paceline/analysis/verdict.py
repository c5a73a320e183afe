"""What load figures mean, in plain sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.reporting.wording import percent, times

LITTLE = 0.05  # an average wait below this is hardly worth a cap


def verdict(result: Mapping[str, Any]) -> list[str]:
    """Sentences for a result of `observe_loads`: the wait, the ceiling, what the policy does."""
    overall = result["overall"]
    peak, loss = overall["device_peak_to_mean_before"], overall["straggler_loss_before"]
    lines = [
        f"An average device waits {percent(loss, 0)} of the expert time for the busiest of "
        f"{result['devices']}; perfectly balanced, the expert part would be at most "
        f"{times(peak)} as fast (from the loads: communication and attention not included)."
    ]
    if loss < LITTLE:
        lines.append("These loads are nearly balanced: a cap has little to gain here.")
    if result["policy"] is not None:
        lines.append(_policy_sentence(result, peak, overall["device_peak_to_mean_after"]))
    if len(set(result["layers"][0]["experts_per_device"])) > 1:
        lines.append(
            "Devices host different numbers of experts: each is compared with its own share."
        )
    return lines


def _policy_sentence(result: Mapping[str, Any], peak: float, after: float) -> str:
    overall = result["overall"]
    would = {"enforce": "", "shadow": "would "}.get(result["mode"])
    if would is None:
        return "The policy only observes: nothing is capped."
    if not overall["capped_forwards"]:
        return (
            "The policy capped nothing: it has no capacity_factor, or the batches give an expert "
            "fewer tokens than min_expert_load."
        )
    gain = peak / max(after, 1e-9)
    ending = "" if would else "s"
    effect = (
        f"allow{ending} the expert part to run {times(gain)} as fast as without it"
        if gain > 1.005
        else f"gain{ending} nothing in time"
    )
    return (
        f"The policy {result['policy']} {would}drop{ending} {percent(overall['dropped_share'])} of "
        f"the assignments and {effect} (busiest device {times(after)} the mean, from the loads)."
    )
