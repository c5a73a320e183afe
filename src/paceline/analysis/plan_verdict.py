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
from paceline.analysis.verdict import PROXY
from paceline.text import percent, signed_percent


def decide(result: PlanResult) -> tuple[str, list[str]]:
    """Return "nothing", "place", "cap" or "place and cap", and the reasons.

    Judged on the second traffic, where there is one. A placement is taken if it gains enough there,
    since it loses nothing; a cap on top of it, or instead of it, if that gains enough again.

    Args:
        result: without decision and verdict.
    """
    part = result.deciding
    decision, lines = _decision(part, result)
    gain = part.ways["place"].gain
    if result.other_trace is not None:
        own = result.second_half.ways["place"].gain
        carries = (
            ": it doesn't carry over, and a cap is what bounds a batch when traffic changes."
            if gain < own / 3
            else "."
        )
        lines.append(
            f"On the traffic it was fitted on (its second half) the placement gains {percent(own)},"
            f" on the other traffic {percent(gain)}{carries}"
        )
        if "place" not in decision and own >= result.min_gain:
            lines.append(
                "The placement loses nothing: where traffic stays as it was fitted, place (a plan "
                "without --judge does)."
            )
    else:
        lines.append(
            "Judged on the second half of the same traffic, which can't tell what happens when "
            "traffic changes: give a second trace with --judge."
        )
    lines += _active_lines(part, result, decision)
    lines += _budget_lines(result, decision, loss_unit(part.ways["nothing"]))
    replicas = part.ways.get("replicas")
    if isinstance(replicas, ReplicaCost):
        lines.append(
            f"Replicas would gain {signed_percent(_over(replicas, part.ways['place']))} over the "
            f"placement alone, for {replicas.replica_gb_a_device:.2f} GB of each device."
        )
    lines.append("Times are the cost model's, not measured.")
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
            f"Not worth it: perfect balance would gain {balance} of a step of {step}, less than "
            f"--min-gain {percent(least, 0)} ({share} of the step is experts)."
        ]
    lines = [
        f"Perfect balance would gain {balance} of a step of {step} through the MoE layers.",
        f"Placement alone gains {percent(place.gain)} and loses nothing.",
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
        f"Decode: batches with fewer than {result.min_expert_load} rows per expert wait for "
        f"weights, and the device with the most reads {before.most_active_experts:.1f} experts. "
        f"Capping those gives: {'; '.join(_active(point, before) for point in loosest)}."
    ]
    if all(loss(point) > result.max_mass_loss for point in points):
        lines.append(
            f"Each loses more than --max-mass-loss {percent(result.max_mass_loss)}: allow more if "
            "quality with calibrated stand-ins (compensate=true) stays good enough."
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
            "The trace holds no weights: losses are counted in assignments, and which of them "
            "matter least is unknown."
        )
    base = "in_order" if decision == "cap" else "placed"
    budget, where = result.budgets[base], "in order" if base == "in_order" else "placed"
    if budget is None:
        lines.append(
            f"Every cap chosen for experts {where} loses more than {percent(most)} of the {unit} "
            "on the batches that judge."
        )
    elif budget < most:
        lines.append(
            f"The caps for experts {where} were chosen to lose at most {percent(budget, 2)}: with "
            f"looser ones, more than {percent(most)} would be lost on the batches that judge."
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
