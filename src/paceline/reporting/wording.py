"""How figures are written out for people."""

from __future__ import annotations


def percent(share: float, digits: int = 1) -> str:
    """A share as a percentage, without a sign: 0.123 -> "12.3%"."""
    return f"{100 * share:.{digits}f}%"


def signed_percent(share: float) -> str:
    """A change as a signed percentage with a sensible number of digits: 0.0024 -> "+0.24%"."""
    digits = 0 if abs(share) >= 0.995 else 1 if abs(share) >= 0.0995 else 2
    text = f"{100 * share:+.{digits}f}%"
    if float(text[:-1]) == 0:
        return "0.00%"
    return text.replace("-", "−")


def times(value: float) -> str:
    """A factor: 1.684 -> "1.68×"."""
    return f"{value:.2f}×"
