"""Values as people read them: percentages, factors, and shortened values in messages."""

from __future__ import annotations


def shortened(value: object, limit: int = 60) -> str:
    """Shorten a value for a message: a text as it is, anything else as Python writes it.

    >>> shortened("a long sentence", limit=9), shortened([1, 2])
    ('a long...', '[1, 2]')
    """
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[: max(0, limit - 3)] + "..."


def percent(share: float, digits: int = 1) -> str:
    """Write a share as a percentage, without a sign.

    >>> percent(0.123)
    '12.3%'
    """
    return f"{100 * share:.{digits}f}%"


def signed_percent(share: float) -> str:
    """Write a change as a signed percentage with a sensible number of digits.

    >>> signed_percent(0.0024)
    '+0.24%'
    """
    digits = 0 if abs(share) >= 0.995 else 1 if abs(share) >= 0.0995 else 2
    text = f"{100 * share:+.{digits}f}%"
    if float(text[:-1]) == 0:
        return "0.00%"
    return text.replace("-", "−")


def times(value: float) -> str:
    """Write a factor.

    >>> times(1.684)
    '1.68×'
    """
    return f"{value:.2f}×"
