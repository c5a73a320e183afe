"""How well balanced loads are: what an average device waits for the busiest."""

from __future__ import annotations


def straggler_loss(peak_to_mean: float) -> float:
    """Share of the layer's expert time that an average unit waits: 1 - 1 / peak-to-mean.

    At most 1 (after drops, relative to the mean before them), nobody waits for anybody: 0.

    Args:
        peak_to_mean: rows of the busiest unit / mean rows a unit, >= 0.

    Raises:
        ValueError: if it is negative or NaN.

    >>> straggler_loss(2.0)
    0.5
    """
    if not peak_to_mean >= 0:
        raise ValueError(f"peak_to_mean={peak_to_mean} is not allowed: it is a number >= 0.")
    return 1 - 1 / peak_to_mean if peak_to_mean > 1 else 0.0
