"""Values as people read them: percentages, factors, and shortened values in messages."""

from __future__ import annotations

import math


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


def capped_nothing(least: float | None, here: float, tokens: float | None, factor: bool) -> str:
    """Say why a policy that may cap never did, and from which batch size it would.

    Args:
        least: its min_expert_load, the mean tokens per expert from which a factor applies, and
            below which max_active does; None: it never caps.
        here: mean tokens per expert in a batch.
        tokens: in a batch, where known.
        factor: True if the policy has a capacity_factor, False if it has max_active alone.

    >>> capped_nothing(16, 4, 128, factor=True)
    'The policy capped nothing: its cap applies from a mean of 16 tokens per expert \
(min_expert_load), here batches of about 512 tokens; a batch here has 4.'
    """
    if least is None:
        return "The policy capped nothing: it has no capacity_factor."
    if factor and here >= least:
        return "The policy capped nothing: no device or expert had more than its capacity."
    rule = f"a mean of {least:g} tokens per expert (min_expert_load)"
    if tokens is not None and here > 0:
        rule += f", here batches of about {math.ceil(tokens * least / here):,} tokens"
    if not factor:
        return (
            f"The policy capped nothing: max_active applies below {rule}; a batch here has "
            f"{here:.3g}, or no device has more active experts."
        )
    return f"The policy capped nothing: its cap applies from {rule}; a batch here has {here:.3g}."
