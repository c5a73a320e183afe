"""Tables of what the demo measured, from its results: `python docs/demo_table.py --write`.

README shows some policies on batches of one domain, docs/quality.md all of them. Without --write
the tables are printed. `paceline demo` writes results.json; the committed one is
benchmarks/results/demo.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.text import percent, signed_percent

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/demo.json"
START, END = "<!-- demo table -->\n", "<!-- end of demo table -->\n"
_HEADER = ("policy", "perplexity", "dropped", "busiest", "speed-up")
IN_README = {
    "none",
    "compensated-1",
    "compensated-1-placed",
    "compensated-0.5",
    "device-1.25-score",
    "device-1-score",
    "expanded-1",
    "expert-1-score",
}
_KINDS = {"one_domain": "Batches of one domain", "mixed": "Batches that mix the domains"}


def table(rows: Iterable[Mapping[str, Any]], kind: str) -> str:
    """Return a Markdown table of policies on one kind of batch, in lines of at most 80 columns."""
    lines = [_HEADER, ("---",) * len(_HEADER), *(_cells(row, row[kind]) for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def tables(results: Mapping[str, Any]) -> str:
    """Return a table of every policy for each kind of batch."""
    rows = results["policies"]
    return "\n".join(f"{title}:\n\n{table(rows, kind)}" for kind, title in _KINDS.items())


def short_table(results: Mapping[str, Any]) -> str:
    """Return the table of README: a few policies on batches of one domain."""
    return table([row for row in results["policies"] if row["key"] in IN_README], "one_domain")


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


def pages(results: Mapping[str, Any]) -> dict[Path, str]:
    """Return each page that shows the tables, with the tables between their two marks."""
    marked = re.compile(f"{re.escape(START)}.*{re.escape(END)}", re.DOTALL)
    shown = {ROOT / "README.md": short_table(results), ROOT / "docs/quality.md": tables(results)}
    found = {}
    for page, new in shown.items():
        text = page.read_text(encoding="utf-8")
        found[page] = marked.sub(lambda _, new=new: START + new + END, text)  # type: ignore[misc]
    return found


if __name__ == "__main__":
    for page, text in pages(json.loads(RESULTS.read_text(encoding="utf-8"))).items():
        if "--write" in sys.argv:
            page.write_text(text, encoding="utf-8")
        else:
            print(text.partition(START)[2].partition(END)[0])
