# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The backend for CPU tensors, compiled by numba on first use (the extra `fast`).

Work grows with the number of assignments alone: count per group (a unit of a pool); a group within
its capacity keeps everything and is never looked at again; for the others gather 32-bit keys,
bisect for the key of the last assignment that fits (counting keys is what vector units do best),
and share out its ties in token order. The first call on a machine compiles for some seconds; the
result is kept on disk.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch

from paceline.routing.assignment import Candidates, Survivors
from paceline.routing.backends import plain
from paceline.routing.backends.native_experts import (
    NO_FLAGS,
    NO_NUMBERS,
    compiled,
    expanded,
    limit_active,
)  # fmt: skip
from paceline.routing.limits import Budget, capacities_on_host
from paceline.routing.ranking import BY_EXPERT, KEYS, metric, priority_key
from paceline.routing.tensors import Array, array_of, bits_of

__all__ = ["expanded", "keep_best", "limit_active", "on_host"]

on_host = True


def keep_best(budget: Budget, candidates: Candidates, fill: bool = False) -> Survivors:
    """See `Backend`."""
    policy, units, inputs = budget.policy, budget.units, budget.inputs
    ids = candidates.ids.long().contiguous()
    pool = NO_NUMBERS
    if policy.pool == "batch":
        capacity = _capacity_of_batch(budget, fill)
    else:
        pools = budget.pools
        assert pools.of_token is not None
        pool, sizes = array_of(pools.of_token), array_of(pools.sizes)
        count = int(sizes.nonzero()[0][-1]) + 1 if sizes.any() else 0
        if count * units.count > 4 * ids.numel():  # a table of groups would outgrow the tokens
            return plain.keep_best(budget, candidates, fill)
        factors = [policy.factor, policy.fill_factor] if fill else [policy.factor]
        capacity = np.stack(
            [array_of(budget.capacity(factor))[:count].ravel() for factor in factors]
        )
    priority = NO_NUMBERS
    if inputs.token_priority is not None or inputs.token_decode is not None:
        classes = priority_key(inputs, policy)
        priority = NO_NUMBERS if classes is None else array_of(classes)
    ranking, layout = metric(policy, candidates, lambda: budget.pools.rank())
    if layout == KEYS:
        ranking = ranking.int().view(torch.float32)
    weights = candidates.weights.contiguous()
    kept_weights = torch.empty_like(weights)
    kept_ids, kept = np.empty(ids.shape, np.int64), np.empty(ids.shape, np.bool_)
    choose(
        ids.numpy(), bits_of(weights), candidates.k,
        NO_FLAGS if inputs.valid is None else array_of(inputs.valid), pool, priority,
        array_of(ranking), layout, units.on_host, units.count, capacity,
        np.empty(ids.numel() + 1, np.uint64 if priority.size else np.uint32),
        kept_ids, bits_of(kept_weights), kept,
    )  # fmt: skip
    return Survivors(torch.from_numpy(kept_ids), kept_weights, torch.from_numpy(kept))


def _capacity_of_batch(budget: Budget, fill: bool) -> Array:
    """Return [1, units] capacities of one pool; with fill [2, units], the second for extras."""
    inputs, policy = budget.inputs, budget.policy
    valid = None if inputs.valid is None else array_of(inputs.valid)
    tokens = budget.valid_tokens_on_host
    capped = tokens >= budget.tokens_needed
    if capped and policy.phase == "prefill" and inputs.token_decode is not None:
        prompt = ~array_of(inputs.token_decode)
        capped = bool((prompt if valid is None else prompt & valid).any())
    if not capped:
        return budget.units.unbounded
    factor = policy.capacity_factor
    assert factor is not None
    factors = (factor, min(policy.fill_to, factor)) if fill else (factor,)
    return capacities_on_host(budget.units, factors, budget.k, tokens)


@compiled
def choose(
    ids, weights, k, valid, pool, priority, metric, kind,
    unit_of, units, capacity, keys, kept_ids, kept_weights, kept,
):  # fmt: skip
    """Keep the best of each group, pool * units + unit.

    Args:
        ids: [T, S] int64 experts; outside [0, experts): no assignment.
        weights: [T, S] bits of any type.
        valid, pool, priority: [T], or empty: all valid, one pool, all alike.
        metric: [T, W] float32, or keys in its bits, of the layout `kind`.
        unit_of: [experts] unit of each expert.
        capacity: [1, groups]; or [2, groups]: first for slots [0, k) alone, then for the other
            slots, those of [0, k) that were kept included.
        keys: [T * S + 1] scratch, of 32 bits, or of 64 to hold a priority too.
        kept_ids, kept_weights, kept: [T, S], written; kept_ids holds the groups meanwhile, as new
            pages of memory cost more than a look at them.
    """
    taken = np.zeros(capacity.shape[1], np.int64)
    for part in range(capacity.shape[0]):
        first = k if part else 0
        last = k if part + 1 < capacity.shape[0] else ids.shape[1]
        _choose_slots(
            ids, weights, first, last, valid, pool, priority, metric, kind,
            unit_of, units, capacity[part], taken, keys, kept_ids, kept_weights, kept,
        )  # fmt: skip


