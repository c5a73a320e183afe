# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The loops of the native backend, in the subset of Python that numba compiles."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np

BY_SLOT, BY_EXPERT, KEYS = 0, 1, 2
"""Where the metric of an assignment is: a float by slot, a float by expert, a key by slot."""


def _compiled(function: Callable[..., Any]) -> Any:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # there is no folder to keep it in
        return numba.njit(**options)(function)


@_compiled
def choose(
    ids, weights, k, valid, pool, priority, metric, kind,
    unit_of, units, places, keys, kept_ids, kept_weights, kept,
):  # fmt: skip
    """Keep the best of each group, pool * units + unit.

    Args:
        ids: [T, S] int64 experts; outside [0, experts): no assignment.
        weights: [T, S] bits of any type.
        valid, pool, priority: [T], or empty: all valid, one pool, all alike.
        metric: [T, W] float32, or keys in its bits, see `kind`.
        unit_of: [experts] unit of each expert.
        places: [1, groups] places; or [2, groups]: first for slots [0, k) alone, then for the other
            slots, with those that are taken already among them.
        keys: [T * S + 1] scratch, of 32 bits, or of 64 to hold a priority too.
        kept_ids, kept_weights, kept: [T, S], written; meanwhile an assignment's group is kept in
            kept_ids, as every new page costs more than a look at it.
    """
    taken = np.zeros(places.shape[1], np.int64)
    for part in range(places.shape[0]):
        first = k if part else 0
        last = k if part + 1 < places.shape[0] else ids.shape[1]
        _choose_slots(
            ids, weights, first, last, valid, pool, priority, metric, kind,
            unit_of, units, places[part], taken, keys, kept_ids, kept_weights, kept,
        )  # fmt: skip


@_compiled
def _choose_slots(
    ids, weights, first, last, valid, pool, priority, metric, kind,
    unit_of, units, places, taken, keys, kept_ids, kept_weights, kept,
):  # fmt: skip
    """`choose` among slots [first, last); adds to `taken` [groups] how many of each group stay."""
    # unsigned, as a signed index costs a test for counting from the end
    rows, first, width = np.uint64(ids.shape[0]), np.uint64(first), np.uint64(last - first)
    experts, groups = unit_of.size, places.size
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

    # Below nothing branches on the data: which groups are overfull and who stays is anybody's
    # guess, and a wrong guess costs more than the work. A group that is not overfull puts its keys
    # on the scratch cell 0, and its threshold lets all of them through.
    start = np.zeros(groups + 1, np.uint32)
    step = np.zeros(groups + 1, np.uint32)
    total, keys[0] = 1, 0
    for g in range(groups):
        room = max(places[g] - taken[g], 0)
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


@_compiled
def read_some(
    ids, weights, bits, valid, pool, pools, experts, own, places, limit, unit,
    kept_ids, kept_weights, kept,
):  # fmt: skip
    """Keep the assignments of those experts that each device may read for each pool.

    Args:
        ids: [T, S] int64 experts; outside [0, experts): no assignment.
        weights: [T, S] float64.
        bits: [T, S] bits of the weights as they came.
        valid, pool: [T], or empty: all valid, one pool.
        own: [hosts, most] ascending experts of each device, E where it has no more.
        places: [hosts] how many of them may be read.
        limit, unit: a weight counts as at most `limit`, and 1 is so many units.
        kept_ids, kept_weights, kept: [T, S], written.
    """
    total = np.zeros((pools, experts), np.int64)
    state = np.zeros((pools, experts), np.int8)  # 1: wanted, 2: wanted and not read
    rows, slots = ids.shape
    for t in range(rows):
        if valid.size and not valid[t]:
            continue
        home = pool[t] if pool.size else 0
        for j in range(slots):
            e = ids[t, j]
            if 0 <= e < experts:
                w = weights[t, j]
                if w == w:
                    total[home, e] += np.int64(min(max(w, -limit), limit) * unit)
                state[home, e] = 1
    wanted = np.empty(own.shape[1], np.int64)
    for home in range(pools):
        for host in range(own.shape[0]):
            count = 0
            for c in range(own.shape[1]):
                e = own[host, c]
                if e < experts and state[home, e]:
                    wanted[count] = e
                    count += 1
            if count <= places[host]:
                continue
            for a in range(count):
                ahead, mine = 0, total[home, wanted[a]]
                for b in range(count):
                    other = total[home, wanted[b]]
                    ahead += (other > mine) | ((other == mine) & (b < a))
                if ahead >= places[host]:
                    state[home, wanted[a]] = 2
    for t in range(rows):
        live = valid.size == 0 or valid[t]
        home = pool[t] if pool.size else 0
        for j in range(slots):
            e = ids[t, j]
            keep = live and 0 <= e < experts and state[home, e] == 1
            kept[t, j] = keep
            kept_ids[t, j] = e if keep else experts
            kept_weights[t, j] = bits[t, j] if keep else 0


