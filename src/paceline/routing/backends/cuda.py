"""The backend for CUDA tensors: a few Triton launches, no host sync, static shapes."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import torch
import triton
from torch import Tensor

from paceline.routing.active import WEIGHT_LIMIT, hosts_of, weight_unit
from paceline.routing.assignment import Candidates, Survivors
from paceline.routing.backends import plain
from paceline.routing.backends import triton_kernels as kernels
from paceline.routing.limits import MAX_TOKENS, Budget, Units, capacity_ratio, split_ratio
from paceline.routing.ranking import metric, priority_key
from paceline.routing.tensors import table

expanded, on_host = plain.expanded, False

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_GROUPS = 2048
"""Groups beyond which a block's tables outgrow the tokens (request pools); `plain` from there."""

_MOST_PROGRAMS = 4096
"""Devices times pools beyond which all tokens are read too often; `plain` from there."""


def limit_active(budget: Budget, candidates: Candidates) -> Survivors | None:
    """See `Backend`."""
    most, experts, valid = budget.policy.max_active, budget.num_experts, budget.inputs.valid
    assert most is not None
    hosts = hosts_of(budget.placement, most)
    rows, slots = candidates.ids.shape
    pools = 1 if budget.policy.pool == "batch" else budget.pools.count
    if rows == 0 or pools * len(hosts.places) > _MOST_PROGRAMS:
        return plain.limit_active(budget, candidates)
    ids, weights = candidates.ids.contiguous(), candidates.weights.detach().contiguous()
    like, device = budget.inputs.topk_ids, ids.device
    of_token = None if pools == 1 else budget.pools.of_token
    wide = max(2, triton.next_power_of_2(hosts.most))
    keys = torch.empty((pools, len(hosts.places), wide), dtype=torch.int64, device=device)
    reads = torch.empty((pools, experts), dtype=torch.uint8, device=device)
    kept_ids = torch.empty((rows, slots), dtype=torch.int64, device=device)
    kept = torch.empty((rows, slots), dtype=torch.bool, device=device)
    kept_weights, bits = torch.empty_like(weights), _BITS[weights.element_size()]
    with torch.cuda.device_of(ids):  # type: ignore[no-untyped-call]
        kernels.read[(len(hosts.places), pools)](
            ids, weights, _bytes(valid, ids), _or(of_token, ids), table(hosts.experts, like),
            table(hosts.places, like), keys, reads, rows, slots, len(hosts.places), hosts.most,
            experts, min(budget.tokens_needed, MAX_TOKENS),
            weight_unit(budget.tokens_needed, budget.k), WEIGHT_LIMIT, valid is not None,
            of_token is not None, wide, max(16, min(256, 8192 // wide)), max(2, 4096 // wide),
        )  # fmt: skip
        kernels.write_readable[(triton.cdiv(rows * slots, 1024),)](
            ids, weights.view(bits), _bytes(valid, ids), _or(of_token, ids), reads, kept_ids,
            kept_weights.view(bits), kept, rows * slots, slots, experts, valid is not None,
            of_token is not None, 1024,
        )  # fmt: skip
    return Survivors(kept_ids, kept_weights, kept)


def keep_best(budget: Budget, candidates: Candidates, fill: bool = False) -> Survivors:
    """See `Backend`."""
    policy, units = budget.policy, budget.units
    rows, slots = candidates.ids.shape
    pools = 1 if policy.pool == "batch" else budget.pools.count
    groups = pools * units.count * (2 if fill else 1)
    if rows == 0 or groups >= _MOST_GROUPS:
        return plain.keep_best(budget, candidates, fill)
    ids, weights = candidates.ids.contiguous(), candidates.weights.detach().contiguous()
    device, like = ids.device, budget.inputs.topk_ids
    of_token = None if policy.pool == "batch" else budget.pools.of_token
    valid, priority = budget.inputs.valid, priority_key(budget.inputs, policy)
    decode = budget.inputs.token_decode if policy.phase == "prefill" else None
    ranking, layout = _metric(budget, candidates)
    assert policy.factor is not None
    ratios = _ratios(units, (policy.factor, policy.fill_factor), budget.k)

    wide = triton.next_power_of_2(slots)
    block = max(1, min(512, triton.next_power_of_2(triton.cdiv(rows, 128)), 4096 // wide))
    blocks = triton.cdiv(rows, block)
    bins, pool_bins = (max(2, triton.next_power_of_2(count + 1)) for count in (groups, pools))

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    key_dtype = torch.int32 if priority is None else torch.int64
    group, index = empty(rows, slots), empty(rows * slots)
    key, own_keys = empty(rows, slots, dtype=key_dtype), empty(rows * slots, dtype=key_dtype)
    counts, tokens = empty(blocks, bins), empty(blocks, pool_bins)
    prompts = tokens if decode is None else empty(blocks, pool_bins)
    limit, last_tie = empty(groups, dtype=torch.int64), empty(groups)
    kept_ids, kept = empty(rows, slots, dtype=torch.int64), empty(rows, slots, dtype=torch.bool)
    kept_weights, bits = torch.empty_like(weights), _BITS[weights.element_size()]
    with torch.cuda.device_of(ids):  # type: ignore[no-untyped-call]
        kernels.prepare[(blocks,)](
            ids, _bytes(valid, ids), _or(of_token, ids), _or(priority, ids), _bytes(decode, ids),
            ranking, table(units.of_expert, like), group, key, counts, tokens, prompts,
            rows, slots, ranking.shape[1], candidates.k, budget.num_experts, units.count, pools,
            layout, valid is not None, of_token is not None, priority is not None,
            decode is not None, fill, block, wide, bins, pool_bins,
        )  # fmt: skip
        kernels.threshold[(groups,)](
            group, key, counts, tokens, prompts, table(ratios, like), own_keys, index, limit,
            last_tie, rows, slots, blocks, units.count, pools, budget.tokens_needed,
            policy.pool == "request", fill, bins, pool_bins, 2048, max(1, min(128, 4096 // bins)),
            num_warps=8,
        )  # fmt: skip
        kernels.apply[(triton.cdiv(rows * slots, 1024),)](
            ids, weights.view(bits), group, key, limit, last_tie, kept_ids,
            kept_weights.view(bits), kept, rows * slots, groups, budget.num_experts, 1024,
        )  # fmt: skip
    return Survivors(kept_ids, kept_weights, kept)


def _metric(budget: Budget, candidates: Candidates) -> tuple[Tensor, int]:
    """Return `metric`, or for kernels that rank by token alone no metric of that layout."""
    if budget.policy.keep in ("first", "last"):
        layout = kernels.CONSTANT if budget.policy.keep == "first" else kernels.LATEST
        return budget.inputs.topk_ids, layout.value
    ranking, layout = metric(budget.policy, candidates, lambda: budget.pools.rank())
    return ranking.contiguous(), layout


@lru_cache(maxsize=1024)
def _ratios(
    units: Units, factors: tuple[Fraction, ...], k: int
) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Return [factors, units, 3]: the parts of each unit's capacity, see `split_ratio`."""

    def row(factor: Fraction, size: int) -> tuple[int, int, int]:
        ratio = capacity_ratio(factor, k, size, units.num_experts)
        whole, rest, denominator = split_ratio(ratio)
        return min(whole, 1 << 20), rest, denominator  # no token has so many assignments

    return tuple(
        tuple(row(factor, units.sizes[size]) for size in units.size_of) for factor in factors
    )


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor.contiguous()


def _bytes(flags: Tensor | None, other: Tensor) -> Tensor:
    return other if flags is None else flags.contiguous().view(torch.uint8)
