"""The tables of docs/quality.md, from the results beside this file.

python benchmarks/quality_tables.py           # prints them
python benchmarks/quality_tables.py --write   # puts them into the page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from page_tables import filled, main

from paceline.evaluation.tables import table, with_error
from paceline.reporting.quality_figures import factor
from paceline.text import percent, signed_percent, times

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "quality.md"


def tables() -> dict[str, str]:
    """Name of the place on the page -> its table."""
    swept, judged = (
        json.loads((HERE / "results" / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("sweep", "quality")
    )
    return {
        "sweep per device": _sweep(swept, "device"),
        "sweep per expert": _sweep(swept, "expert"),
        "texts": _texts(judged["texts"]["compositions"]),
        "tasks": _tasks(judged["tasks"]),
    }


def page(text: str) -> str:
    """Replace the tables of the page."""
    return filled(text, tables())


def _lines(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(table(header, rows)) + "\n"


def _sweep(swept: dict[str, Any], unit: str) -> str:
    points = {
        (p["capacity_factor"], p["keep"], p["expand"], p["compensate"]): p
        for p in swept["points"]
        if p["unit"] == unit
    }
    kinds: list[tuple[str, str | None, bool]] = [
        ("score", None, False),
        ("score", None, True),
        ("score", "own_device", False),
        ("score", "own_device", True),
        ("random", None, False),
    ]
    rows = []
    for size in dict.fromkeys(key[0] for key in points):
        found = [points[size, keep, expand, filled] for keep, expand, filled in kinds]
        rows.append(
            [
                factor(size),
                times(found[0]["device_peak_to_mean"]),
                percent(found[0]["dropped_share"]),
                *map(_change, found),
            ]
        )
    header = ["factor", "busiest device", "dropped", "alone", "stand-ins", "expanded",
              "expanded, stand-ins", "random"]  # fmt: skip
    return _lines(header, rows)


def _change(point: dict[str, Any]) -> str:
    shown = signed_percent(point["change"])
    return f"**{shown}**" if point["on_frontier"] else shown


def _texts(compositions: dict[str, Any]) -> str:
    rows = []
    for index, row in enumerate(compositions["one_text"]["policies"]):
        cells = [row["name"]]
        for name in ("one_text", "mixed", "solo"):
            found = compositions[name]["policies"][index]
            change = found["perplexity_change"]
            cells.append(with_error(change["mean"], change["standard_error_over_texts"]))
            cells.append(times(found["device_peak_to_mean"]))
        cells.append(percent(row["changed_next_tokens"]))
        shared = compositions["mixed"]["policies"][index]["against_solo"]
        cells.append(percent(shared["changed_next_tokens"]))
        rows.append(cells)
    header = ["policy", "one text a batch %", "busiest", "mixed %", "busiest", "alone %", "busiest",
              "next tokens changed", "by sharing a mixed batch"]  # fmt: skip
    return _lines(header, rows)


def _tasks(tasks: dict[str, Any]) -> str:
    rows = []
    for row in tasks["modes"]["batched"]["policies"]:
        continuation, copied, passage = row["tasks"].values()
        mean = row["mean_difference"]
        rows.append(
            [
                row["name"],
                f"{100 * continuation['score']:.1f}",
                f"{100 * copied['score']:.1f}",
                with_error(mean["mean"], mean["standard_error"], digits=1),
                f"{passage['score']:.3f}",
                f"{row['changed_answers']} of {row['answers']}",
                percent(row["dropped_share"]),
                times(row["device_peak_to_mean"]),
                f"{row['against_solo']['changed_answers']} of {row['answers']}",
            ]
        )
    header = ["policy", "continuation", "copy", "change of the mean", "passage, perplexity",
              "answers changed", "dropped", "busiest", "changed by sharing"]  # fmt: skip
    return _lines(header, rows)


if __name__ == "__main__":
    main(PAGE, tables())
