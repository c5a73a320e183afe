"""What a run has computed so far, a batch at a time, so that a killed one goes on where it was.

A result is kept under a hash of everything that it depends on: the model's weights, what was
applied, and the batch. Another policy, text or task so computes what is new, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.files import write_text


class Store:
    """Results by what they depend on; on disk where a folder is given.

    Args:
        folder: made if need be, closed to others; None keeps nothing beyond the run.

    Attributes:
        computed: results that weren't there.
        found: results that were.

    Raises:
        OSError: if the folder can't be made.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder, self.computed, self.found = folder, 0, 0
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def get(self, key: Any, compute: Callable[[], Any]) -> Any:
        """The result under a key, computed and kept if it isn't there.

        Args:
            key: JSON-able, everything that the result depends on.
            compute: gives the result, JSON-able.
        """
        if self._folder is None:
            self.computed += 1
            return compute()
        path = self._folder / f"{digest(key)}.json"
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not there, or broken by somebody else: computed anew
            kept = json.loads(json.dumps(compute()))
            write_text(path, json.dumps(kept), private=True)
            self.computed += 1
        else:
            self.found += 1
        return kept


def digest(value: Any) -> str:
    """A short hash of a JSON-able value.

    >>> digest([1, "a"]) == digest([1, "a"]), digest([1, "a"]) == digest([1, "b"])
    (True, False)
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
