"""Capacities: how many assignments each unit may have in a forward, exact on host and device.

A capacity is `ceil(factor * T * k * n / E)` for T valid tokens and a unit that hosts n of E
experts. The factor is the decimal that the user wrote, so the ratio `factor * k * n / E` is a
fraction p/q known on the host, while T may be known on the device only. p and q can be far too
large for int64 arithmetic (0.1 + 0.2 is 30000000000000004 / 10**17). But T is less than some N, and
`ceil(T * x)` for T up to N does not change when x moves up to the next fraction with a
denominator of at most N (of the Farey sequence of order N): between two neighbours of that
sequence no T * x crosses an integer. So p/q is replaced by that neighbour, which is small.
"""

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
from paceline.routing.cached import lazy, table
from paceline.routing.inputs import RoutingInputs, static
from paceline.routing.pools import TokenPools, token_pools

INT64_MAX = torch.iinfo(torch.int64).max
"""Capacity of a pool without a cap."""

MAX_TOKENS = 1 << 31
"""Bound on the rows of a forward; one constant serves all batch sizes, compiled or not."""


def capacity_ratio(factor: Fraction, k: int, size: int, num_experts: int) -> Fraction:
    """Return the assignments allowed per token on a unit that hosts `size` experts.

    >>> capacity_ratio(Fraction("1.25"), k=2, size=4, num_experts=8)
    Fraction(5, 4)
    """
    return factor * Fraction(k * size, num_experts)


def capacity(ratio: Fraction, tokens: int) -> int:
    """Round a capacity where the host knows the number of tokens.

    >>> capacity(Fraction(5, 4), 3)
    4
    """
    return min(ceil(ratio * tokens), INT64_MAX)


def capacities(ratio: Fraction, tokens: Tensor) -> Tensor:
    """Round capacities on the device: `capacity(ratio, tokens)`, exact, without a host sync.

    Args:
        ratio: assignments allowed per token.
        tokens: int64, any shape: valid tokens of each pool, fewer than `MAX_TOKENS`.

    Returns:
        int64 tensor of the shape of `tokens`.
    """
    whole, rest, denominator = split_ratio(ratio)
    # tokens * rest + denominator < 2 ** 62 + 2 ** 31
    part = torch.div(tokens * rest + (denominator - 1), denominator, rounding_mode="floor")
    if (whole + 1) * MAX_TOKENS <= INT64_MAX:
        return tokens * whole + part
    room = torch.div(INT64_MAX - part, whole, rounding_mode="floor")
    return torch.where(tokens > room, INT64_MAX, tokens.clamp(max=room) * whole + part)


def split_ratio(ratio: Fraction) -> tuple[int, int, int]:
    """Split a ratio for devices: capacity = tokens * whole + ceil(tokens * rest / denominator).

    >>> split_ratio(Fraction(5, 4))
    (1, 1, 4)
    """
    numerator, denominator = small_ratio(ratio, MAX_TOKENS)
    whole, rest = divmod(numerator, denominator)
    return min(whole, INT64_MAX), rest, denominator


