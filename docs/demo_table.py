"""README's table of what the demo measured, from its results: `python docs/demo_table.py --write`.

Without --write it is printed. `paceline demo` writes results.json; the committed one is
benchmarks/results/demo.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.wording import percent, signed_percent

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/demo.json"
START, END = "<!-- demo table -->\n", "<!-- end of demo table -->\n"
_HEADER = (
    "policy",
    "perplexity",
    "dropped",
    "busiest device",
    "speed-up (bound)",
    "mixed batches: perplexity",
    "busiest device",
    "speed-up (bound)",
)


def table(results: Mapping[str, Any]) -> str:
    """A Markdown table of every policy on one-domain and mixed batches."""
    lines = [_HEADER, ("---",) * len(_HEADER), *map(_cells, results["policies"])]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    one, mixed = row["one_domain"], row["mixed"]
    return (
        row["label"],
        _change(row, one),
        percent(one["dropped_share"]),
        f"{one['device_peak_to_mean']:.2f}",
        _speed(row, one),
        _change(row, mixed),
        f"{mixed['device_peak_to_mean']:.2f}",
        _speed(row, mixed),
    )


def _change(row: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    return "—" if row["key"] == "none" else signed_percent(part["perplexity_change"]["mean"])


def _speed(row: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    if row["key"] == "none":
        return "1"
    ratio, bound = part["emulated"]["speedup"], part["emulated"]["bound"]
    low, high = ratio["min"], ratio["max"]
    return f"{ratio['median']:.2f} ({low:.2f}-{high:.2f}; {bound:.2f})"


def with_table(text: str, results: Mapping[str, Any]) -> str:
    """A page with the table between its two marks.

    >>> with_table(START + "old" + END, {"policies": []}).splitlines()[1][:8]
    '| policy'
    """
    marked = re.compile(f"{re.escape(START)}.*{re.escape(END)}", re.DOTALL)
    return marked.sub(lambda _: START + table(results) + END, text)


if __name__ == "__main__":
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    if "--write" in sys.argv:
        readme = ROOT / "README.md"
        readme.write_text(with_table(readme.read_text(encoding="utf-8"), found), encoding="utf-8")
    else:
        print(table(found), end="")
