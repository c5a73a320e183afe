"""The selection on CPU tensors, compiled by numba on first use (the extra `fast`).

Work grows with the number of assignments alone: count per group (a unit of a pool); a group within
its places keeps everything and is never looked at again; for the others gather 32-bit keys, bisect
for the key of the last place (counting keys is what vector units do best), and share out its ties
in token order. The first call on a machine compiles for some seconds; the result is kept on disk.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.placement import ExpertPlacement
from paceline.routing.active import WEIGHT_LIMIT, Hosts, hosts_of, weight_unit
from paceline.routing.budget import Budget, places_on_host
from paceline.routing.candidates import Candidates
from paceline.routing.kernels import plain
from paceline.routing.kernels.jit import BY_EXPERT, BY_SLOT, KEYS, choose, extend, read_some
from paceline.routing.pools import token_devices
from paceline.routing.ranking import contributions, ranking_key, require_scores
from paceline.routing.survivors import Survivors

Array = npt.NDArray[Any]

_NO_FLAGS, _NO_NUMBERS = np.zeros(0, np.bool_), np.zeros(0, np.int64)


on_host = True

_WIDEST = 64
"""Candidates a token beyond which torch sorts them: here the work grows with their square."""


def expanded(budget: Budget) -> Candidates:
    """See `paceline.routing.selection.Backend`."""
    inputs, policy, placement = budget.inputs, budget.policy, budget.placement
    table = _candidates_of(placement, policy.expand == "own_device")
    if inputs.scores is None or table.shape[1] > _WIDEST:
        return plain.expanded(budget)
    capped = _NO_FLAGS
    if not _array(budget.capped).all():
        capped = np.ascontiguousarray(np.broadcast_to(_array(budget.capped_token), budget.rows))
    row_of = _NO_NUMBERS
    if policy.expand == "own_device":
        row_of = _array(token_devices(inputs, placement.num_devices, 'expand="own_device"'))
    limit = budget.slots - budget.k
    weights = inputs.topk_weights
    ids = torch.empty((budget.rows, budget.slots), dtype=torch.int64)
    extra_weights = torch.empty((budget.rows, limit))
    extend(
        _array(inputs.topk_ids.long()),
        _array(weights if weights.dtype is torch.float64 else weights.float()),
        _array(inputs.scores.float()),
        _NO_FLAGS if inputs.valid is None else _array(inputs.valid),
        capped, row_of, table, _device_of(placement), policy.expand == "visited_devices", limit,
        ids.numpy(), extra_weights.numpy(),
    )  # fmt: skip
    weights = torch.cat([weights, extra_weights.to(weights.dtype)], 1)
    return Candidates(inputs, budget.num_experts, ids, weights)


@lru_cache(maxsize=256)
def _candidates_of(placement: ExpertPlacement, by_device: bool) -> Array:
    """[devices or 1, candidates] ascending experts of each device, or all; E for none."""
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


def narrow(budget: Budget, candidates: Candidates) -> Survivors | None:
    """See `paceline.routing.selection.Backend`."""
    most, inputs, experts = budget.policy.max_active, budget.inputs, budget.num_experts
    assert most is not None
    if _valid_tokens(budget) >= budget.tokens_needed:
        return None
    pool, pools = _NO_NUMBERS, 1
    if budget.policy.pool != "batch":
        assert budget.pools.of_token is not None
        pool = _array(budget.pools.of_token)
        pools = int(pool.max(initial=0)) + 1
        if pools * experts > 1 << 20:  # its tables would outgrow the tokens
            return plain.narrow(budget, candidates)
    rows, places = _hosts(hosts_of(budget.placement, most))
    ids, weights = candidates.ids.long().contiguous(), candidates.weights.contiguous()
    kept_weights = torch.empty_like(weights)
    kept_ids, kept = np.empty(ids.shape, np.int64), np.empty(ids.shape, np.bool_)
    read_some(
        ids.numpy(), _array(weights.double()), _bits(weights),
        _NO_FLAGS if inputs.valid is None else _array(inputs.valid), pool, pools, experts,
        rows, places, WEIGHT_LIMIT, weight_unit(budget.tokens_needed, budget.k),
        kept_ids, _bits(kept_weights), kept,
    )  # fmt: skip
    return Survivors(torch.from_numpy(kept_ids), kept_weights, torch.from_numpy(kept))


@lru_cache(maxsize=256)
def _hosts(hosts: Hosts) -> tuple[Array, Array]:
    return np.array(hosts.experts), np.array(hosts.places)


def keep_best(budget: Budget, candidates: Candidates, fill: bool = False) -> Survivors:
    """See `paceline.routing.selection.Backend`."""
    policy, units, inputs = budget.policy, budget.units, budget.inputs
    ids = candidates.ids.long().contiguous()
    pool = _NO_NUMBERS
    if policy.pool == "batch":
        places = _places_of_batch(budget, fill)
    else:
        pools = budget.pools
        assert pools.of_token is not None
        pool, sizes = _array(pools.of_token), _array(pools.sizes)
        count = int(sizes.nonzero()[0][-1]) + 1 if sizes.any() else 0
        if count * units.count > 4 * ids.numel():  # a table of groups would outgrow the tokens
            return plain.keep_best(budget, candidates, fill)
        factors = [policy.factor, policy.fill_factor] if fill else [policy.factor]
        places = np.stack([_array(budget.capacity(factor))[:count].ravel() for factor in factors])
    priority = _NO_NUMBERS if budget.priority is None else _array(budget.priority)
    metric, kind = _metric(budget, candidates)
    weights = candidates.weights.contiguous()
    kept_weights = torch.empty_like(weights)
    kept_ids, kept = np.empty(ids.shape, np.int64), np.empty(ids.shape, np.bool_)
    choose(
        ids.numpy(), _bits(weights), candidates.k,
        _NO_FLAGS if inputs.valid is None else _array(inputs.valid), pool, priority, metric, kind,
        units.on_host, units.count, places,
        np.empty(ids.numel() + 1, np.uint64 if priority.size else np.uint32),
        kept_ids, _bits(kept_weights), kept,
    )  # fmt: skip
    return Survivors(torch.from_numpy(kept_ids), kept_weights, torch.from_numpy(kept))


def _metric(budget: Budget, candidates: Candidates) -> tuple[Array, int]:
    """What ranks the assignments, and where each finds its own."""
    inputs, keep = budget.inputs, budget.policy.keep
    if keep == "score" and inputs.scores is not None:
        return _array(inputs.scores.float()), BY_EXPERT
    if keep == "score":
        return _array(require_scores(candidates.scores)), BY_SLOT
    if keep == "weight":
        return _array(candidates.weights.float()), BY_SLOT
    if keep == "contribution":
        return _array(contributions(candidates)), BY_SLOT
    keys = ranking_key(budget.policy, candidates, budget.pools.rank)
    return _array(keys.int()).view(np.float32), KEYS


def _places_of_batch(budget: Budget, fill: bool) -> Array:
    """[1, units] places, or [2, units] with those that extras may fill, for one pool of tokens."""
    inputs, policy = budget.inputs, budget.policy
    valid = None if inputs.valid is None else _array(inputs.valid)
    tokens = _valid_tokens(budget)
    capped = tokens >= budget.tokens_needed
    if capped and policy.phase == "prefill" and inputs.token_decode is not None:
        prompt = ~_array(inputs.token_decode)
        capped = bool((prompt if valid is None else prompt & valid).any())
    if not capped:
        return budget.units.unbounded
    factor = policy.capacity_factor
    assert factor is not None
    factors = (factor, min(policy.fill_to, factor)) if fill else (factor,)
    return places_on_host(budget.units, factors, budget.k, tokens)


def _valid_tokens(budget: Budget) -> int:
    valid = budget.inputs.valid
    return budget.rows if valid is None else int(np.count_nonzero(_array(valid)))


_BITS: dict[int, npt.DTypeLike] = {2: np.int16, 4: np.int32, 8: np.int64}


def _bits(weights: Tensor) -> Array:
    """Memory of weights, which are moved and never computed with; numpy has no bfloat16."""
    size = weights.element_size()
    array: Array = _array(weights if size > 2 else weights.view(torch.int16)).view(_BITS[size])
    return array


def _array(tensor: Tensor) -> Array:
    """The tensor's own memory, in C order."""
    array: Array = tensor.detach().contiguous().numpy() if tensor.requires_grad else tensor.numpy()
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)
