"""Sentences on loads, placements and caps: the one place that words these figures.

A plan's decision and its reasons are in `plan_verdict`, with the same phrases.
"""

from __future__ import annotations

from paceline.analysis.results import (
    CapStudy,
    JudgedPlacements,
    ModelLoads,
    PlaceResult,
    loss,
    loss_unit,
)
from paceline.balance import straggler_loss
from paceline.text import capped_nothing, percent, times
from paceline.traces.results import RepeatedRows, TraceLoads

IN_ORDER, PLACED = "in order", "placed"
"""Placements of a study."""

PROXY = "Gate mass is a proxy: measure quality on your task before a cap goes into service."
_LITTLE = 0.05  # an average wait below this is hardly worth a cap
_SHOWN = 0.05  # a share of repeated rows that is worth a line


def waiting(peak_to_mean: float, devices: int, note: str = "", batches: str = "") -> str:
    """Say how long an average device waits.

    Args:
        devices: how many there are.
        note: added to the figure in brackets.
        batches: the kind of batches, where there are several.

    >>> waiting(1.6, 8)
    'An average device waits 38% of the expert time for the busiest of 8 (1.60× the mean load).'
    """
    start = f"On {batches}, an" if batches else "An"
    wait = percent(straggler_loss(peak_to_mean), 0)
    return (
        f"{start} average device waits {wait} of the expert time for the busiest of {devices} "
        f"({times(peak_to_mean)} the mean load{note})."
    )


def ceiling(speedup: float) -> str:
    """State the gain of perfect balance; a small one, as such.

    >>> ceiling(1.6)
    'Perfect balance would make the expert part at most 1.60× as fast.'
    """
    line = f"Perfect balance would make the expert part at most {times(speedup)} as fast."
    return f"{line} There is little to gain here." if straggler_loss(speedup) < _LITTLE else line


# Loads of a model on text: a result of `observe_loads`.


def model_verdict(result: ModelLoads) -> list[str]:
    """Describe a result of `observe_loads`: the wait, the ceiling, the effect of the policy.

    Where the routing says nothing about real traffic, that comes first and nothing is promised.
    """
    overall, devices = result.overall, result.devices
    peak = overall.device_peak_to_mean_before
    degenerate = bool(result.degenerate)
    if degenerate:
        lines = [
            f"These loads say nothing about real traffic: {'; '.join(result.degenerate)}.",
            f"The busiest of {devices} devices has {times(peak)} the mean rows here; the gain of a "
            "cap can't be told from that.",
        ]
    else:
        lines = [
            f"{waiting(peak, devices)} {ceiling(peak)} Communication and attention are not "
            "included."
        ]
    if result.policy is not None:
        lines.append(_policy_effect(result, peak, degenerate))
    return lines


def _policy_effect(result: ModelLoads, peak: float, degenerate: bool) -> str:
    overall = result.overall
    if result.mode == "observe":
        return "The policy only observes: nothing is capped."
    if not overall.capped_forwards:
        return _never_applied(result)
    would, ending = ("would ", "") if result.mode == "shadow" else ("", "s")
    drops = f"{would}drop{ending} {percent(overall.dropped_share)} of the assignments"
    policy = f"The policy {result.policy} {drops}"
    if overall.narrowed_forwards:  # max_active: time is the experts that a device reads
        before, after = overall.most_active_experts_before, overall.most_active_experts_after
        return (
            f"{policy}, and the device that reads the most experts {would}read{ending} {after:.2f} "
            f"instead of {before:.2f} per forward. Tokens that {would}lose all their routed "
            f"experts: {overall.tokens_without_expert}."
        )
    if degenerate:
        return f"{policy} here."
    after = overall.device_peak_to_mean_after
    gain = peak / max(after, 1e-9)
    effect = (
        f"allow{ending} the expert part to run {times(gain)} as fast as without it"
        if gain > 1.005
        else f"gain{ending} nothing in time"
    )
    return f"{policy} and {effect} (busiest device {times(after)} the mean, from the loads)."


def _never_applied(result: ModelLoads) -> str:
    """Say why a policy that may cap never did."""
    tokens = sum(result.tokens_by_text.values()) / max(1, result.batches)
    has_factor = "capacity_factor" in (result.policy or "")
    return capped_nothing(result.min_expert_load, result.tokens_an_expert or 0, tokens, has_factor)


# Loads of recorded traffic: a result of `trace_loads`.


def trace_verdict(result: TraceLoads) -> list[str]:
    """Describe a result of `trace_loads`: the wait, the ceiling, and how far to trust them."""
    overall = result.overall
    lines = [
        f"{waiting(overall.device_peak_to_mean, result.devices, ', over batches and layers')} "
        f"{ceiling(overall.perfect_balance_speedup)}"
    ]
    if result.batches == 1:
        lines.append(
            "This is one batch: batches are less even than their sum, so smaller ones wait longer."
        )
    elif result.batches_are in ("request", "sample"):
        lines.append(
            f"A batch here is a {result.batches_are}, which no layer computes alone: "
            "--batch-tokens cuts the tokens into batches as you run them."
        )
    return lines + ([] if result.rows is None else _repeated(result.rows))


