"""Timings summed up: minimum, median and maximum of seconds or ratios; and whose turn it is."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum.

    Raises:
        ValueError: if there is no value.

    >>> spread([3.0, 1.0, 2.0])
    {'min': 1.0, 'median': 2.0, 'max': 3.0}
    """
    if not values:
        raise ValueError("values is empty: allowed is at least one.")
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def ratios(base: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Spread of base / other, round by round: above 1, other is faster.

    Args:
        base: seconds, [rounds].
        other: seconds, [rounds].

    Raises:
        ValueError: if the rounds don't pair up, or a time is not positive.

    >>> ratios([2.0, 4.0], [1.0, 1.0])
    {'min': 2.0, 'median': 3.0, 'max': 4.0}
    """
    if len(base) != len(other):
        raise ValueError(f"base has {len(base)} rounds, other {len(other)}: allowed is the same.")
    if any(not seconds > 0 for seconds in (*base, *other)):
        raise ValueError(f"base={base} and other={other} are not allowed: times are positive.")
    return spread([a / b for a, b in zip(base, other, strict=True)])


def shuffled(names: Sequence[str], turn: int) -> list[str]:
    """The names in an order of this turn's own, alike on all ranks.

    What ran before leaves caches warm or cold and cores hot, so nothing may always follow the same.

    >>> shuffled("ab", turn=0) == shuffled("ab", turn=0)
    True
    """
    return random.Random(turn).sample(list(names), len(names))
