"""Write report files whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str, *, private: bool) -> None:
    """Replace `path` by `text` in one step; readable by its owner only if `private`.

    Raises:
        OSError: if the folder can't be written.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # made 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        if not private:
            os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def to_json(data: Any) -> str:
    """Indented, strictly valid JSON (no NaN)."""
    return json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current
