"""Exact capacities: `ceil(factor * T * k * n / E)` without a host sync and without overflow.

The factor is the decimal that the user wrote, so the ratio `factor * k * n / E` is a fraction
p/q known on the host, while T may be known on the device only. p and q can be far too large for
int64 arithmetic (0.1 + 0.2 is 30000000000000004 / 10**17). But T is less than some N, and
`ceil(T * x)` for T up to N does not change when x moves up to the next fraction with a
denominator of at most N (of the Farey sequence of order N): between two neighbours of that
sequence no T * x crosses an integer. So p/q is replaced by that neighbour, which is small.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

INT64_MAX = torch.iinfo(torch.int64).max
"""Reported as the capacity of a pool without a cap."""


MAX_TOKENS = 1 << 31
"""No forward has as many rows; a constant bound serves any batch size, compiled or not."""


def capacities(ratio: Fraction, tokens: Tensor) -> Tensor:
    """`ceil(ratio * tokens)`, exact, saturating at the largest int64.

    Args:
        ratio: assignments allowed a token: factor * k * n / E.
        tokens: int64, any shape: valid tokens of each pool, fewer than `MAX_TOKENS`.

    Returns:
        int64 tensor of the shape of `tokens`.
    """
    numerator, denominator = small_ratio(ratio, MAX_TOKENS)
    whole, rest = divmod(numerator, denominator)
    # tokens * rest + denominator < 2 ** 62 + 2 ** 31
    part = torch.div(tokens * rest + (denominator - 1), denominator, rounding_mode="floor")
    whole = min(whole, INT64_MAX)
    if (whole + 1) * MAX_TOKENS <= INT64_MAX:
        return tokens * whole + part
    room = torch.div(INT64_MAX - part, whole, rounding_mode="floor")
    return torch.where(tokens > room, INT64_MAX, tokens.clamp(max=room) * whole + part)


@lru_cache(maxsize=4096)
def small_ratio(ratio: Fraction, order: int) -> tuple[int, int]:
    """The smallest fraction >= ratio whose denominator is at most `order`, >= 1."""
    if ratio.denominator <= order:
        return ratio.numerator, ratio.denominator
    # Stern-Brocot search with whole runs of steps at once: low < ratio <= high throughout, and the
    # two are neighbours, so when no mediant has a small enough denominator, high is the answer.
    whole = ratio.numerator // ratio.denominator
    low, high = (whole, 1), (whole + 1, 1)
    p, q = ratio.numerator, ratio.denominator
    while low[1] + high[1] <= order:
        # how many times high can be added to low while staying below the ratio
        behind, ahead = p * low[1] - low[0] * q, high[0] * q - p * high[1]
        steps = min((behind - 1) // ahead, (order - low[1]) // high[1])
        low = (low[0] + steps * high[0], low[1] + steps * high[1])
        # and low to high while staying at or above it
        behind = p * low[1] - low[0] * q
        steps = min(ahead // behind, (order - high[1]) // low[1])
        high = (high[0] + steps * low[0], high[1] + steps * low[1])
    return high


@lru_cache(maxsize=4096)
def tokens_needed(min_expert_load: float, k: int, num_experts: int) -> int:
    """The fewest tokens whose mean load an expert, T * k / E, reaches `min_expert_load`."""
    return min(-(-(Fraction(str(min_expert_load)) * num_experts) // k), INT64_MAX)
