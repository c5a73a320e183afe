"""How many places every unit has: what is capped, tables that never change, capacities."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import ceil

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy, Unit
from paceline.routing.capacity import INT64_MAX, capacities, tokens_needed
from paceline.routing.constants import table
from paceline.routing.inputs import RoutingInputs, static
from paceline.routing.lazy import lazy
from paceline.routing.pools import TokenPools, token_pools
from paceline.routing.priority import priority_key


class Units:
    """What a placement and a unit fix once and for all. Made by `units_of`, which keeps it.

    Attributes:
        count: units.
        num_experts: experts of the layer, E.
        of_expert: [experts + 1] the unit of each expert; the last entry: no unit.
        sizes: the different numbers of experts that units host, ascending.
        size_of: [units] index of each unit's size in `sizes`.
        size_of_expert: [experts + 1] index in `sizes` of the unit of each expert; the last: any.
        on_host: [experts] `of_expert` as an array, not to be written to.
        unbounded: [1, units] places where nothing is capped, as an array, not to be written to.
    """

    def __init__(self, placement: ExpertPlacement) -> None:
        self.count, self.num_experts = placement.num_devices, placement.num_experts
        self.of_expert = (*placement.expert_to_device, self.count)
        self.sizes = tuple(sorted(set(placement.sizes)))
        self.size_of = tuple(self.sizes.index(size) for size in placement.sizes)
        self.size_of_expert = (*(self.size_of[unit] for unit in placement.expert_to_device), 0)
        self.on_host = np.array(placement.expert_to_device, dtype=np.int64)
        self.unbounded = np.full((1, self.count), INT64_MAX)


@lru_cache(maxsize=256)
def units_of(placement: ExpertPlacement, unit: Unit) -> Units:
    """The units that a policy caps under this placement."""
    if unit == "expert":
        placement = ExpertPlacement.per_expert(placement.num_experts)
    return Units(placement)


@lru_cache(maxsize=1024)
def places_on_host(
    units: Units, factors: tuple[float, ...], k: int, tokens: int
) -> npt.NDArray[np.int64]:
    """[factors, units] places where the host knows the number of tokens. Not to be written to."""
    table = []
    for factor in factors:  # floats, which a cache finds much quicker than fractions
        per_expert = Fraction(str(factor)) * tokens * k / units.num_experts
        by_size = [min(ceil(per_expert * size), INT64_MAX) for size in units.sizes]
        table.append([by_size[size] for size in units.size_of])
    return np.array(table, dtype=np.int64)


class Budget:
    """Everything about one call that limits it, computed when asked for.

    Attributes:
        inputs: of the layer.
        policy: what to bound and what to keep.
        placement: of the experts.
        units: what is capped.
    """

    def __init__(
        self, inputs: RoutingInputs, policy: CapacityPolicy, placement: ExpertPlacement
    ) -> None:
        self.inputs, self.policy, self.placement = inputs, policy, placement
        rows, k = inputs.topk_ids.shape
        self.rows, self.k = rows, static(k)
        self.num_experts = placement.num_experts
        self.units = _uncached_units(placement, policy.unit)

    @property
    def slots(self) -> int:
        """Slots of a bounded assignment: k, and the most extras that the policy allows a token."""
        policy, largest = self.policy, max(self.placement.sizes)
        if policy.expand is None or policy.capacity_factor is None:
            return self.k
        widest = {"own_device": largest, "visited_devices": self.k * largest}
        limit = self.num_experts if policy.expand_limit is None else policy.expand_limit
        return self.k + min(limit, widest.get(policy.expand, limit), self.num_experts)

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        return self.inputs.topk_ids.device

    @property
    def unit_of_expert(self) -> Tensor:
        """[experts + 1] int64 unit of each expert; the last entry: no unit."""
        return table(self.units.of_expert, self.inputs.topk_ids)

    @lazy
    def pools(self) -> TokenPools:
        """The tokens that share one budget."""
        pool = self.policy.pool if self.policy.caps else "batch"
        return token_pools(self.inputs, pool, self.placement.num_devices)

    @lazy
    def priority(self) -> Tensor | None:
        """[tokens] int64 priority keys, smaller is kept first; None where all are alike."""
        return priority_key(self.inputs, self.policy)

    @property
    def tokens_needed(self) -> int:
        """The fewest valid tokens of a forward (with request pools: of a pool) whose loads count.

        From there on capacity_factor rules, below max_active does.
        """
        enough = self.policy.resolved_min_expert_load(self.device.type)
        return tokens_needed(enough, self.k, self.num_experts)

    @lazy
    def capped(self) -> Tensor:
        """[pools] bool: which pools are capped at all.

        Whether there are enough tokens is a matter of the whole forward, or with request pools of
        each request, so that no neighbour decides it. Under phase="prefill" a pool of only decode
        tokens is left alone, whatever other pools hold.
        """
        policy, pools, decode = self.policy, self.pools, self.inputs.token_decode
        if not policy.caps or policy.factor is None:
            return torch.zeros(pools.count, dtype=torch.bool, device=self.device)
        alone = policy.pool == "request" or pools.count == 1
        capped = (pools.sizes if alone else pools.total.reshape(1)) >= self.tokens_needed
        if policy.phase == "prefill" and decode is not None:
            capped = capped & (pools.count_of(~decode) > 0)
        return capped.expand(pools.count)

    @lazy
    def narrowed(self) -> Tensor:
        """[1] bool: whether max_active rules this forward."""
        if not self.policy.caps or self.policy.max_active is None:
            return torch.zeros(1, dtype=torch.bool, device=self.device)
        return self.pools.total.reshape(1) < self.tokens_needed

    @property
    def capped_token(self) -> Tensor:
        """[tokens] bool, or [1] for one pool: whose pool is capped; anything for padding."""
        pool = self.pools.of_token
        return self.capped if pool is None else self.capped[pool]

    def capacity(self, factor: Fraction | None) -> Tensor:
        """[pools, units] int64 places; the largest int64 where nothing is capped."""
        if factor is None:
            shape = (self.pools.count, self.units.count)
            return torch.full(shape, INT64_MAX, dtype=torch.int64, device=self.device)
        return self._by_size(factor)[:, table(self.units.size_of, self.inputs.topk_ids)]

    def places(self, factor: Fraction, ids: Tensor) -> Tensor:
        """Places that the unit of each expert in `ids` has, broadcastable to [tokens, slots]."""
        by_size = self._by_size(factor)
        pool = self.pools.of_token
        if by_size.numel() == 1:
            return by_size
        size = table(self.units.size_of_expert, ids)[ids]
        return by_size.flatten()[size] if pool is None else by_size[pool.unsqueeze(1), size]

    def _by_size(self, factor: Fraction) -> Tensor:
        """[pools, sizes] int64 places of a unit of each size."""
        per_expert = factor * Fraction(self.k, self.num_experts)
        tokens = self.pools.sizes
        places = [capacities(per_expert * size, tokens) for size in self.units.sizes]
        return torch.where(self.capped.unsqueeze(1), torch.stack(places, dim=1), INT64_MAX)


def _uncached_units(placement: ExpertPlacement, unit: Unit) -> Units:
    # a cache is no business of a compiler's, which warns of it
    if torch.compiler.is_compiling():
        return units_of.__wrapped__(placement, unit)
    return units_of(placement, unit)
