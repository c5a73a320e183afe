"""Keep the best C of every unit: one entry for every policy.

The order inside a unit is total (SPEC of the order: docs/method.md), so that all ranks and
backends decide alike: genuine before extra (where asked), priority class, metric key, token, slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.routing.metrics import KEY_BITS
from paceline.routing.pools import position_in_run

PRIORITY_BITS = 9
"""Priority keys lie in [0, 2 ** PRIORITY_BITS)."""


def keep_best(
    group: Tensor,
    num_groups: int,
    capacity: Tensor,
    key: Tensor,
    priority_key: Tensor | None = None,
    genuine_slots: int | None = None,
) -> Tensor:
    """Whether each assignment is among the first `capacity` of its group.

    One sort of packed integers: group | extra | priority | key. The sort is stable and rows are in
    token order, so ties fall to the smaller token, then the smaller slot.

    Args:
        group: [tokens, slots] int64 unit of a pool, in [0, num_groups); num_groups: no assignment.
        num_groups: units times pools.
        capacity: int64, broadcastable to [tokens, slots]: places in the assignment's group, as
            this assignment may count them.
        key: [tokens, slots] int64 in [0, 2 ** 32), smaller first.
        priority_key: [tokens] int64 in [0, 2 ** 9), smaller first, decided before `key`.
        genuine_slots: slots from this one on come after all others of the group.

    Returns:
        [tokens, slots] bool.
    """
    major, minor, minor_bits = group, key, KEY_BITS
    if priority_key is not None:
        minor = (priority_key.unsqueeze(1) << minor_bits) | minor
        minor_bits += PRIORITY_BITS
    if genuine_slots is not None:
        extra = torch.arange(group.shape[1], device=group.device) >= genuine_slots
        minor = (extra.long() << minor_bits) | minor
        minor_bits += 1
    if num_groups < 1 << (63 - minor_bits):
        packed, order = torch.sort(((major << minor_bits) | minor).flatten(), stable=True)
        ordered_group = packed >> minor_bits
    else:  # too many groups for one word: two stable sorts, the minor one first
        order = torch.sort(minor.flatten(), stable=True).indices
        ordered_group, by_group = torch.sort(major.flatten()[order], stable=True)
        order = order[by_group]
    rank = torch.empty_like(order).scatter_(0, order, position_in_run(ordered_group))
    return (rank.view_as(group) < capacity) & (group < num_groups)
