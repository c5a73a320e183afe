"""What reports are written as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.whole_file import whole_file


def write_text(path: Path, text: str, *, private: bool) -> None:
    """Replace `path` by `text` in one step; readable by its owner only if `private`.

    Raises:
        OSError: if the folder can't be written.
    """
    with whole_file(path, private=private) as file:
        file.write_text(text, encoding="utf-8")


def to_json(data: Any) -> str:
    """Indented, strictly valid JSON (no NaN)."""
    return json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
