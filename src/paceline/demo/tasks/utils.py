"""Rows of the demo's tasks, read from beside this file wherever the harness is started.

The harness runs this file when a task is named by its path, and so gets to know `paceline-hf`.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset

import paceline.evaluation.harness  # noqa: F401  (registers the model)


def _rows(name: str, **_: Any) -> dict[str, Any]:
    path = Path(__file__).with_name(f"{name}.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}


continuation = partial(_rows, "continuation")
copy = partial(_rows, "copy")
passage = partial(_rows, "passage")
