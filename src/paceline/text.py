"""How a value is named in a message: shortened, so that a sentence stays one."""

from __future__ import annotations


def shortened(value: object, limit: int = 60) -> str:
    """A text as it is, anything else as Python writes it, with "..." for what is over `limit`.

    >>> shortened("a long sentence", limit=9), shortened([1, 2])
    ('a long...', '[1, 2]')
    """
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[: max(0, limit - 3)] + "..."
