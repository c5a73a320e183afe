"""The names that a policy's `keep` may have: built in, the paper's, and registered ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KEEPS = ("score", "weight", "contribution", "first", "last", "random")
"""Built-in orders of preference: the names say what is kept."""

KEEP_ALIASES = {  # names in the paper say the order in which tokens arrive, or what is dropped
    "order": "first",
    "reverse": "last",
    "reverse_order": "last",
}

REGISTERED: dict[str, Callable[..., Any]] = {}
"""Name -> function, as `paceline.register_keep` was given them."""


def registered_keeps() -> tuple[str, ...]:
    """Names given to `paceline.register_keep`, sorted."""
    return tuple(sorted(REGISTERED))
