"""Routing as a pure function: the model's choice in, a bounded assignment out."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing.assignment import Assignment, unit_groups
from paceline.routing.candidates import Candidates, expanded_candidates, topk_candidates
from paceline.routing.capacity import INT64_MAX, capacities, tokens_needed
from paceline.routing.constants import table
from paceline.routing.inputs import RoutingInputs
from paceline.routing.metrics import KEY_BITS, descending_key, metric_key
from paceline.routing.pools import TokenPools, token_pools
from paceline.routing.priority import priority_key
from paceline.routing.selection import keep_best


def route(
    inputs: RoutingInputs, policy: CapacityPolicy, placement: ExpertPlacement | None = None
) -> Assignment:
    """Bound the load of every unit, as `policy` says (He et al., arXiv 2503.05066).

    Pure and deterministic; plain torch on any device, no host sync on accelerators, output shapes
    that depend on input shapes and the policy alone.

    Args:
        inputs: the model's choice for every token of one layer.
        policy: what to bound and what to keep.
        placement: which device hosts which expert; None: every expert is a device of its own.

    Returns:
        The assignment, [tokens, slots], with slots = k unless the policy expands.

    Raises:
        ValueError: if the policy needs an input that is missing, or its cap can never bind.
    """
    num_experts = inputs.experts(placement)
    placement = placement or ExpertPlacement.per_expert(num_experts)
    check_binding(policy, placement, inputs.topk_ids.shape[1])
    pools = token_pools(inputs, policy.pool if policy.caps else "batch", placement.num_devices)
    units = _Units(policy, placement, inputs, pools)

    if policy.caps and policy.expand is not None:
        candidates = expanded_candidates(inputs, policy, placement, units.capped)
    else:
        candidates = topk_candidates(inputs, num_experts)
    selected = candidates.offered
    if policy.caps:
        selected = _select(inputs, policy, pools, units, candidates)

    if policy.caps and policy.mode == "enforce":
        kept, weights = selected, torch.where(selected, candidates.weights, 0)
        if policy.renormalize:
            weights = _renormalized(weights, candidates, selected)
        ids = candidates.ids
    else:
        genuine = candidates.genuine
        ids, kept = genuine.ids, genuine.offered
        weights = torch.where(kept, genuine.weights, 0)
    return Assignment(
        topk_ids=torch.where(kept, ids, num_experts),
        topk_weights=weights,
        kept=kept,
        num_experts=num_experts,
        candidates=candidates,
        selected=selected,
        pools=pools,
        unit_of_expert=units.of_expert,
        num_units=units.count,
        capacity=units.table(policy.factor),
    )


def check_binding(policy: CapacityPolicy, placement: ExpertPlacement, k: int) -> None:
    """Refuse a policy that this placement, or this many experts a token, makes meaningless.

    Raises:
        ValueError: for a device cap on one device that allows its whole load, or max_experts < k.
    """
    if not policy.caps:
        return
    assert policy.factor is not None
    if policy.unit == "device" and placement.num_devices == 1 and policy.factor >= 1:
        raise ValueError(
            f'capacity_factor={policy.capacity_factor} with unit="device" on 1 device can never '
            'bind: allowed is a factor < 1, more devices, or unit="expert".'
        )
    if policy.max_experts is not None and policy.max_experts < k:
        raise ValueError(
            f"max_experts={policy.max_experts} is not allowed: it is at least k, here {k}."
        )


class _Units:
    """What is capped: units, their sizes, and how many places each has in each pool."""

    def __init__(
        self,
        policy: CapacityPolicy,
        placement: ExpertPlacement,
        inputs: RoutingInputs,
        pools: TokenPools,
    ) -> None:
        ids = inputs.topk_ids
        if policy.unit == "expert":
            placement = ExpertPlacement.per_expert(placement.num_experts)
        self.count = placement.num_devices
        self.of_expert = table((*placement.expert_to_device, self.count), ids)
        # Units differ in few sizes, so capacities are computed by size: [pools, sizes]
        self._sizes = sorted(set(placement.sizes))
        size_of = tuple(self._sizes.index(size) for size in placement.sizes)
        self._size_of = table(size_of, ids)
        self._size_of_expert = table(tuple(size_of[u] for u in placement.expert_to_device), ids)
        self._pools = pools
        self._per_expert = Fraction(inputs.topk_ids.shape[1], placement.num_experts)
        self.capped = self._capped(policy, inputs, placement.num_experts)

    def _capped(self, policy: CapacityPolicy, inputs: RoutingInputs, num_experts: int) -> Tensor:
        """0-d bool: whether this forward is capped at all."""
        ids = inputs.topk_ids
        if not policy.caps:
            return torch.zeros((), dtype=torch.bool, device=ids.device)
        enough = policy.resolved_min_expert_load(ids.device.type)
        capped = self._pools.total >= tokens_needed(enough, ids.shape[1], num_experts)
        if policy.phase == "prefill" and inputs.token_decode is not None:
            prompt = ~inputs.token_decode
            capped = capped & (prompt if inputs.valid is None else prompt & inputs.valid).any()
        return capped

    def _by_size(self, factor: Fraction) -> Tensor:
        """[pools, sizes] int64 places of a unit of each size."""
        return torch.stack(
            [
                capacities(factor * self._per_expert * size, self._pools.sizes)
                for size in self._sizes
            ],
            dim=1,
        )

    def table(self, factor: Fraction | None) -> Tensor:
        """[pools, units] int64 places; the largest int64 where nothing is capped."""
        if factor is None:
            shape = (self._pools.count, self.count)
            return torch.full(shape, INT64_MAX, dtype=torch.int64, device=self.of_expert.device)
        return torch.where(self.capped, self._by_size(factor)[:, self._size_of], INT64_MAX)

    def places(self, factor: Fraction, ids: Tensor) -> Tensor:
        """Places that the unit of each expert in `ids` has, broadcastable to [tokens, slots]."""
        by_size = torch.where(self.capped, self._by_size(factor), INT64_MAX)
        pool = self._pools.of_token
        if by_size.numel() == 1:
            return by_size
        size = self._size_of_expert[ids]
        return by_size.flatten()[size] if pool is None else by_size[pool.unsqueeze(1), size]


def _select(
    inputs: RoutingInputs,
    policy: CapacityPolicy,
    pools: TokenPools,
    units: _Units,
    candidates: Candidates,
) -> Tensor:
    """[tokens, slots] bool: the candidates that fit."""
    assert policy.factor is not None
    priority = priority_key(inputs, policy)

    def best(offer: Candidates, fill: Fraction | None = None) -> Tensor:
        """Cap these; with `fill`, extras come last and count only so many places."""
        assert policy.factor is not None
        ids = torch.where(offer.offered, offer.ids, 0)
        places = units.places(policy.factor, ids)
        if fill is not None:
            extra = torch.arange(ids.shape[1], device=ids.device) >= offer.k
            places = torch.where(extra, units.places(fill, ids), places)
        return keep_best(
            unit_groups(offer.ids, offer.offered, units.of_expert, units.count, pools),
            pools.count * units.count,
            places,
            metric_key(inputs, policy, ids, offer.scores, offer.weights, pools.rank),
            priority,
            genuine_slots=None if fill is None else offer.k,
        )

    if policy.expand is None:
        return best(candidates)
    if policy.expand_rule == "compete":
        return _trim(candidates, best(candidates), policy.max_experts)
    if policy.max_experts is not None:
        # extras can't change which genuine ones stay, so a token knows the places it has left
        survivors = best(candidates.genuine).sum(1, keepdim=True)
        extra_rank = candidates.offered[:, candidates.k :].long().cumsum(1)
        wanted = extra_rank <= policy.max_experts - survivors
        candidates = candidates.withdraw(torch.cat([candidates.genuine.offered, wanted], 1))
    return best(candidates, fill=policy.fill_factor)


def _trim(candidates: Candidates, selected: Tensor, max_experts: int | None) -> Tensor:
    """[tokens, slots] bool: a token with more than `max_experts` loses its lowest scores."""
    if max_experts is None:
        return selected
    assert candidates.scores is not None
    key = torch.where(selected, descending_key(candidates.scores), 1 << KEY_BITS)
    order = torch.sort(key, dim=1, stable=True).indices
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return selected & (rank < max_experts)


def _renormalized(weights: Tensor, candidates: Candidates, selected: Tensor) -> Tensor:
    """[tokens, slots] weights of tokens that lost something, scaled to their former sum."""
    genuine = candidates.genuine
    lost = (genuine.offered & ~selected[:, : genuine.k]).any(1)
    former = torch.where(genuine.offered, genuine.weights, 0).double().sum(1)
    left = weights.double().sum(1)
    scaled = (weights.double() * (former / left).unsqueeze(1)).to(weights.dtype)
    usable = lost & (left > 0) & left.isfinite() & former.isfinite()
    return torch.where(usable.unsqueeze(1), scaled, weights)
