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
from paceline.balance import Sample, straggler_loss
from paceline.text import capped_nothing, percent, times
from paceline.traces.results import RepeatedRows, TraceLoads

IN_ORDER, PLACED = "in order", "placed"
"""Placements of a study."""

PROXY = "Gate mass is a proxy: measure quality on your task before a cap goes into service."
_LITTLE = 0.05  # an average wait below this is hardly worth a cap
_CHANCE = 2.0  # times the unevenness by chance: up to here most of it is chance
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


def too_little(sample: Sample, devices: int, what: str = "text") -> str:
    """Say that there are too few tokens, and how many would do.

    >>> too_little(Sample(3, 326, True, 2.04), 8)
    'Too little text to tell: in batches as small as these the busiest of 8 devices has about \
2.04× the mean by chance alone. There are 3 tokens; at least 326 are needed.'
    """
    return (
        f"Too little {what} to tell: in batches as small as these the busiest of {devices} devices "
        f"has about {times(sample.by_chance)} the mean by chance alone. There are "
        f"{sample.tokens:,} tokens; at least {sample.tokens_needed:,} are needed."
    )


def _chance(sample: Sample | None, peak: float) -> list[str]:
    """Say how much of an uneven load is chance, where that is most of it."""
    if sample is None or peak <= 1 or peak - 1 > _CHANCE * (sample.by_chance - 1):
        return []
    return [
        f"Most of that is chance: were every expert equally likely, batches of this size would "
        f"have {times(sample.by_chance)}. A placement can't change it; larger batches do."
    ]


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
    if result.sample.too_little:
        lines = [too_little(result.sample, devices)]
        degenerate = True
    elif degenerate:
        lines = [
            f"These loads say nothing about real traffic: {'; '.join(result.degenerate)}.",
            f"The busiest of {devices} devices has {times(peak)} the mean rows here; the gain of a "
            "cap can't be told from that.",
        ]
    else:
        lines = [
            f"{waiting(peak, devices)} {ceiling(peak)} Communication and attention are not "
            "included.",
            *_chance(result.sample, peak),
        ]
    if result.policy is not None:
        lines.append(_policy_effect(result, peak, degenerate))
    return lines


def _policy_effect(result: ModelLoads, peak: float, degenerate: bool) -> str:
    overall = result.overall
    if result.mode == "observe":
        return "The policy only observes: nothing is capped."
    expands = result.policy is not None and "expand" in result.policy
    if not overall.capped_forwards or not (overall.dropped_share or expands):
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
    overall, sample = result.overall, result.sample
    repeated = [] if result.rows is None else _repeated(result.rows)
    if sample is not None and sample.too_little:
        return [too_little(sample, result.devices, "traffic"), *repeated]
    lines = [
        f"{waiting(overall.device_peak_to_mean, result.devices, ', over batches and layers')} "
        f"{ceiling(overall.perfect_balance_speedup)}",
        *_chance(sample, overall.device_peak_to_mean),
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
    return lines + repeated


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
    """Describe a result of `place`: first what it does on batches that took no part in the fit."""
    method, part = result.method, result.deciding
    if part is None:
        before, after = _before_after(result.same_batches, method)
        return [
            f"On the one batch that it was fitted on, the busiest device has {times(after)} the "
            f"mean instead of {times(before)}; one batch can't tell how it does on others."
        ]
    if result.sample is not None and result.sample.too_little:
        return [too_little(result.sample, result.devices, "traffic to judge a placement on")]
    halves, other = result.second_half, result.other_trace
    lines = []
    if other is not None:
        lines.append(f"On {other.trace}, {_effect(other, method)}: {_carries(other, method)}.")
    if halves is not None:
        lines.append(f"On the second half of {result.trace}, {_effect(halves, method)}.")
    if result.best != method:
        best = part.ways[result.best].overall
        lines.append(
            f"{METHODS[result.best]} does better on the traffic that took no part in the fit: "
            f"{times(best)}. --best-of writes that placement."
        )
    elif method not in ("search", "search_replicas"):
        lines.append(f"This is {METHODS[method]}, the best there of all methods compared.")
    if result.replicas:
        alone, after = part.ways["search"].overall, part.ways[method].overall
        needed = ": replicas are not needed." if alone / after < 1.02 else "."
        lines.append(f"Without replicas it would be {times(alone)}{needed}")
    lines.append(
        "A placement drops nothing."
        + (
            ""
            if other is not None
            else " Two halves of one traffic are alike: --judge takes a second trace, which tells "
            "how the placement does when traffic changes."
        )
    )
    return lines


METHODS = {
    "in_order": "Experts in order",
    "heaviest_first": "Heaviest first",
    "eplb": "EPLB without replicas",
    "search": "Paceline's search",
    "eplb_replicas": "EPLB with replicas",
    "search_replicas": "Paceline's search with replicas",
}
"""Method of placing experts -> its name."""


def _effect(part: JudgedPlacements, method: str) -> str:
    before, after = _before_after(part, method)
    fewer = percent(1 - after / before, 0)
    change = f"{fewer} fewer rows" if after < before else "no fewer rows"
    return (
        f"the busiest device has {times(after)} the mean instead of {times(before)} in order "
        f"({change})"
    )


def _carries(part: JudgedPlacements, method: str) -> str:
    before, after = _before_after(part, method)
    if before / after >= 1.1:
        return "the placement carries over to other traffic"
    if before / after >= 1.02:
        return "the placement carries over to other traffic only in part"
    return "the placement does not carry over to other traffic"


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
            f"The placement ({study.placement_is}) brings that to {times(placed)}, "
            f"{percent(fewer, 0)} fewer rows on the busiest device, and drops nothing."
            if fewer > 0
            else f"The placement ({study.placement_is}) doesn't help here: {times(placed)}."
        )
    for name in names:
        lines += _best_cap(study, name, most)
    if not study.keep:
        lines.append(
            "The trace holds counts, not each token's choice, so caps can't be tried on it."
        )
    if PLACED not in names:
        lines.append("This is one batch, so a placement can't be judged on others.")
    lines.append(
        "These are counts of rows, not times, which depend on model and hardware. " + PROXY
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
            f"Experts {placement}: every cap per device that was tried loses more than {bound} of "
            f"the {unit}."
        ]
    best = max(allowed, key=lambda way: (way.gain, way.gamma))
    fewer = 1 - study.way(placement).gain / best.gain
    if fewer < 0.005:
        return [
            f"Experts {placement}: a cap per device that loses at most {bound} of the {unit} gains "
            "next to nothing."
        ]
    price = f"{percent(best.dropped_share, 2)} of the assignments"
    if unit != "assignments":
        price += f" and {percent(loss(best), 2)} of the {unit}"
    return [
        f"Experts {placement}: of the caps per device that lose at most {bound} of the {unit}, "
        f"capacity_factor={best.gamma:g} saves the most: {percent(fewer)} fewer rows on the "
        f"busiest device than without a cap, for {price} dropped."
    ]