@_compiled
def extend(
    ids, weights, scores, valid, capped, row_of, table, device_of, visited, limit, all_ids,
    extra_weights,
):  # fmt: skip
    """Each token's own choice, then its `limit` best extras; see `candidates`.

    Args:
        ids, weights: [T, k] of the model, the weights as floats.
        scores: [T, E] float32.
        valid, capped: [T], or empty: all. Only those that are capped get extras.
        row_of: [T] row of `table` with a token's candidates, or empty: row 0.
        table: [rows, candidates] ascending experts, E where there is none.
        device_of: [E] device of each expert.
        visited: only experts on a device that a token has a choice on.
        all_ids: [T, k + limit], written; E where nothing is offered.
        extra_weights: [T, limit] float32, written.
    """
    rows, k = ids.shape
    experts = device_of.size
    chosen, seen = np.zeros(experts, np.int64), np.zeros(device_of.max() + 1, np.int64)
    score, expert = np.empty(table.shape[1], np.float32), np.empty(table.shape[1], np.int64)
    place = np.empty(table.shape[1], np.int64)
    for t in range(rows):
        live = valid.size == 0 or valid[t]
        weight_sum = score_sum = 0.0
        for j in range(k):
            e = ids[t, j]
            if live and 0 <= e < experts:
                weight_sum += np.float64(weights[t, j])
                score_sum += np.float64(scores[t, e])
                chosen[e] = seen[device_of[e]] = t + 1
            else:
                e = experts
            all_ids[t, j] = e
        for j in range(limit):
            all_ids[t, k + j], extra_weights[t, j] = experts, 0
        scalable = 0 < weight_sum < np.inf and 0 < score_sum < np.inf
        if not scalable or (capped.size and not capped[t]):
            continue
        count = 0
        row = row_of[t] if row_of.size else 0
        for c in range(table.shape[1]):
            e = table[row, c]
            if e < experts:
                s = scores[t, e]
                score[count], expert[count] = s, e
                allowed = (s > -np.inf) & (chosen[e] != t + 1)  # NaN is not > anything
                count += allowed & (not visited or seen[device_of[e]] == t + 1)
        for a in range(count):
            place[a] = 0
            for b in range(a):  # ties go to the smaller expert, which comes first
                ahead = score[b] >= score[a]
                place[a] += ahead
                place[b] += not ahead
        for a in range(count):
            if place[a] < limit:
                all_ids[t, k + place[a]] = expert[a]
                extra = np.float64(score[a]) * weight_sum / score_sum
                extra_weights[t, place[a]] = np.float32(extra)


@_compiled
def _descending(bits):
    """A float32's bits as a key that is smaller where the float is larger; see `keys`."""
    if (bits & 0x7FFFFFFF) > 0x7F800000:  # NaN
        return np.uint32(0xFFFFFFFF)
    if bits == -0x80000000:  # -0.0
        bits = 0
    return np.uint32(0x7FFFFFFF - (bits ^ ((bits >> 31) & 0x7FFFFFFF)))


@_compiled
def _last_place(keys, places):
    """The key of the last of `places` best, and how many of those that tie with it stay."""
    least = most = keys[0]
    for key in keys:
        least, most = min(least, key), max(most, key)
    low, high = np.uint64(least), np.uint64(most)  # the key is in [low, high],
    below = 0  # and so many are < low
    while low < high:
        middle = low + ((high - low) >> np.uint64(1))
        count = _count(keys, middle)
        if count == places:
            return middle, count
        if count > places:
            high = middle
        else:
            low, below = middle + np.uint64(1), count
    return low, places - below


@_compiled
def _count(keys, most):
    """How many keys are at most `most`."""
    word = keys.dtype.type  # one width throughout, for the vector units
    most, count = word(most), word(0)
    for i in range(keys.size):
        count = word(count + word(keys[i] <= most))
    return np.int64(count)


def announce() -> None:
    """Say in the log that the first call will compile, where no earlier one left anything."""
    folder = Path(choose.stats.cache_path or "")
    if not any(folder.glob("jit.choose-*.nbi")):
        logging.getLogger("paceline").info(
            "Compiling the CPU router, once for this machine (2 to 5 seconds); kept in %s.", folder
        )


announce()
