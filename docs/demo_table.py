"""README's tables of what the demo measured, from its results: `python docs/demo_table.py --write`.

Without --write they are printed. `paceline demo` writes results.json; the committed one is
benchmarks/results/demo.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.text import percent, signed_percent

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/demo.json"
START, END = "<!-- demo table -->\n", "<!-- end of demo table -->\n"
_HEADER = ("policy", "perplexity", "dropped", "busiest", "speed-up")
_KINDS = {"one_domain": "Batches of one domain", "mixed": "Batches that mix the domains"}


def tables(results: Mapping[str, Any]) -> str:
    """A Markdown table of every policy for each kind of batch, in lines of at most 80 columns."""
    parts = []
    for kind, title in _KINDS.items():
        rows = [_cells(row, row[kind]) for row in results["policies"]]
        lines = [_HEADER, ("---",) * len(_HEADER), *rows]
        parts.append(f"{title}:\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines))
    return "\n".join(parts)


def _cells(row: Mapping[str, Any], part: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["label"].replace("Compensated Drop", "Compensated").replace(" per ", ", "),
        _change(row, part),
        percent(part["dropped_share"]),
        f"{part['device_peak_to_mean']:.2f}",
        _speed(row, part),
    )


def _change(row: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    return "—" if row["key"] == "none" else signed_percent(part["perplexity_change"]["mean"])


def _speed(row: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    if row["key"] == "none":
        return "1"
    ratio = part["emulated"]["speedup"]
    return f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})"


def with_tables(text: str, results: Mapping[str, Any]) -> str:
    """A page with the tables between their two marks.

    >>> with_tables(START + "old" + END, {"policies": []}).splitlines()[1]
    'Batches of one domain:'
    """
    marked = re.compile(f"{re.escape(START)}.*{re.escape(END)}", re.DOTALL)
    return marked.sub(lambda _: START + tables(results) + END, text)


if __name__ == "__main__":
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    if "--write" in sys.argv:
        readme = ROOT / "README.md"
        readme.write_text(with_tables(readme.read_text(encoding="utf-8"), found), encoding="utf-8")
    else:
        print(tables(found), end="")
