"""Progress of long work; a terminal shows it as a bar, a log as lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and a few words on the work."""


class Steps:
    """Progress over several pieces of work in turn.

    Args:
        progress: shows all of them as one; None: nothing is shown.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def next(self, title: str) -> Progress | None:
        """Return the progress of the next piece."""
        if self._progress is None:
            return None
        start, show, total = self._done, self._progress, self._total
        self._done += 1

        def piece(done: int, of: int, name: str) -> None:
            show(start * 100 + 100 * done // max(1, of), total * 100, f"{title}: {name}")

        return piece
