"""Whole numbers of Python, NumPy and torch."""

from __future__ import annotations

import operator
from typing import Any


def whole_number(value: Any) -> int | None:
    """Return an integer of Python, NumPy or torch as an int; None for anything else, bool included.

    >>> whole_number(3), whole_number(True), whole_number("3")
    (3, None, None)
    """
    if type(value) is int:
        return value
    if is_flag(value):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # an array of several, a tensor without data
        return None


def is_flag(value: Any) -> bool:
    """Return True for a bool of Python, NumPy or torch, which also passes as 0 or 1.

    >>> is_flag(True), is_flag(1)
    (True, False)
    """
    return "bool" in str(getattr(value, "dtype", type(value)))


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Check a count and return it as an int.

    Raises:
        ValueError: if it is no whole number, or too small.

    >>> check_count("rounds", 3)
    3
    """
    count = whole_number(value)
    if count is None or count < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
    return count
