"""Parts of an engine that a plugin depends on, looked up by name and signature."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module


def missing_part(needed: Mapping[str, Sequence[str]]) -> str | None:
    """Return the first part of an engine that is not as a plugin needs it, None if all are.

    Args:
        needed: `module:attribute.attribute` -> parameters that it must have.
    """
    found = (_missing(where, names) for where, names in needed.items())
    return next((what for what in found if what is not None), None)


def _missing(where: str, names: Sequence[str]) -> str | None:
    module, _, path = where.partition(":")
    try:
        found: object = import_module(module)
        for part in path.split("."):
            found = inspect.getattr_static(found, part)
    except (ImportError, AttributeError):
        return where
    if not names:
        return None
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    parameters = inspect.signature(found).parameters if callable(found) else {}
    absent = [name for name in names if name not in parameters]
    return f"parameter {absent[0]} of {where}" if absent else None
