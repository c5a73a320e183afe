"""The notebooks of examples/ run, cell by cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    names: dict[str, Any] = {}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == [], "kept without outputs"
        exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)
    assert names["loosest"].gain >= 1.1
    assert type(names["figure"]).__module__.startswith("plotly.graph_objs")
    assert names["figure"].layout.title.text == "Busiest device of every layer"
