"""How figures are written out for people."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.placement import ExpertPlacement


def percent(share: float, digits: int = 1) -> str:
    """A share as a percentage, without a sign.

    >>> percent(0.123)
    '12.3%'
    """
    return f"{100 * share:.{digits}f}%"


def signed_percent(share: float) -> str:
    """A change as a signed percentage with a sensible number of digits.

    >>> signed_percent(0.0024)
    '+0.24%'
    """
    digits = 0 if abs(share) >= 0.995 else 1 if abs(share) >= 0.0995 else 2
    text = f"{100 * share:+.{digits}f}%"
    if float(text[:-1]) == 0:
        return "0.00%"
    return text.replace("-", "−")


def times(value: float) -> str:
    """A factor.

    >>> times(1.684)
    '1.68×'
    """
    return f"{value:.2f}×"


def placed(placements: Sequence[ExpertPlacement]) -> str:
    """How experts are placed, of one layer or of several.

    >>> placed([ExpertPlacement.contiguous(8, 4)] * 2), placed([ExpertPlacement.explicit([1, 0])])
    ('experts placed in order', 'experts placed as given')
    """
    if all(_in_order(placement) for placement in placements):
        return "experts placed in order"
    return "experts placed " + ("as given" if len(set(placements)) == 1 else "layer by layer")


def _in_order(placement: ExpertPlacement) -> bool:
    experts, devices = placement.num_experts, placement.num_devices
    return devices <= experts and placement == ExpertPlacement.contiguous(experts, devices)
