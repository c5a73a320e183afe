"""What long work tells while it runs; a terminal shows it as a bar, a log as lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with what is done, of how much, and a few words on it."""
