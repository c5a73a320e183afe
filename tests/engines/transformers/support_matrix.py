"""Writes docs/architectures.md: what attach does with every architecture of Transformers.

python tests/engines/transformers/support_matrix.py            # print the page
python tests/engines/transformers/support_matrix.py --write    # write docs/architectures.md
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import tiny_models
import torch
import transformers

from paceline import attach

PAGE = Path(__file__).resolve().parents[3] / "docs" / "architectures.md"
_HEAD = """# Architectures

What `paceline.attach` does with every architecture of Transformers {version} that has routed
experts, found by attaching to a tiny random model of each. Made by `make docs` and checked by the
tests; nothing in it is written by hand, and the engine holds no list of architectures: one that
isn't here works if its MoE blocks call `experts(hidden_states, top_k_index, top_k_weights)` beside
a `gate` or `router`.

- **full**: Token Drop with every `keep`, Expanded Drop, shadow and observe modes.
- **drop only**: the same without Expanded Drop; without a scoring rule also without `keep="score"`.
- **refused**: `attach` raises a `ValueError` with this reason.

"scores" is the router's scoring rule as found: weights are proportional to it. "eager" says how
dropped slots are left out of the architecture's own loop: it skips them itself, or is given the
kept pairs alone. grouped_mm, deepgemm and sonicmoe skip them in the GEMM; under batched_mm a
capped forward runs as grouped_mm. Rows of experts are counted below torch in the tests, for
every architecture under each of the three that it allows. Compiled (`torch.compile` after
`attach`), no graph breaks in the routing of any; where the eager loop gets the kept pairs alone,
their number is data, and the graph breaks there.

{counts}

| architecture | support | scores | eager | tested as | note |
|---|---|---|---|---|---|
"""


@functools.cache
def support_row(name: str) -> tuple[str, str]:
    """Return (level, table row) of one architecture; tests share them.

    A layer that differs from the others is named in the note.
    """
    model = tiny_models.build(name)
    tested = type(model).__name__
    try:
        with attach(model) as pace:
            support, layers = pace.support, pace._layers
            ways = {_way(layer.runner) for layer in layers}
    except ValueError as error:
        return "refused", f"| {name} | refused | | | {tested} | {_cell(str(error))} |"
    levels = {s.level for s in support}
    level = "drop only" if "drop only" in levels else "full"
    rules = sorted({s.scoring or "unknown" for s in support})
    notes = sorted({s.reason for s in support if s.reason})
    return level, (
        f"| {name} | {level} | {', '.join(rules)} | {', '.join(sorted(ways))} | {tested} | "
        f"{_cell('; '.join(notes))} |"
    )


def _way(execution: object) -> str:
    if execution.wide_ids:  # type: ignore[attr-defined]
        return "zero experts"
    return "skips" if execution.skips_sentinel else "kept pairs"  # type: ignore[attr-defined]


def _cell(text: str) -> str:
    return text.replace("|", "/").strip().rstrip(".")


def page() -> str:
    """The whole page."""
    rows = [support_row(name) for name in tiny_models.architectures()]
    levels = [level for level, _ in rows]
    counts = ", ".join(f"{levels.count(x)} {x}" for x in ("full", "drop only", "refused"))
    head = _HEAD.format(
        version=transformers.__version__, counts=f"{len(rows)} architectures: {counts}."
    )
    return head + "\n".join(row for _, row in rows) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    text = page()
    if "--write" in sys.argv:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text)
    else:
        print(text)