@compiled
def _choose_slots(
    ids, weights, first, last, valid, pool, priority, metric, kind,
    unit_of, units, capacity, taken, keys, kept_ids, kept_weights, kept,
):  # fmt: skip
    """Choose among slots [first, last); add to `taken` [groups] the number kept of each group."""
    # unsigned, as a signed index costs a test for counting from the end
    rows, first, width = np.uint64(ids.shape[0]), np.uint64(first), np.uint64(last - first)
    experts, groups = unit_of.size, capacity.size
    bits_of = metric.view(np.int32)
    size = np.zeros(groups + 1, np.int64)
    for t in range(rows):
        base = pool[t] * units if pool.size else 0
        live = valid.size == 0 or valid[t]
        for j in range(width):
            e = ids[t, first + j]
            g = np.uint64(groups)
            if live and 0 <= e < experts:
                g = np.uint64(base + unit_of[np.uint64(e)])
            kept_ids[t, first + j] = g
            size[g] += 1

    # Below nothing branches on the data: overfull groups and survivors can't be predicted, and a
    # mispredicted branch costs more than the work. A group that is not overfull puts its keys on
    # the scratch cell 0, and its threshold lets all of them through.
    start = np.zeros(groups + 1, np.uint32)
    step = np.zeros(groups + 1, np.uint32)
    total, keys[0] = 1, 0
    for g in range(groups):
        room = max(capacity[g] - taken[g], 0)
        if size[g] > room:
            start[g], step[g] = total, 1
            total += size[g]
            size[g] = room
        taken[g] += size[g]
    threshold = np.full(groups + 1, np.uint64(1) << np.uint64(63))  # keys below it stay,
    threshold[groups] = 0
    ties = np.zeros(groups + 1, np.int64)  # and so many of those that equal it

    if total > 1:
        end = start.copy()
        for t in range(rows):
            rank = np.uint64(priority[t]) << np.uint64(32) if priority.size else np.uint64(0)
            for j in range(width):
                column = first + j
                g = np.uint64(kept_ids[t, column])
                if kind == BY_EXPERT:
                    column = np.uint64(ids[t, column] if g < groups else 0)
                bits = bits_of[t, column]
                key = np.uint32(bits) if kind == KEYS else _descending(bits)
                p = end[g]
                keys[p] = rank | np.uint64(key)
                end[g] = p + step[g]
        for g in range(groups):
            if step[g]:
                threshold[g] = 0
                if size[g]:
                    threshold[g], ties[g] = _last_place(keys[start[g] : end[g]], size[g])

    for t in range(rows):
        for j in range(width):
            column = first + j
            g = np.uint64(kept_ids[t, column])
            p = start[g]
            start[g] = p + step[g]
            key = np.uint64(keys[p])
            keep = key < threshold[g]
            if key == threshold[g]:
                keep = ties[g] > 0
                ties[g] -= 1
            mask = -np.int64(keep)
            kept[t, column] = keep
            kept_ids[t, column] = (ids[t, column] & mask) | (experts & ~mask)
            kept_weights[t, column] = weights[t, column] & mask


@compiled
def _descending(bits):
    """Map a float32's bits to a key that is smaller where the float is larger; see `keys`."""
    if (bits & 0x7FFFFFFF) > 0x7F800000:  # NaN
        return np.uint32(0xFFFFFFFF)
    if bits == -0x80000000:  # -0.0
        bits = 0
    return np.uint32(0x7FFFFFFF - (bits ^ ((bits >> 31) & 0x7FFFFFFF)))


@compiled
def _last_place(keys, room):
    """Find the key of the last of `room` best, and the number of its ties that stay."""
    least = most = keys[0]
    for key in keys:
        least, most = min(least, key), max(most, key)
    low, high = np.uint64(least), np.uint64(most)  # the key is in [low, high],
    below = 0  # and so many are < low
    while low < high:
        middle = low + ((high - low) >> np.uint64(1))
        count = _count(keys, middle)
        if count == room:
            return middle, count
        if count > room:
            high = middle
        else:
            low, below = middle + np.uint64(1), count
    return low, room - below


@compiled
def _count(keys, most):
    """Count the keys that are at most `most`."""
    word = keys.dtype.type  # one width throughout, for the vector units
    most, count = word(most), word(0)
    for i in range(keys.size):
        count = word(count + word(keys[i] <= most))
    return np.int64(count)


def announce() -> None:
    """Log that the first call will compile, unless an earlier one left its result."""
    folder = Path(choose.stats.cache_path or "")
    if not any(folder.glob("native.choose-*.nbi")):
        logging.getLogger("paceline").info(
            "Compiling the CPU router, once for this machine (2 to 5 seconds); kept in %s.", folder
        )


announce()
