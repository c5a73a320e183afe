"""What a plan's figures mean: the decision, and the sentences that give its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Ways = Mapping[str, Mapping[str, Any]]


def verdict(result: Mapping[str, Any]) -> tuple[str, list[str]]:
    """("nothing", "place", "cap" or "place and cap", why), from what was judged.

    Placement is taken if it gains enough, since it loses nothing: on the traffic it is judged on,
    or on its own where it slows the other one down by nothing. A cap is taken on top of that if it
    gains enough again where it is judged: on the second traffic, if there is one.
    """
    part = result["other_trace"] or result["second_half"]
    decision, lines = _decide(part, result)
    halves = result["second_half"]["ways"]
    if result["other_trace"] is not None:
        own = halves["place"]["gain"]
        lines.append(
            f"On the traffic it was fitted on (its second half) the placement gains {own:.1%}, on "
            f"the other traffic {part['ways']['place']['gain']:.1%}"
            + (
                ": it doesn't carry over, and a cap is what bounds a batch when traffic turns."
                if part["ways"]["place"]["gain"] < own / 3
                else "."
            )
        )
    else:
        lines.append(
            "Judged on the second half of the same traffic, which can't tell what happens when "
            "traffic turns: give a second trace with --judge."
        )
    budget = result["budgets"]["in_order" if decision == "cap" else "placed"]
    if budget is None:
        lines.append(
            f"Every cap that was chosen loses more than {result['max_mass_loss']:.1%} of the gate "
            "mass here, if not where it was chosen."
        )
    elif budget < result["max_mass_loss"]:
        lines.append(
            f"Its caps were chosen to lose at most {budget:.2%}: with looser ones more than "
            f"{result['max_mass_loss']:.1%} would be lost here."
        )
    replicas = part["ways"].get("replicas")
    if replicas is not None:
        more = (1 + replicas["gain"]) / (1 + part["ways"]["place"]["gain"]) - 1
        lines.append(
            f"Replicas would gain {more:+.1%} over the placement alone, for "
            f"{replicas['replica_gb_a_device']:.2f} GB of each device."
        )
    lines.append(
        "Times are the cost model's, not measured. Gate mass is a proxy: measure quality on your "
        "task before a cap goes into service."
        if "cap" in decision
        else "Times are the cost model's, not measured."
    )
    return decision, lines


def _decide(part: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[str, list[str]]:
    ways, least = part["ways"], result["min_gain"]
    ceiling, base = part["perfect_balance_gain"], ways["nothing"]
    if ceiling < least and result["other_trace"] is None:
        share = base["stages"]["experts"] / base["microseconds"]
        return "nothing", [
            f"Not worth it: perfect balance would gain {ceiling:.1%} of a step of "
            f"{base['microseconds']:.0f} us, below the {least:.0%} asked for ({share:.0%} of it "
            "is experts)."
        ]
    lines = [
        f"A step of {base['microseconds']:.0f} us through the MoE layers could be {ceiling:.1%} "
        "faster with perfect balance."
    ]
    place, cap, both = (ways[name] for name in ("place", "cap", "place and cap"))
    loss = both["gate_mass_lost"]
    more = (1 + both["gain"]) / (1 + place["gain"]) - 1
    lines.append(f"Placement alone gains {place['gain']:.1%} and loses nothing.")
    own = result["second_half"]["ways"]["place"]["gain"]
    if place["gain"] >= least or (own >= least and place["gain"] >= 0):
        if more >= least:
            return "place and cap", [
                *lines,
                f"A cap on top gains {more:.1%} more, for {both['dropped_share']:.1%} of the "
                f"assignments and {_mass(loss)} of the gate mass: place, then cap.",
            ]
        return "place", [
            *lines,
            f"A cap on top would gain {more:.1%} more, for {both['dropped_share']:.1%} of the "
            f"assignments and {_mass(loss)} of the gate mass: place, don't cap.",
        ]
    if cap["gain"] >= least:
        return "cap", [
            *lines,
            f"A cap gains {cap['gain']:.1%}, for {cap['dropped_share']:.1%} of the assignments and "
            f"{_mass(cap['gate_mass_lost'])} of the gate mass: cap, don't place.",
        ]
    if both["gain"] >= least:
        return "place and cap", [
            *lines,
            f"Only both together reach {least:.0%}: {both['gain']:.1%}, for "
            f"{both['dropped_share']:.1%} of the assignments and {_mass(loss)} of the gate mass.",
        ]
    return "nothing", [
        *lines,
        f"A cap within {result['max_mass_loss']:.1%} of the gate mass gains {cap['gain']:.1%}: not "
        f"worth it by the {least:.0%} asked for.",
    ]


def _mass(loss: float | None) -> str:
    return "an unknown share" if loss is None else f"{loss:.2%}"
