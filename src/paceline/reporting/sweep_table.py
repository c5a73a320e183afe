"""A sweep over caps in words: names of its lines, and a Markdown table of its points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.text import percent, times

SMALLEST = 1e-6
"""Factors below this are written as 0: one assignment per unit, whatever the batch."""


def family(point: Mapping[str, Any]) -> str:
    """Name the kind of cap of a point, shared by points of other factors.

    >>> family({"unit": "device", "keep": "score", "expand": None, "compensate": True})
    'Compensated Drop per device'
    """
    kind = "Compensated" if point["compensate"] else "Token"
    words = [f"{kind} Drop per {point['unit']}"]
    if point["expand"] is not None:
        words.append(f"expanded to {point['expand'].replace('_', ' ')}")
    if point["keep"] != "score":
        words.append(point["keep"])
    return ", ".join(words)


def factor(value: float) -> str:
    """Write a capacity factor.

    >>> factor(1.25), factor(1e-9)
    ('1.25', '0')
    """
    return "0" if value < SMALLEST else f"{value:g}"


def families(points: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Group the points by kind of cap, in their order."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for point in points:
        found.setdefault(family(point), []).append(point)
    return found


def sweep_table(result: Mapping[str, Any]) -> str:
    """Write a sweep as Markdown: a row per cap, those that nothing beats in bold."""
    base, subject = result["baseline"], result["subject"]
    lines = [
        f"{result['model']}: {subject['layers']} MoE layers of {subject['experts']} experts on "
        f"{subject['devices']} devices, {sum(result['tokens_by_text'].values())} tokens of "
        f"{len(result['tokens_by_text'])} texts, {result['batch_size']} sequences of "
        f"{result['sequence_length']} tokens per batch. Without a cap the busiest device gets "
        f"{times(base['device_peak_to_mean'])} the mean. Bold: no other cap here has both a less "
        "busy device and a smaller change.",
        "",
        "| cap | factor | busiest device | dropped | perplexity | next tokens changed |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, points in families(result["points"]).items():
        for point in points:
            error, change = point["standard_error"], f"{100 * point['change']:+.2f}%"
            cells = [
                name,
                factor(point["capacity_factor"]),
                times(point["device_peak_to_mean"]),
                percent(point["dropped_share"]),
                change if error is None else f"{change} ± {100 * error:.2f}",
                percent(point["changed_next_tokens"]),
            ]
            if point["on_frontier"]:
                cells = [f"**{cell}**" for cell in cells]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
