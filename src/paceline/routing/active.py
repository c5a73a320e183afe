"""The policy's `max_active`: how many experts each device may read, and exact sums of weights.

Sums of floats depend on their order, and so on the backend and on the rest of the batch. Weights
are therefore taken as multiples of a power of two, so small that it hardly ever rounds a float32,
and added up as integers.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import ceil

import numpy as np
from torch import Tensor

from paceline.placement import ExpertPlacement
from paceline.routing.limits import MAX_TOKENS

WEIGHT_LIMIT = 128.0
"""Weights are clamped to +-this; routers scale theirs to 16 at most. NaN counts as 0."""


def most_active(max_active: int | float, hosted: int) -> int:
    """Return how many of its experts a device may read, exact.

    Args:
        max_active: of the policy, experts or a share of those hosted.
        hosted: number of experts on the device.

    >>> most_active(0.5, 5), most_active(2, 5)
    (3, 2)
    """
    if isinstance(max_active, int):
        return min(max_active, hosted)
    return ceil(Fraction(str(max_active)) * hosted)


class Hosts:
    """The devices that host any expert. Made and cached by `hosts_of`.

    Attributes:
        experts: [hosts, most] their experts, ascending; E where a device has no more.
        places: [hosts] number of them that may get any token.
        most: experts of the largest device.
    """

    def __init__(self, placement: ExpertPlacement, max_active: int | float) -> None:
        self.most = max(placement.sizes)
        filled = [device for device, size in enumerate(placement.sizes) if size]
        self.experts = tuple(
            (*own, *[placement.num_experts] * (self.most - len(own)))
            for own in map(placement.experts_of, filled)
        )
        self.places = tuple(most_active(max_active, placement.sizes[d]) for d in filled)


@lru_cache(maxsize=256)
def hosts_of(placement: ExpertPlacement, max_active: int | float) -> Hosts:
    """Return the devices of a placement and how many experts each may read."""
    return Hosts(placement, max_active)


def weight_unit(tokens_needed: int, k: int) -> float:
    """Return the number of units in a weight of 1, such that sums stay below 2 ** 62.

    Args:
        tokens_needed: fewest tokens of a forward to which max_active doesn't apply.
        k: experts per token.

    >>> weight_unit(64, 8) == 2.0**45
    True
    """
    assignments = min(tokens_needed, MAX_TOKENS) * k
    return 2.0 ** (62 - 7 - assignments.bit_length())


def rows_spared(max_active: int | float | None, placement: ExpertPlacement | None, k: int) -> int:
    """Return the most rows that can't choose more experts of any device than it may read.

    Args:
        max_active: of the policy.
        placement: of the experts; None: every expert is a device of its own.
        k: experts per token.

    >>> rows_spared(6, ExpertPlacement.contiguous(16, 2), k=2)
    3
    """
    if max_active is None or placement is None:
        return MAX_TOKENS
    allowed = [(n, most_active(max_active, n)) for n in set(placement.sizes)]
    return min((most // min(k, n) for n, most in allowed if most < n), default=MAX_TOKENS)


class Limits:
    """The number of experts that each device may read, to check a choice on the host.

    Args:
        placement: of the experts.
        max_active: of the policy.
    """

    def __init__(self, placement: ExpertPlacement, max_active: int | float) -> None:
        self._device_of = np.array(placement.expert_to_device)
        self._places = np.array([most_active(max_active, size) for size in placement.sizes])
        self._fewest = min((most for most in self._places.tolist() if most), default=0)

    def keep(self, ids: Tensor) -> bool:
        """Return True if no device exceeds its limit for `ids` [tokens, k] int64, on a CPU.

        All tokens count. Also False where an id is no expert's, which only routing handles.

        >>> from torch import tensor
        >>> Limits(ExpertPlacement.contiguous(4, 2), 1).keep(tensor([[0, 2], [1, 2]]))
        False
        """
        try:
            rows = np.bincount(ids.numpy().ravel(), minlength=len(self._device_of))
        except ValueError:  # below 0
            return False
        if len(rows) > len(self._device_of):
            return False
        experts = self._device_of[rows > 0]
        if len(experts) <= self._fewest:
            return True
        most = np.bincount(experts, minlength=len(self._places))
        return bool((most <= self._places).all())


@lru_cache(maxsize=256)
def limits_of(placement: ExpertPlacement, max_active: int | float) -> Limits:
    """Return the limits under this placement."""
    return Limits(placement, max_active)
