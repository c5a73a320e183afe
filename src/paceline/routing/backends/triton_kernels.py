# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
"""Triton kernels of the CUDA backend. Nothing is read back; T may be known on the device only.

`prepare` computes every assignment's group and key and counts groups by block of tokens;
`threshold`, one program per group, computes the group's capacity and bisects for the key of the
last assignment that fits; `apply` writes what stays. Where max_active applies, `read` finds the
experts that a device may read and `write_readable` writes their assignments. No atomics: the result
is the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Strings and numbers that kernels read have to be constexpr globals.
BY_SLOT, BY_EXPERT, KEYS, CONSTANT, LATEST = (tl.constexpr(i) for i in range(5))
"""Layout of the metric: a float by slot or by expert, a key by slot, none, or the token's index."""


@triton.jit(do_not_specialize=["rows"])
def prepare(
    ids, valid, pool, priority, decode, metric, unit_of, group, key, counts, tokens, prompts,
    rows, slots, width, k, experts, units, pools,
    KIND: tl.constexpr, VALID: tl.constexpr, POOL: tl.constexpr, PRIORITY: tl.constexpr,
    DECODE: tl.constexpr, FILL: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
    GROUPS: tl.constexpr, POOLS: tl.constexpr,
):  # fmt: skip
    """Write group [T, S] int32, key [T, S] in signed order, counts [blocks, GROUPS], tokens
    [blocks, POOLS] valid tokens of each pool, prompts [blocks, POOLS] (DECODE) those of them that
    are no decode tokens."""
    block = tl.program_id(0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    live = there
    if VALID:
        live = live & (tl.load(valid + row, mask=there, other=0) != 0)
    home = tl.zeros([BLOCK], tl.int64)
    if POOL:
        home = tl.load(pool + row, mask=there, other=0).to(tl.int64)
    pooled = tl.where(live, home, pools).to(tl.int32)
    by_pool = block * POOLS + tl.arange(0, POOLS)
    tl.store(tokens + by_pool, tl.histogram(pooled, POOLS))
    if DECODE:
        generated = tl.load(decode + row, mask=there, other=1) != 0
        tl.store(prompts + by_pool, tl.histogram(tl.where(generated, pools, pooled), POOLS))

    slot = tl.arange(0, SLOTS)
    at = row[:, None].to(tl.int64) * slots + slot[None, :]
    inside = there[:, None] & (slot[None, :] < slots)
    expert = tl.load(ids + at, mask=inside, other=-1).to(tl.int64)
    offered = inside & live[:, None] & (expert >= 0) & (expert < experts)
    mine = home[:, None] * units + tl.load(unit_of + expert, mask=offered, other=0)
    total = pools * units
    if FILL:  # extras are groups of their own, which take what the genuine ones leave
        mine = tl.where(slot[None, :] >= k, mine + total, mine)
        total = 2 * total
    mine = tl.where(offered, mine, total).to(tl.int32)
    tl.store(group + at, mine, mask=inside)
    histogram = tl.histogram(tl.reshape(mine, [BLOCK * SLOTS]), GROUPS)
    tl.store(counts + block * GROUPS + tl.arange(0, GROUPS), histogram)

    if KIND == BY_SLOT or KIND == BY_EXPERT:  # noqa: SIM109 (Triton has no "in")
        column = tl.where(offered, expert, 0) if KIND == BY_EXPERT else slot[None, :]
        where = row[:, None].to(tl.int64) * width + column
        bits = tl.load(metric + where, mask=offered, other=0.0).to(tl.int32, bitcast=True)
        absolute = bits & 0x7FFFFFFF
        bits = tl.where(absolute == 0, 0, bits)  # -0.0
        ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        rank = -1 - ascending.to(tl.int64)
        rank = tl.where(absolute > 0x7F800000, 0x7FFFFFFF, rank)  # NaN
    elif KIND == KEYS:
        rank = tl.load(metric + at, mask=offered, other=0) - 0x80000000
    elif KIND == LATEST:
        rank = (0 - row).to(tl.int64)[:, None] + tl.zeros([BLOCK, SLOTS], tl.int64)
    else:
        rank = tl.zeros([BLOCK, SLOTS], tl.int64)
    if PRIORITY:
        rank += tl.load(priority + row, mask=there, other=0).to(tl.int64)[:, None] << 32
    tl.store(key + at, rank, mask=inside)


@triton.jit
def _count(keys, n, most, CHUNK: tl.constexpr):
    """Count the keys, of n, that are at most `most`."""
    count = tl.zeros([CHUNK], tl.int32)
    for first in range(0, n, CHUNK):
        at = first + tl.arange(0, CHUNK)
        key = tl.load(keys + at, mask=at < n, other=0).to(tl.int64)
        count += ((at < n) & (key <= most)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit(do_not_specialize=["rows", "blocks", "needed"])
def threshold(
    group, key, counts, tokens, prompts, ratios, own_keys, own_index, limit, last_tie,
    rows, slots, blocks, units, pools, needed,
    ALONE: tl.constexpr, FILL: tl.constexpr, GROUPS: tl.constexpr, POOLS: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write per group the key below which all stay, and the last index of equal ones that stay.

    A pool is capped if it has a prompt token, and if all pools (ALONE: this one) have as many
    tokens as are `needed`; `prompts` may be `tokens`.

    ratios [2, units, 3] int64: capacities are T * whole + ceil(T * rest / denominator), first of
    all assignments, then (FILL) of extras. own_keys, own_index [T * S]: scratch.
    """
    mine = tl.program_id(0)
    half = pools * units
    extra = mine // half
    home = (mine % half) // units
    n, start, genuine = 0, 0, 0
    pool_tokens, enough, prompt = 0, 0, 0
    column, pool = tl.arange(0, GROUPS), tl.arange(0, POOLS)
    for first in range(0, blocks, TILE):
        block = first + tl.arange(0, TILE)
        some = block < blocks
        tile = tl.load(
            counts + block[:, None] * GROUPS + column[None, :], mask=some[:, None], other=0
        )
        by_group = tl.sum(tile, 0)
        n += tl.sum(tl.where(column == mine, by_group, 0), 0)
        start += tl.sum(tl.where(column < mine, by_group, 0), 0)
        genuine += tl.sum(tl.where(column == mine - half, by_group, 0), 0)
        tile = tl.load(tokens + block[:, None] * POOLS + pool[None, :], mask=some[:, None], other=0)
        by_pool = tl.sum(tile, 0)
        pool_tokens += tl.sum(tl.where(pool == home, by_pool, 0), 0)
        judged = pool == home if ALONE else pool < pools
        enough += tl.sum(tl.where(judged, by_pool, 0), 0)
        tile = tl.load(
            prompts + block[:, None] * POOLS + pool[None, :], mask=some[:, None], other=0
        )
        prompt += tl.sum(tl.where(pool == home, tl.sum(tile, 0), 0), 0)

    ratio = ratios + (extra * units + mine % units) * 3
    count = pool_tokens.to(tl.int64)
    whole, rest, denominator = tl.load(ratio), tl.load(ratio + 1), tl.load(ratio + 2)
    places = count * whole + (count * rest + denominator - 1) // denominator
    if FILL:
        places = tl.maximum(places - genuine, 0)
    last = tl.full([], 1 << 62, tl.int64)
    tie = tl.full([], -1, tl.int32)
    if (enough >= needed) & (prompt > 0) & (n > places):
        keys_here = own_keys + start
        index_here = own_index + start
        done = 0
        least, most = last, -last
        for first in range(0, rows * slots, CHUNK):
            at = first + tl.arange(0, CHUNK)
            found = tl.load(group + at, mask=at < rows * slots, other=-1) == mine
            to = done + tl.cumsum(found.to(tl.int32), 0) - 1
            value = tl.load(key + at, mask=found, other=0)
            tl.store(keys_here + to, value, mask=found)
            tl.store(index_here + to, at, mask=found)
            value = value.to(tl.int64)
            least = tl.minimum(least, tl.min(tl.where(found, value, 1 << 62), 0))
            most = tl.maximum(most, tl.max(tl.where(found, value, -(1 << 62)), 0))
            done += tl.sum(found.to(tl.int32), 0)
        tl.debug_barrier()  # what this program wrote it now reads
        low, high = least, most + 1  # fewer than all places below low; enough at or below high
        while low < high:
            middle = low + ((high - low) >> 1)
            if _count(keys_here, n, middle, CHUNK) >= places:
                high = middle
            else:
                low = middle + 1
        last = low
        ties = (places - _count(keys_here, n, low - 1, CHUNK)).to(tl.int32)
        seen = 0
        for first in range(0, n, CHUNK):
            at = first + tl.arange(0, CHUNK)
            equal = (tl.load(keys_here + at, mask=at < n, other=0).to(tl.int64) == low) & (at < n)
            nth = seen + tl.cumsum(equal.to(tl.int32), 0)
            index = tl.load(index_here + at, mask=at < n, other=0)
            tie = tl.maximum(tie, tl.max(tl.where(equal & (nth <= ties), index, -1), 0))
            seen += tl.sum(equal.to(tl.int32), 0)
    tl.store(limit + mine, last)
    tl.store(last_tie + mine, tie)


@triton.jit(do_not_specialize=["size"])
def apply(
    ids, weights, group, key, limit, last_tie, kept_ids, kept_weights, kept, size, groups, experts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write kept_ids [T, S] int64, kept_weights [T, S] (integers of their width), kept [T, S]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    mine = tl.load(group + at, mask=inside, other=0)
    some = inside & (mine < groups)
    value = tl.load(key + at, mask=some, other=0).to(tl.int64)
    last = tl.load(limit + mine, mask=some, other=0)
    tie = tl.load(last_tie + mine, mask=some, other=0)
    keep = some & ((value < last) | ((value == last) & (at <= tie)))
    expert = tl.load(ids + at, mask=inside, other=0).to(tl.int64)
    weight = tl.load(weights + at, mask=inside, other=0)
    tl.store(kept_ids + at, tl.where(keep, expert, experts), mask=inside)
    tl.store(kept_weights + at, tl.where(keep, weight, 0).to(weight.dtype), mask=inside)
    tl.store(kept + at, keep, mask=inside)


@triton.jit(do_not_specialize=["rows", "needed"])
def read(
    ids, weights, valid, pool, own, places, keys, reads, rows, slots, hosts, most, experts, needed,
    unit, LIMIT: tl.constexpr, VALID: tl.constexpr, POOL: tl.constexpr, MOST: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write reads [pools, experts] uint8: 1 where a device may read the expert.

    One program per device and pool.

    own [hosts, most] int64: its experts, ascending, padded with E. places [hosts] int64: number
    that it may read, if fewer than `needed` tokens are valid. keys [pools, hosts, MOST] int64:
    scratch. A weight counts as at most LIMIT, and 1 is `unit` units.
    """
    host, home = tl.program_id(0), tl.program_id(1)
    tokens = rows
    if VALID:
        count = tl.zeros([CHUNK], tl.int32)
        for first in range(0, rows, CHUNK):
            at = first + tl.arange(0, CHUNK)
            count += (tl.load(valid + at, mask=at < rows, other=0) != 0).to(tl.int32)
        tokens = tl.sum(count, 0)
    column = tl.arange(0, MOST)
    expert = tl.load(own + host * most + column, mask=column < most, other=experts)
    places_here = tl.load(places + host)
    ahead = tl.zeros([MOST], tl.int32)
    if tokens < needed:
        total, chosen_by = tl.zeros([MOST], tl.int64), tl.zeros([MOST], tl.int32)
        for first in range(0, rows * slots, CHUNK):
            at = first + tl.arange(0, CHUNK)
            there = at < rows * slots
            token = at // slots
            live = there
            if VALID:
                live = live & (tl.load(valid + token, mask=there, other=0) != 0)
            if POOL:
                live = live & (tl.load(pool + token, mask=there, other=-1) == home)
            chosen = tl.load(ids + at, mask=live, other=-1).to(tl.int64)
            live = live & (chosen >= 0) & (chosen < experts)
            weight = tl.load(weights + at, mask=live, other=0.0).to(tl.float64)
            weight = tl.where(weight == weight, weight, 0.0)
            weight = tl.minimum(tl.maximum(weight, -LIMIT), LIMIT)
            units = (weight * unit).to(tl.int64)
            hit = live[:, None] & (chosen[:, None] == expert[None, :])
            total += tl.sum(tl.where(hit, units[:, None], 0), 0)
            chosen_by += tl.sum(hit.to(tl.int32), 0)
        key = tl.where((chosen_by > 0) & (column < most), -total, 1 << 62)  # a smaller one is read
        scratch = keys + (home * hosts + host) * MOST
        tl.store(scratch + column, key)
        tl.debug_barrier()  # what this program wrote it now reads
        for first in range(0, most, TILE):
            at = first + tl.arange(0, TILE)
            other = tl.load(scratch + at, mask=at < MOST, other=1 << 62)
            before = (other[None, :] < key[:, None]) | (
                (other[None, :] == key[:, None]) & (at[None, :] < column[:, None])
            )
            ahead += tl.sum(before.to(tl.int32), 1)
    read_here = (ahead < places_here).to(tl.uint8)
    tl.store(reads + home * experts + expert, read_here, mask=expert < experts)


@triton.jit(do_not_specialize=["size"])
def write_readable(
    ids, weights, valid, pool, reads, kept_ids, kept_weights, kept, size, slots, experts,
    VALID: tl.constexpr, POOL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write kept_ids [T, S] int64, kept_weights [T, S] (integers of their width), kept [T, S]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    token = at // slots
    expert = tl.load(ids + at, mask=inside, other=-1).to(tl.int64)
    keep = inside & (expert >= 0) & (expert < experts)
    if VALID:
        keep = keep & (tl.load(valid + token, mask=inside, other=0) != 0)
    home = tl.zeros([BLOCK], tl.int64)
    if POOL:
        home = tl.load(pool + token, mask=inside, other=0).to(tl.int64)
    keep = keep & (tl.load(reads + home * experts + expert, mask=keep, other=0) != 0)
    weight = tl.load(weights + at, mask=inside, other=0)
    tl.store(kept_ids + at, tl.where(keep, expert, experts), mask=inside)
    tl.store(kept_weights + at, tl.where(keep, weight, 0).to(weight.dtype), mask=inside)
    tl.store(kept + at, keep, mask=inside)
