"""The reference backend, in plain torch for any device: one sort of packed integers."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.routing.active import WEIGHT_LIMIT, hosts_of, weight_unit
from paceline.routing.assignment import Candidates, Survivors, unit_groups
from paceline.routing.expansion import expanded_candidates
from paceline.routing.keys import KEY_BITS
from paceline.routing.limits import INT64_MAX, Budget
from paceline.routing.pools import position_in_run
from paceline.routing.ranking import PRIORITY_BITS, priority_key, ranking_key
from paceline.routing.tensors import table

on_host = False


def expanded(budget: Budget) -> Candidates:
    """See `Backend`."""
    return expanded_candidates(budget.inputs, budget.policy, budget.placement, budget.capped_token)


def limit_active(budget: Budget, candidates: Candidates) -> Survivors | None:
    """See `Backend`."""
    most, pools, experts = budget.policy.max_active, budget.pools, budget.num_experts
    assert most is not None
    hosts = hosts_of(budget.placement, most)
    expert = torch.where(candidates.offered, candidates.ids.long(), experts)
    if pools.of_token is not None:
        expert = expert + pools.of_token.unsqueeze(1) * (experts + 1)

    like = budget.inputs.topk_ids
    read = experts_read(
        expert, candidates.weights.detach(), weight_unit(budget.tokens_needed, budget.k),
        table(hosts.experts, like), table(hosts.places, like), pools.count, experts,
    )  # fmt: skip
    kept = candidates.offered & (read.flatten()[expert] | ~budget.max_active_applies)
    return Survivors.of(candidates, kept)


def experts_read(
    expert: Tensor,
    weights: Tensor,
    unit: Tensor | float,
    own: Tensor,
    places: Tensor,
    pools: int,
    experts: int,
) -> Tensor:
    """Choose the experts that get tokens where max_active applies: [pools, experts + 1] bool.

    Args:
        expert: [tokens, k] pool * (experts + 1) + expert; the last of a pool is no expert.
        weights: [tokens, k].
        unit: of `weight_unit`.
        own: [hosts, most] experts of each device, ascending, padded with the number of experts.
        places: [hosts] number of them that it may read.
        pools: of tokens.
        experts: of the layer.
    """
    count = torch.zeros(pools * (experts + 1), dtype=torch.int64, device=expert.device)
    chosen = count.scatter_add(0, expert.flatten(), torch.ones_like(expert).flatten()) > 0
    limited = weights.double().nan_to_num(nan=0.0).clamp(-WEIGHT_LIMIT, WEIGHT_LIMIT)
    total = count.scatter_add(0, expert.flatten(), (limited * unit).long().flatten())

    key = torch.where(chosen, -total, INT64_MAX).view(pools, experts + 1)[:, own]
    key = torch.where(own < experts, key, INT64_MAX)
    # experts ascend in a row, so a stable sort sends ties to the smaller one
    order = torch.sort(key, dim=2, stable=True).indices
    rank = torch.arange(own.shape[1], device=expert.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(2, order, rank)
    fits = rank < places.unsqueeze(1)
    read = torch.zeros((pools, experts + 1), dtype=torch.bool, device=expert.device)
    return read.scatter(1, own.flatten().expand(pools, -1), fits.flatten(1))


def keep_best(budget: Budget, candidates: Candidates, fill: bool = False) -> Survivors:
    """See `Backend`."""
    policy = budget.policy
    assert policy.factor is not None
    capacity = budget.capacity_of(policy.factor, candidates.safe_ids)
    if fill:
        slots = torch.arange(candidates.ids.shape[1], device=budget.device)
        extra = slots >= candidates.k
        filled = budget.capacity_of(policy.fill_factor, candidates.safe_ids)
        capacity = torch.where(extra, filled, capacity)
    kept = first_of_each_group(
        unit_groups(budget, candidates.safe_ids, candidates.offered),
        budget.pools.count * budget.units.count,
        capacity,
        ranking_key(policy, candidates, budget.pools.rank),
        priority_key(budget.inputs, policy),
        genuine_slots=candidates.k if fill else None,
    )
    return Survivors.of(candidates, kept)


def first_of_each_group(
    group: Tensor,
    num_groups: int,
    capacity: Tensor,
    key: Tensor,
    priority: Tensor | None = None,
    genuine_slots: int | None = None,
) -> Tensor:
    """Keep the first `capacity` assignments of each group.

    One sort of packed integers: group | extra | priority | key. The sort is stable and rows are in
    token order, so ties fall to the smaller token, then the smaller slot.

    Args:
        group: [tokens, slots] int64 unit of a pool, in [0, num_groups); num_groups: no assignment.
        num_groups: units times pools.
        capacity: int64, broadcastable to [tokens, slots]: of the assignment's group, as it applies
            to this assignment.
        key: [tokens, slots] int64 in [0, 2 ** 32), smaller first.
        priority: [tokens] int64 in [0, 2 ** 9), smaller first, compared before `key`.
        genuine_slots: slots from this one on rank after all others of the group.

    Returns:
        [tokens, slots] bool.
    """
    minor, minor_bits, shape = key, KEY_BITS, group.shape
    if priority is not None:
        minor = (priority.unsqueeze(1) << minor_bits) | minor
        minor_bits += PRIORITY_BITS
    if genuine_slots is not None:
        extra = torch.arange(shape[1], device=group.device) >= genuine_slots
        minor = (extra.long() << minor_bits) | minor
        minor_bits += 1
    # Deleted as soon as possible: the largest batches are bound by memory.
    if num_groups < 1 << (63 - minor_bits):
        packed = group << minor_bits
        packed |= minor
        del group, key, minor
        ordered, order = torch.sort(packed.flatten(), stable=True)
        del packed
        ordered >>= minor_bits
    else:  # too many groups for one word: two stable sorts, the minor one first
        order = torch.sort(minor.flatten(), stable=True).indices
        ordered, by_group = torch.sort(group.flatten()[order], stable=True)
        order = order[by_group]
    places = capacity.clamp(max=torch.iinfo(torch.int32).max).int()
    places = places.flatten() if places.numel() == 1 else places.expand(shape).flatten()[order]
    fits = (position_in_run(ordered) < places) & (ordered < num_groups)
    return torch.empty_like(fits).scatter_(0, order, fits).view(shape)