def _repeated(rows: RepeatedRows) -> list[str]:
    """Say which rows repeat, and the figure without them."""
    return [
        f"{percent(part, 0)} of the tokens {repeat}: a dummy row of the engine, or a prompt that "
        f"requests share; without them the busiest device has {times(rest.device_peak_to_mean)} "
        "the mean."
        for part, repeat, rest in (
            (rows.commonest_share, "are one and the same row in every layer",
             rows.without_commonest),
            (rows.repeated_share, "repeat an earlier row in every layer", rows.without_repeats),
        )
        if min(part, rows.repeated_share) >= _SHOWN and rest is not None
    ]  # fmt: skip


# Placements: a result of `place`.


def placement_verdict(result: PlaceResult) -> list[str]:
    """Describe a result of `place`."""
    method = "search_replicas" if result.replicas else "search"
    halves, other = result.second_half, result.other_trace
    if halves is None:
        before, after = _before_after(result.same_batches, method)
        lines = [
            f"On the very batch it was made for, the busiest device has {times(after)} the mean "
            f"instead of {times(before)}: one batch can't tell what others would give."
        ]
    else:
        before, after = _before_after(halves, method)
        lines = [
            f"Fitted on the first half and judged on the second: the busiest device has "
            f"{times(after)} the mean instead of {times(before)}, "
            f"{percent(1 - after / before, 0)} fewer rows to wait for, without any loss."
        ]
        if before / after < 1.02:
            lines.append("That is hardly worth moving weights for.")
        if result.replicas:
            alone = halves.ways["search"].overall
            lines.append(
                f"Without replicas it would be {times(alone)}"
                + (": they are not needed." if alone / after < 1.02 else ".")
            )
        lines.append(
            "Two halves of one traffic are alike: they can't tell what happens when traffic "
            "changes." + ("" if other else " A second trace can (--judge).")
        )
    if other is not None:
        before, after = _before_after(other, method)
        carries = (
            "the placement carries over"
            if before / after >= 1.1
            else "it carries over little"
            if before / after >= 1.02
            else "it does not carry over"
        )
        lines.append(
            f"On {other.trace}: {times(after)} the mean instead of {times(before)}: {carries}."
        )
    return lines


def _before_after(part: JudgedPlacements, method: str) -> tuple[float, float]:
    return part.ways["in_order"].overall, part.ways[method].overall


# Caps of every size: a `CapStudy`.


def caps_verdict(study: CapStudy, most: float = 0.01) -> list[str]:
    """Describe a study of caps.

    Args:
        study: without its verdict.
        most: share of the gate mass (of the assignments, where it is unknown) that a cap may lose.
    """
    base = study.way(IN_ORDER)
    assert base.busiest_device is not None
    lines = [waiting(base.busiest_device, study.devices, f"; {study.judged_on}, experts in order")]
    names = [IN_ORDER]
    if PLACED in study.expert_to_device:
        names.append(PLACED)
        placed = study.way(PLACED).busiest_device
        assert placed is not None
        fewer = 1 - placed / base.busiest_device
        lines.append(
            f"The placement ({study.placement_is}) brings that to {times(placed)}: "
            f"{percent(fewer, 0)} fewer rows to wait for, nothing lost."
            if fewer > 0
            else f"The placement ({study.placement_is}) doesn't help here: {times(placed)}."
        )
    for name in names:
        lines += _best_cap(study, name, most)
    if not study.keep:
        lines.append(
            "The trace holds counts, not what each token chose: caps can't be tried on it."
        )
    if PLACED not in names:
        lines.append("This is one batch, which can't tell what a placement would give on others.")
    lines.append(
        "Rows are counted, nothing is timed: what they cost depends on model and hardware. " + PROXY
    )
    return lines


def _best_cap(study: CapStudy, placement: str, most: float) -> list[str]:
    """Name the device cap that saves the most rows for the loss that is allowed."""
    caps = [way for way in study.ways if (way.placement, way.unit) == (placement, "device")]
    if not caps:
        return []
    unit, bound = loss_unit(caps[0]), percent(most, 0)
    allowed = [way for way in caps if loss(way) <= most]
    if not allowed:
        return [
            f"Experts {placement}: every device cap tried loses more than {bound} of the {unit}."
        ]
    best = max(allowed, key=lambda way: (way.gain, way.gamma))
    fewer = 1 - study.way(placement).gain / best.gain
    if fewer < 0.005:
        return [
            f"Experts {placement}: a device cap within {bound} of the {unit} gains next to nothing."
        ]
    price = f"{percent(best.dropped_share, 2)} of the assignments"
    if unit != "assignments":
        price += f" and {percent(loss(best), 2)} of the {unit}"
    return [
        f"Experts {placement}: of the device caps that lose at most {bound} of the {unit}, "
        f"capacity_factor={best.gamma:g} saves the most: {percent(fewer)} fewer rows to wait for "
        f"than without a cap, for {price}."
    ]
