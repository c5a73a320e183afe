"""Progress of long work; a terminal shows it as a bar, a log as lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and a few words on the work."""
