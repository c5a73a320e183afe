"""What a plan's figures mean: the decision, and the sentences that give its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.analysis.cap_words import lost, of_what

Ways = Mapping[str, Mapping[str, Any]]


def verdict(result: Mapping[str, Any]) -> tuple[str, list[str]]:
    """("nothing", "place", "cap" or "place and cap", why), from what was judged.

    Judged on the second traffic, where there is one. Placement is taken if it gains enough there,
    since it loses nothing; a cap on top of it, or instead of it, if that gains enough again.
    """
    part = result["other_trace"] or result["second_half"]
    decision, lines = _decide(part, result)
    gain = part["ways"]["place"]["gain"]
    if result["other_trace"] is not None:
        own = result["second_half"]["ways"]["place"]["gain"]
        line = (
            f"On the traffic it was fitted on (its second half) the placement gains {own:.1%}, on "
            f"the other traffic {gain:.1%}"
        )
        if gain < own / 3:
            line += ": it doesn't carry over, and a cap is what bounds a batch when traffic turns."
        else:
            line += "."
        lines.append(line)
        if "place" not in decision and own >= result["min_gain"]:
            lines.append(
                "The placement loses nothing: where traffic stays as it was fitted, place (a plan "
                "without --judge does)."
            )
    else:
        lines.append(
            "Judged on the second half of the same traffic, which can't tell what happens when "
            "traffic turns: give a second trace with --judge."
        )
    lines += _active_said(part, result, decision)
    lines += _caps_said(result, decision, of_what(part["ways"]["nothing"]))
    replicas = part["ways"].get("replicas")
    if replicas is not None:
        more = (1 + replicas["gain"]) / (1 + gain) - 1
        lines.append(
            f"Replicas would gain {more:+.1%} over the placement alone, for "
            f"{replicas['replica_gb_a_device']:.2f} GB of each device (paceline plan "
            "--place-only --replicas writes their map)."
        )
    lines.append("Times are the cost model's, not measured.")
    if "cap" in decision:
        lines.append(
            "Gate mass is a proxy: measure quality on your task before a cap goes into service."
        )
    return decision, lines


def _decide(part: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[str, list[str]]:
    ways, least = part["ways"], result["min_gain"]
    ceiling, base = part["perfect_balance_gain"], ways["nothing"]
    place, cap, both = (ways[name] for name in ("place", "cap", "place and cap"))
    # in decode a cap may gain more than balance would: it saves reading experts
    if ceiling < least and max(cap["gain"], both["gain"]) < least:
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
    more = (1 + both["gain"]) / (1 + place["gain"]) - 1
    lines.append(f"Placement alone gains {place['gain']:.1%} and loses nothing.")
    if place["gain"] >= least:
        if more >= least:
            return "place and cap", [
                *lines,
                f"A cap on top gains {more:.1%} more, for {_price(both)}: place, then cap.",
            ]
        return "place", [
            *lines,
            f"A cap on top would gain {more:.1%} more, for {_price(both)}: place, don't cap.",
        ]
    if cap["gain"] >= least:
        more = (1 + both["gain"]) / (1 + cap["gain"]) - 1
        if more >= least:
            return "place and cap", [
                *lines,
                f"A cap gains {cap['gain']:.1%}, and {more:.1%} more on placed experts, for "
                f"{_price(both)}: place and cap.",
            ]
        return "cap", [
            *lines,
            f"A cap gains {cap['gain']:.1%}, for {_price(cap)}: cap, don't place.",
        ]
    if both["gain"] >= least:
        return "place and cap", [
            *lines,
            f"Only both together reach {least:.0%}: {both['gain']:.1%}, for {_price(both)}.",
        ]
    return "nothing", [
        *lines,
        f"A cap within {result['max_mass_loss']:.1%} of the {of_what(cap)} gains "
        f"{cap['gain']:.1%}, both together {both['gain']:.1%}: not worth it by the {least:.0%} "
        "asked for.",
    ]


def _active_said(part: Mapping[str, Any], result: Mapping[str, Any], decision: str) -> list[str]:
    """What capping active experts gives and loses, where a traffic has batches that are small."""
    base = "placed" if "place" in decision else "in_order"
    points = [point for point in part["active"] if point["placement"] == base]
    if not points:
        return []
    before = part["ways"]["place" if base == "placed" else "nothing"]
    given = "; ".join(
        f"max_active={point['max_active']} {_gain_over(point, before):+.1%} for {_price(point)}"
        for point in sorted(points, key=lambda point: -point["max_active"])[:3]
    )
    lines = [
        f"Decode: batches below {result['min_expert_load']} rows an expert wait for weights, and "
        f"the device with the most reads {before['most_active_experts']:.1f} experts. Capping "
        f"those gives: {given}."
    ]
    most = result["max_mass_loss"]
    if all(lost(point) > most for point in points):
        lines.append(
            f"Each loses more than the {most:.1%} that a cap may: allow more (--max-mass-loss) if "
            "quality with stand-ins (paceline tune, compensate=true) bears it."
        )
    return lines


def _gain_over(point: Mapping[str, Any], before: Mapping[str, Any]) -> float:
    return float((1 + point["gain"]) / (1 + before["gain"]) - 1)


def _caps_said(result: Mapping[str, Any], decision: str, what: str) -> list[str]:
    """What the limit on what may be lost does to the caps."""
    lines, most = [], result["max_mass_loss"]
    if what != "gate mass":
        lines.append(
            "The trace holds no weights: what a cap may lose is counted in assignments, and which "
            "of them matter least is unknown."
        )
    base = "in_order" if decision == "cap" else "placed"
    budget, where = result["budgets"][base], "in order" if base == "in_order" else "placed"
    if budget is None:
        lines.append(
            f"Every cap that was chosen for experts {where} loses more than {most:.1%} of the "
            f"{what} here, if not where it was chosen."
        )
    elif budget < most:
        lines.append(
            f"The caps for experts {where} were chosen to lose at most {budget:.2%}: with looser "
            f"ones more than {most:.1%} would be lost here."
        )
    return lines


def _price(way: Mapping[str, Any]) -> str:
    """What a cap loses."""
    share = f"{way['dropped_share']:.1%} of the assignments"
    mass = way["gate_mass_lost"]
    return share if mass is None else f"{share} and {mass:.2%} of the gate mass"
