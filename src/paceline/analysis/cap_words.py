"""What a study of caps says: one of its ways, and sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IN_ORDER, PLACED = "in order", "placed"
"""Placements of a study."""


def way_of(
    result: Mapping[str, Any], placement: str, unit: str | None, gamma: float | None
) -> dict[str, Any]:
    """One of the ways of a `cap_study`; without a cap unit and gamma are None.

    Raises:
        KeyError: if there is none.

    >>> way = {"placement": "placed", "unit": None, "gamma": None}
    >>> way_of({"ways": [way]}, "placed", None, None) is way
    True
    """
    for way in result["ways"]:
        if (way["placement"], way["unit"], way["gamma"]) == (placement, unit, gamma):
            found: dict[str, Any] = way
            return found
    raise KeyError((placement, unit, gamma))


def said(result: Mapping[str, Any], most: float = 0.01) -> list[str]:
    """What the figures mean, in sentences.

    Args:
        result: of `cap_study`.
        most: share of the gate mass (of the assignments, where it is unknown) a cap may lose.

    >>> way = {"placement": "in order", "unit": None, "gamma": None, "busiest_device": 1.5}
    >>> study = {"ways": [way], "expert_to_device": {"in order": []}, "keep": None, "devices": 8}
    >>> said(study | {"judged_on": "all batches", "placement_is": "in order"})[0][:54]
    "An average device waits 33% of the experts' time for t"
    """
    base = way_of(result, IN_ORDER, None, None)
    peak = base["busiest_device"]
    lines = [
        f"An average device waits {1 - 1 / peak:.0%} of the experts' time for the busiest of "
        f"{result['devices']}, which gets {peak:.2f} x the mean ({result['judged_on']}, experts in "
        "order)."
    ]
    names = [IN_ORDER]
    if PLACED in result["expert_to_device"]:
        names.append(PLACED)
        placed = way_of(result, PLACED, None, None)
        fewer = 1 - placed["busiest_device"] / peak
        lines.append(
            f"The placement ({result['placement_is']}) brings that to "
            f"{placed['busiest_device']:.2f} x: {fewer:.0%} fewer rows to wait for, nothing lost."
            if fewer > 0
            else f"The placement ({result['placement_is']}) doesn't help here: "
            f"{placed['busiest_device']:.2f} x."
        )
    for name in names:
        uncapped = way_of(result, name, None, None)
        caps = [w for w in result["ways"] if w["placement"] == name and w["unit"] == "device"]
        allowed = [w for w in caps if lost(w) <= most]
        if not allowed:
            if caps:
                lines.append(
                    f"Experts {name}: every cap a device tried loses more than {most:.0%} of the "
                    f"{of_what(caps[0])}."
                )
            continue
        best = max(allowed, key=lambda way: (way["gain"], way["gamma"]))
        fewer = 1 - uncapped["gain"] / best["gain"]
        what = of_what(best)
        if fewer < 0.005:
            lines.append(
                f"Experts {name}: a cap a device within {most:.0%} of the {what} gains next to "
                "nothing."
            )
            continue
        lines.append(
            f"Experts {name}: of the caps a device that lose at most {most:.0%} of the {what}, "
            f"{best['gamma']:g} x the mean leaves {fewer:.1%} fewer rows to wait for than no cap, "
            f"for {best['dropped_share']:.2%} of the assignments"
            + (f" and {lost(best):.2%} of the {what}." if what != "assignments" else ".")
        )
    if not result["keep"]:
        lines.append(
            "The trace holds counts, not what each token chose: caps can't be tried on it."
        )
    if PLACED not in names:
        lines.append("It is one batch, which can't tell what a placement would give on others.")
    lines.append(
        "Rows are counted, nothing is timed: what they cost depends on model and hardware. Gate "
        "mass is a proxy: measure quality on your task before a cap goes into service."
    )
    return lines


def lost(way: Mapping[str, Any]) -> float:
    """Share of the gate mass a way loses; of the assignments, where it is unknown.

    >>> lost({"gate_mass_lost": None, "dropped_share": 0.25})
    0.25
    """
    mass: float | None = way["gate_mass_lost"]
    share: float = way["dropped_share"]
    return share if mass is None else mass


def of_what(way: Mapping[str, Any]) -> str:
    """What `lost` is a share of.

    >>> of_what({"gate_mass_lost": None})
    'assignments'
    """
    return "assignments" if way["gate_mass_lost"] is None else "gate mass"
