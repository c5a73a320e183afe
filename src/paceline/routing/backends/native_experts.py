# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The native backend's choice of experts: extras of a token, and those that a device may read."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch

from paceline.placement import ExpertPlacement
from paceline.routing.active import WEIGHT_LIMIT, Hosts, hosts_of, weight_unit
from paceline.routing.assignment import Candidates, Survivors
from paceline.routing.backends import plain
from paceline.routing.limits import Budget
from paceline.routing.pools import token_devices
from paceline.routing.tensors import Array, array_of, bits_of

NO_FLAGS, NO_NUMBERS = np.zeros(0, np.bool_), np.zeros(0, np.int64)
"""Optional arrays that are absent."""

_WIDEST = 64
"""Candidates per token beyond which torch sorts them: here the work grows with their square."""


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function of the subset of Python that numba handles, without the GIL."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # there is no folder to keep it in
        return numba.njit(**options)(function)


def expanded(budget: Budget) -> Candidates:
    """See `Backend`."""
    inputs, policy, placement = budget.inputs, budget.policy, budget.placement
    table = _candidates_of(placement, policy.expand == "own_device")
    if inputs.scores is None or table.shape[1] > _WIDEST:
        return plain.expanded(budget)
    capped = NO_FLAGS
    if not array_of(budget.capped).all():
        capped = np.ascontiguousarray(np.broadcast_to(array_of(budget.capped_token), budget.rows))
    row_of = NO_NUMBERS
    if policy.expand == "own_device":
        row_of = array_of(token_devices(inputs, placement.num_devices, 'expand="own_device"'))
    limit = budget.slots - budget.k
    weights = inputs.topk_weights
    ids = torch.empty((budget.rows, budget.slots), dtype=torch.int64)
    extra_weights = torch.empty((budget.rows, limit))
    _extend(
        array_of(inputs.topk_ids.long()),
        array_of(weights if weights.dtype is torch.float64 else weights.float()),
        array_of(inputs.scores.float()),
        NO_FLAGS if inputs.valid is None else array_of(inputs.valid),
        capped, row_of, table, _device_of(placement), policy.expand == "visited_devices", limit,
        ids.numpy(), extra_weights.numpy(),
    )  # fmt: skip
    weights = torch.cat([weights, extra_weights.to(weights.dtype)], 1)
    return Candidates(inputs, budget.num_experts, ids, weights)


@lru_cache(maxsize=256)
def _candidates_of(placement: ExpertPlacement, by_device: bool) -> Array:
    """Return [devices or 1, candidates] ascending experts of each device, or all; E for none."""
    experts = placement.num_experts
    if not by_device:
        return np.arange(experts)[None]
    table = np.full((placement.num_devices, max(placement.sizes)), experts)
    for device in range(placement.num_devices):
        table[device, : placement.sizes[device]] = placement.experts_of(device)
    return table


@lru_cache(maxsize=256)
def _device_of(placement: ExpertPlacement) -> Array:
    return np.array(placement.expert_to_device)


def limit_active(budget: Budget, candidates: Candidates) -> Survivors | None:
    """See `Backend`."""
    most, inputs, experts = budget.policy.max_active, budget.inputs, budget.num_experts
    assert most is not None
    if budget.valid_tokens_on_host >= budget.tokens_needed:
        return None
    pool, pools = NO_NUMBERS, 1
    if budget.policy.pool != "batch":
        assert budget.pools.of_token is not None
        pool = array_of(budget.pools.of_token)
        pools = int(pool.max(initial=0)) + 1
        if pools * experts > 1 << 20:  # its tables would outgrow the tokens
            return plain.limit_active(budget, candidates)
    rows, places = _hosts(hosts_of(budget.placement, most))
    ids, weights = candidates.ids.long().contiguous(), candidates.weights.contiguous()
    kept_weights = torch.empty_like(weights)
    kept_ids, kept = np.empty(ids.shape, np.int64), np.empty(ids.shape, np.bool_)
    _read_some(
        ids.numpy(), array_of(weights.double()), bits_of(weights),
        NO_FLAGS if inputs.valid is None else array_of(inputs.valid), pool, pools, experts,
        rows, places, WEIGHT_LIMIT, weight_unit(budget.tokens_needed, budget.k),
        kept_ids, bits_of(kept_weights), kept,
    )  # fmt: skip
    return Survivors(torch.from_numpy(kept_ids), kept_weights, torch.from_numpy(kept))


@lru_cache(maxsize=256)
def _hosts(hosts: Hosts) -> tuple[Array, Array]:
    return np.array(hosts.experts), np.array(hosts.places)


@compiled
def _read_some(
    ids, weights, bits, valid, pool, pools, experts, own, places, limit, unit,
    kept_ids, kept_weights, kept,
):  # fmt: skip
    """Keep the assignments of the experts that each device may read, for each pool.

    Args:
        ids: [T, S] int64 experts; outside [0, experts): no assignment.
        weights: [T, S] float64.
        bits: [T, S] bits of the weights as they came.
        valid, pool: [T], or empty: all valid, one pool.
        own: [hosts, most] ascending experts of each device, E where it has no more.
        places: [hosts] number of them that may be read.
        limit, unit: a weight is clamped to +-`limit`, and 1 is `unit` units.
        kept_ids, kept_weights, kept: [T, S], written.
    """
    total = np.zeros((pools, experts), np.int64)
    state = np.zeros((pools, experts), np.int8)  # 1: chosen, 2: chosen and not read
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
    chosen = np.empty(own.shape[1], np.int64)
    for home in range(pools):
        for host in range(own.shape[0]):
            count = 0
            for c in range(own.shape[1]):
                e = own[host, c]
                if e < experts and state[home, e]:
                    chosen[count] = e
                    count += 1
            if count <= places[host]:
                continue
            for a in range(count):
                ahead, mine = 0, total[home, chosen[a]]
                for b in range(count):
                    other = total[home, chosen[b]]
                    ahead += (other > mine) | ((other == mine) & (b < a))
                if ahead >= places[host]:
                    state[home, chosen[a]] = 2
    for t in range(rows):
        live = valid.size == 0 or valid[t]
        home = pool[t] if pool.size else 0
        for j in range(slots):
            e = ids[t, j]
            keep = live and 0 <= e < experts and state[home, e] == 1
            kept[t, j] = keep
            kept_ids[t, j] = e if keep else experts
            kept_weights[t, j] = bits[t, j] if keep else 0


@compiled
def _extend(
    ids, weights, scores, valid, capped, row_of, table, device_of, visited, limit, all_ids,
    extra_weights,
):  # fmt: skip
    """Write each token's own choice, then its `limit` best extras; see `expanded_candidates`.

    Args:
        ids, weights: [T, k] of the model, the weights as floats.
        scores: [T, E] float32.
        valid, capped: [T], or empty: all. Only those that are capped get extras.
        row_of: [T] row of `table` with a token's candidates, or empty: row 0.
        table: [rows, candidates] ascending experts, E for none.
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
