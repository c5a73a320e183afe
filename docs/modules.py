"""Table of modules in structure.md: `python docs/modules.py` writes it."""

from __future__ import annotations

import ast
from pathlib import Path

PAGE = Path(__file__).with_name("structure.md")
PACKAGE = PAGE.parents[1] / "src" / "paceline"
HEADER = "## Modules\n\n| module | purpose |\n|---|---|\n"


def table() -> str:
    """Return one row per module: its path and the first paragraph of its docstring."""
    rows = []
    for module in sorted(PACKAGE.rglob("*.py")):
        text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
        first = text.split("\n\n")[0].replace("\n", " ")
        rows.append(f"| `{module.relative_to(PACKAGE).as_posix()}` | {first} |\n")
    return "".join(rows)


def page() -> str:
    """Return structure.md with a current table."""
    return PAGE.read_text(encoding="utf-8").split(HEADER)[0] + HEADER + table()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
