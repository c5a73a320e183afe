"""What counts as a whole number, whichever library it comes from."""

from __future__ import annotations

import operator
from typing import Any


def whole_number(value: Any) -> int | None:
    """An integer of Python, NumPy or torch as an int; None for anything else, a bool too.

    >>> whole_number(3), whole_number(True), whole_number("3")
    (3, None, None)
    """
    if type(value) is int:
        return value
    if "bool" in str(getattr(value, "dtype", type(value))):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # an array of several, a tensor without data
        return None
