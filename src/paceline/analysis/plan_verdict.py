"""A plan's decision, and the sentences that give its reasons."""

from __future__ import annotations

from paceline.analysis.results import (
    ActivePoint,
    JudgedPlan,
    PlanResult,
    ReplicaCost,
    StepCost,
    loss,
    loss_unit,
)
from paceline.analysis.verdict import PROXY, too_little
from paceline.text import percent, signed_percent


def decide(result: PlanResult) -> tuple[str, list[str]]:
    """Return "nothing", "place", "cap" or "place and cap", and the reasons.

    Judged on the second traffic, where there is one. A placement is taken if it gains enough there,
    since it loses nothing; a cap on top of it, or instead of it, if that gains enough again.

    Args:
        result: without decision and verdict.
    """
    part, sample = result.deciding, result.sample
    if sample is not None and sample.too_little:
        return "nothing", [too_little(sample, result.devices, "traffic to judge a plan on")]
    decision, lines = _decision(part, result)
    gain = part.ways["place"].gain
    if result.other_trace is not None:
        own = result.second_half.ways["place"].gain
        carries = (
            ": it doesn't carry over. Only a cap bounds every batch, whatever the traffic."
            if gain < own / 3
            else "."
        )
        lines.append(
            f"The placement gains {percent(own)} on the second half of the traffic that it was "
            f"fitted on, and {percent(gain)} on the other traffic{carries}"
        )
        if "place" not in decision and own >= result.min_gain:
            lines.append(
                "If your traffic stays like the fitted one, take the placement: it drops nothing. "
                "A plan without --judge does so."
            )
    else:
        lines.append(
            "This was judged on the second half of the same traffic. --judge takes a second trace, "
            "which tells how the plan does when traffic changes."
        )
    lines += _active_lines(part, result, decision)
    lines += _budget_lines(result, decision, loss_unit(part.ways["nothing"]))
    replicas = part.ways.get("replicas")
    if isinstance(replicas, ReplicaCost):
        lines.append(
            f"Replicas would gain {signed_percent(_over(replicas, part.ways['place']))} over the "
            f"placement alone, and take {replicas.replica_gb_a_device:.2f} GB per device."
        )
    lines.append("Times come from a cost model; nothing was timed.")
    if "cap" in decision:
        lines.append(PROXY)
    return decision, lines


def _decision(part: JudgedPlan, result: PlanResult) -> tuple[str, list[str]]:
    ways, least = part.ways, result.min_gain
    base, place, cap, both = (ways[n] for n in ("nothing", "place", "cap", "place and cap"))
    step, balance = f"{base.microseconds:.0f} us", percent(part.perfect_balance_gain)
    # in decode a cap may gain more than balance would: it saves reading experts
    if part.perfect_balance_gain < least and max(cap.gain, both.gain) < least:
        share = percent(base.stages["experts"] / base.microseconds, 0)
        return "nothing", [
            f"Not worth it: perfect balance would make a step through the recorded layers "
            f"({step}) {balance} faster, less than --min-gain {percent(least, 0)}; {share} of the "
            "step is expert time."
        ]
    lines = [
        f"Perfect balance would make a step through the recorded layers ({step}) {balance} faster.",
        f"Placement alone gains {percent(place.gain)} and drops nothing.",
    ]
    on_top = percent(_over(both, place))
    if place.gain >= least:
        if _over(both, place) >= least:
            line = f"A cap on top gains {on_top} more, for {_price(both)}: place, then cap."
            return "place and cap", [*lines, line]
        line = f"A cap on top would gain {on_top} more, for {_price(both)}: place, don't cap."
        return "place", [*lines, line]
    if cap.gain >= least:
        if _over(both, cap) >= least:
            line = (
                f"A cap gains {percent(cap.gain)}, and {percent(_over(both, cap))} more on placed "
                f"experts, for {_price(both)}: place and cap."
            )
            return "place and cap", [*lines, line]
        line = f"A cap gains {percent(cap.gain)}, for {_price(cap)}: cap, don't place."
        return "cap", [*lines, line]
    if both.gain >= least:
        line = (
            f"Only both together reach --min-gain {percent(least, 0)}: {percent(both.gain)}, for "
            f"{_price(both)}."
        )
        return "place and cap", [*lines, line]
    line = (
        f"A cap within {percent(result.max_mass_loss)} of the {loss_unit(cap)} gains "
        f"{percent(cap.gain)}, both together {percent(both.gain)}: not worth it, less than "
        f"--min-gain {percent(least, 0)}."
    )
    return "nothing", [*lines, line]


def _active_lines(part: JudgedPlan, result: PlanResult, decision: str) -> list[str]:
    """Say what capping active experts gives and loses, where some batches are small."""
    base = "placed" if "place" in decision else "in_order"
    points = [point for point in part.active if point.placement == base]
    if not points:
        return []
    before = part.ways["place" if base == "placed" else "nothing"]
    loosest = sorted(points, key=lambda point: -point.max_active)[:3]
    lines = [
        f"Decode: batches with fewer than {result.min_expert_load} rows per expert are bound by "
        f"reading weights, and the busiest device reads {before.most_active_experts:.1f} experts. "
        f"Limiting that number gives: {'; '.join(_active(point, before) for point in loosest)}."
    ]
    if all(loss(point) > result.max_mass_loss for point in points):
        lines.append(
            f"Each loses more than --max-mass-loss {percent(result.max_mass_loss)}. With fitted "
            "stand-ins (compensate=true) quality may still be good enough: measure it."
        )
    return lines


def _active(point: ActivePoint, before: StepCost) -> str:
    gain = signed_percent(_over(point, before))
    return f"max_active={point.max_active} {gain} for {_price(point)}"


def _budget_lines(result: PlanResult, decision: str, unit: str) -> list[str]:
    """Say what the limit on losses does to the caps."""
    lines, most = [], result.max_mass_loss
    if unit != "gate mass":
        lines.append(
            "The trace holds no weights, so losses are counted in assignments, and the least "
            "important ones are unknown."
        )
    base = "in_order" if decision == "cap" else "placed"
    budget, where = result.budgets[base], "in order" if base == "in_order" else "placed"
    if budget is None:
        lines.append(
            f"Every cap chosen for experts {where} loses more than {percent(most)} of the {unit} "
            "on the batches that it is judged on."
        )
    elif budget < most:
        lines.append(
            f"The caps for experts {where} were chosen to lose at most {percent(budget, 2)}. "
            f"Tighter ones lose more than {percent(most)} on the batches that they are judged on."
        )
    return lines


def _over(way: StepCost, base: StepCost) -> float:
    """Return the gain over another way."""
    return (1 + way.gain) / (1 + base.gain) - 1


def _price(way: StepCost) -> str:
    """Describe the losses of a cap."""
    share = f"{percent(way.dropped_share)} of the assignments"
    mass = way.gate_mass_lost
    return share if mass is None else f"{share} and {percent(mass, 2)} of the gate mass"