@lru_cache(maxsize=4096)
def small_ratio(ratio: Fraction, order: int) -> tuple[int, int]:
    """Find the smallest fraction >= ratio whose denominator is at most `order`, >= 1."""
    if ratio.denominator <= order:
        return ratio.numerator, ratio.denominator
    # Stern-Brocot search with whole runs of steps at once: low < ratio <= high throughout, and the
    # two are neighbours, so when no mediant has a small enough denominator, high is the answer.
    whole = ratio.numerator // ratio.denominator
    low, high = (whole, 1), (whole + 1, 1)
    p, q = ratio.numerator, ratio.denominator
    while low[1] + high[1] <= order:
        # how many times high can be added to low while staying below the ratio
        behind, ahead = p * low[1] - low[0] * q, high[0] * q - p * high[1]
        steps = min((behind - 1) // ahead, (order - low[1]) // high[1])
        low = (low[0] + steps * high[0], low[1] + steps * high[1])
        # and low to high while staying at or above it
        behind = p * low[1] - low[0] * q
        steps = min(ahead // behind, (order - high[1]) // low[1])
        high = (high[0] + steps * low[0], high[1] + steps * low[1])
    return high


@lru_cache(maxsize=4096)
def tokens_needed(min_expert_load: float, k: int, num_experts: int) -> int:
    """Return the fewest tokens whose mean load per expert, T * k / E, is >= `min_expert_load`."""
    return min(-(-(Fraction(str(min_expert_load)) * num_experts) // k), INT64_MAX)


class Units:
    """The units that a policy caps (devices or single experts) under one placement.

    Attributes:
        count: number of units.
        num_experts: experts of the layer, E.
        of_expert: [experts + 1] the unit of each expert; the last entry: no unit.
        sizes: the distinct numbers of experts that units host, ascending.
        size_of: [units] index of each unit's size in `sizes`.
        size_of_expert: [experts + 1] index in `sizes` of the unit of each expert; the last: any.
        on_host: [experts] `of_expert` as an array, read-only.
        unbounded: [1, units] capacities where nothing is capped, as an array, read-only.
    """

    def __init__(self, placement: ExpertPlacement) -> None:
        self.count, self.num_experts = placement.num_devices, placement.num_experts
        self.of_expert = (*placement.expert_to_device, self.count)
        self.sizes = tuple(sorted(set(placement.sizes)))
        self.size_of = tuple(self.sizes.index(size) for size in placement.sizes)
        self.size_of_expert = (*(self.size_of[unit] for unit in placement.expert_to_device), 0)
        self.on_host = np.array(placement.expert_to_device, dtype=np.int64)
        self.unbounded = np.full((1, self.count), INT64_MAX)


def units_of(placement: ExpertPlacement, unit: Unit) -> Units:
    """Return the units that a policy caps under this placement."""
    if torch.compiler.is_compiling():  # a compiler warns of caches
        return _units_of.__wrapped__(placement, unit)
    return _units_of(placement, unit)


@lru_cache(maxsize=256)
def _units_of(placement: ExpertPlacement, unit: Unit) -> Units:
    if unit == "expert":
        placement = ExpertPlacement.per_expert(placement.num_experts)
    return Units(placement)


@lru_cache(maxsize=1024)
def capacities_on_host(
    units: Units, factors: tuple[float, ...], k: int, tokens: int
) -> npt.NDArray[np.int64]:
    """Return the [factors, units] capacities for a number of tokens, as a read-only array."""
    rows = []
    for factor in factors:  # floats, which a cache finds much quicker than fractions
        exact = Fraction(str(factor))
        ratios = [capacity_ratio(exact, k, size, units.num_experts) for size in units.sizes]
        by_size = [capacity(ratio, tokens) for ratio in ratios]
        rows.append([by_size[size] for size in units.size_of])
    return np.array(rows, dtype=np.int64)


class Budget:
    """The limits of one call, computed when asked for.

    Attributes:
        inputs: of the layer.
        policy: what to limit and what to keep.
        placement: of the experts.
        units: what is capped.
        device: on which the tokens are.
    """

    def __init__(
        self, inputs: RoutingInputs, policy: CapacityPolicy, placement: ExpertPlacement
    ) -> None:
        self.inputs, self.policy, self.placement = inputs, policy, placement
        rows, k = inputs.topk_ids.shape
        self.rows, self.k, self.device = rows, static(k), inputs.topk_ids.device
        self.num_experts = placement.num_experts
        self.units = units_of(placement, policy.unit)

    @property
    def slots(self) -> int:
        """Slots of a bounded assignment: k, and the most extras allowed per token."""
        policy, largest = self.policy, max(self.placement.sizes)
        if policy.expand is None or policy.capacity_factor is None:
            return self.k
        widest = {"own_device": largest, "visited_devices": self.k * largest}
        limit = self.num_experts if policy.expand_limit is None else policy.expand_limit
        return self.k + min(limit, widest.get(policy.expand, limit), self.num_experts)

    @property
    def unit_of_expert(self) -> Tensor:
        """[experts + 1] int64 unit of each expert; the last entry: no unit."""
        return table(self.units.of_expert, self.inputs.topk_ids)

    @lazy
    def pools(self) -> TokenPools:
        """The tokens that share one budget."""
        pool = self.policy.pool if self.policy.caps else "batch"
        return token_pools(self.inputs, pool, self.placement.num_devices)

    @property
    def tokens_needed(self) -> int:
        """Fewest valid tokens of a forward (request pools: of a pool) for capacity_factor to apply.

        Below, max_active applies.
        """
        load = self.policy.resolved_min_expert_load(self.device.type)
        return tokens_needed(load, self.k, self.num_experts)

    @lazy
    def capped(self) -> Tensor:
        """[pools] bool: True where capacity_factor applies to a pool.

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
    def max_active_applies(self) -> Tensor:
        """[1] bool: True if max_active applies to this forward."""
        if not self.policy.caps or self.policy.max_active is None:
            return torch.zeros(1, dtype=torch.bool, device=self.device)
        return self.pools.total.reshape(1) < self.tokens_needed

    @property
    def capped_token(self) -> Tensor:
        """[tokens] bool, or [1] for one pool: True where a token's pool is capped."""
        pool = self.pools.of_token
        return self.capped if pool is None else self.capped[pool]

    def capacity(self, factor: Fraction | None) -> Tensor:
        """Return the [pools, units] int64 capacities; INT64_MAX where nothing is capped."""
        if factor is None:
            shape = (self.pools.count, self.units.count)
            return torch.full(shape, INT64_MAX, dtype=torch.int64, device=self.device)
        return self._by_size(factor)[:, table(self.units.size_of, self.inputs.topk_ids)]

    def capacity_of(self, factor: Fraction, ids: Tensor) -> Tensor:
        """Return the capacity of each expert's unit, broadcastable to ids [tokens, slots]."""
        by_size = self._by_size(factor)
        pool = self.pools.of_token
        if by_size.numel() == 1:
            return by_size
        size = table(self.units.size_of_expert, ids)[ids]
        return by_size.flatten()[size] if pool is None else by_size[pool.unsqueeze(1), size]

    def _by_size(self, factor: Fraction) -> Tensor:
        """Return the [pools, sizes] int64 capacities of a unit of each size."""
        k, experts, tokens = self.k, self.num_experts, self.pools.sizes
        by_size = [
            capacities(capacity_ratio(factor, k, size, experts), tokens)
            for size in self.units.sizes
        ]
        return torch.where(self.capped.unsqueeze(1), torch.stack(by_size, dim=1), INT64_MAX)
