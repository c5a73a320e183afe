"""The cap on an accelerator: no host sync, static shapes, and adjustable inside CUDA graphs.

A captured graph replays kernels and runs no Python, so everything that may change while a server
runs lies in device memory: a table of capacities by number of real tokens, filled by the host with
exact fractions; the number of experts that max_active lets a device read, and the number of tokens
below which it does; and a flag that enforces the drops. Never run on CUDA.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from paceline.facts import facts_for
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing.active import Hosts, hosts_of, weight_unit
from paceline.routing.backends.plain import experts_read, first_of_each_group
from paceline.routing.keys import descending_key
from paceline.routing.limits import INT64_MAX, capacities, capacity_ratio, tokens_needed, units_of

KEEPS = ("score", "weight", "first", "last")
LIVE = ("capacity_factor", "min_expert_load", "mode", "max_active")
"""Fields that can change in a captured graph; the last one only if the graph started with it."""


class DeviceCap:
    """Token Drop of one layer on a device, for one pool.

    Args:
        policy: its `unit` and `keep` become part of the captured graph.
        placement: expert -> device.
        most_tokens: the most tokens of a forward.
        share: share of a forward's tokens that this rank sees, for `min_expert_load`.

    Attributes:
        places: [sizes, most_tokens + 1] int64 capacity of a unit of each size, by real tokens.
        few: 0-d int64 number of real tokens below which max_active applies.
        readable: [devices with experts] int64 number of experts that each may read then.
        enforce: 0-d bool, True if what is over capacity is dropped.
        loads: [2, experts] int64 assignments before and after the cap.
        counts: [3] int64 forwards with tokens, capped forwards, tokens.

    Raises:
        ValueError: if the policy needs the host in every forward.
    """

    def __init__(
        self,
        policy: CapacityPolicy,
        placement: ExpertPlacement,
        k: int,
        most_tokens: int,
        device: torch.device | str,
        share: Fraction = Fraction(1),
    ) -> None:
        self._policy, self._k, self._experts = policy, k, placement.num_experts
        self._share, self._most = share, most_tokens
        units = units_of(placement, policy.unit)
        self._units, self._sizes = units.count, units.sizes
        self._unit_of = torch.tensor(units.of_expert, device=device)
        self._size_of = torch.tensor(units.size_of_expert, device=device)
        shape = (len(units.sizes), most_tokens + 1)
        self.places = torch.full(shape, INT64_MAX, dtype=torch.int64, device=device)
        self._hosts: Hosts | None = None
        if policy.max_active is not None:
            self._hosts = hosts_of(placement, policy.max_active)
            self._own = torch.tensor(self._hosts.experts, device=device)
            self.readable = torch.tensor(self._hosts.places, device=device)
            self.few = torch.zeros((), dtype=torch.int64, device=device)
            self.weight_unit = torch.ones((), dtype=torch.float64, device=device)
        self._placement = placement
        self.enforce = torch.zeros((), dtype=torch.bool, device=device)
        self.loads = torch.zeros((2, self._experts), dtype=torch.int64, device=device)
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)
        self.set_policy(policy)

    def check(self, policy: CapacityPolicy | None) -> None:
        """Refuse a policy that the captured graph can't apply.

        Raises:
            ValueError: naming the field and what is allowed.
        """
        if policy is None:
            return
        facts = facts_for(policy)
        for needs_host, field in (
            (facts.request, "pool=request"),
            (facts.decode, "phase=prefill"),
            (facts.position, f"protect_first={policy.protect_first}"),
            (policy.expand is not None, f"expand={policy.expand}"),
            (policy.renormalize, "renormalize=true"),
            (policy.caps and policy.keep not in KEEPS, f"keep={policy.keep}"),
        ):
            if needs_host:
                raise ValueError(f"{field} is not allowed on an accelerator: it needs the host.")
        for name in type(policy).model_fields if policy.caps and self._policy.caps else ():
            old, new = getattr(self._policy, name), getattr(policy, name)
            live = name in LIVE and (name != "max_active" or self._hosts is not None)
            if not live and old != new:
                raise ValueError(
                    f"{name}={new} is not allowed on a running accelerator, where it is {old}: "
                    f"only {', '.join(LIVE)} can change."
                )

    def set_policy(self, policy: CapacityPolicy | None) -> None:
        """Put a policy in force, in captured graphs too; None: nothing is dropped.

        Raises:
            ValueError: as `check` does.
        """
        self.check(policy)
        self.places.fill_(INT64_MAX)
        needed = 0
        if policy is not None and policy.caps:
            load = Fraction(str(policy.resolved_min_expert_load("cuda"))) * self._share
            needed = tokens_needed(float(load), self._k, self._experts)
        self._set_max_active(policy, needed)
        factor = policy.factor if policy is not None and policy.caps else None
        if factor is not None:
            tokens = torch.arange(self._most + 1)
            needed = min(needed, self._most + 1)
            for row, size in enumerate(self._sizes):
                ratio = capacity_ratio(factor, self._k, size, self._experts)
                self.places[row, needed:] = capacities(ratio, tokens)[needed:].to(self.places)
        self.enforce.fill_(policy is not None and policy.mode == "enforce")

    def _set_max_active(self, policy: CapacityPolicy | None, needed: int) -> None:
        if self._hosts is None:
            return
        most = policy.max_active if policy is not None and policy.caps else None
        self.few.fill_(0 if most is None else needed)
        if most is not None:
            places = hosts_of(self._placement, most).places
            self.readable.copy_(torch.tensor(places))
            self.weight_unit.fill_(weight_unit(needed, self._k))

    def _readable(self, safe: Tensor, offered: Tensor, weights: Tensor, tokens: Tensor) -> Tensor:
        """Return [tokens, k] bool, True for assignments whose experts their devices may read."""
        if self._hosts is None:
            return offered
        expert = torch.where(offered, safe, self._experts)
        read = experts_read(
            expert, weights, self.weight_unit, self._own, self.readable, 1, self._experts
        )
        return offered & (read[0][expert] | (tokens >= self.few))

    def __call__(
        self, weights: Tensor, ids: Tensor, scores: Tensor | None, valid: Tensor | None
    ) -> None:
        """Set dropped ids to -1 and their weights to 0, in place.

        Args:
            weights: [tokens, k].
            ids: [tokens, k] experts; outside [0, experts): no assignment.
            scores: [tokens, k] float32 scores of the chosen experts, for keep=score.
            valid: [tokens] bool, False for padding; None: every token is real.
        """
        rows = ids.shape[0]
        offered = (ids >= 0) & (ids < self._experts)
        if valid is not None:
            offered = offered & valid.unsqueeze(1)
            tokens = valid.sum()
        else:
            tokens = torch.full((), rows, dtype=torch.int64, device=ids.device)
        safe = torch.where(offered, ids, 0).long()
        by_size = self.places.index_select(1, tokens.clamp(max=self._most).view(1)).view(-1)
        readable = self._readable(safe, offered, weights, tokens)
        group = torch.where(readable, self._unit_of[safe], self._units)
        kept = first_of_each_group(
            group, self._units, by_size[self._size_of[safe]], self._key(weights, scores, ids)
        )
        lost = offered & ~kept
        self._count(safe, offered, kept, tokens, by_size)
        drop = lost & self.enforce
        ids.masked_fill_(drop, -1)
        weights.masked_fill_(drop, 0)

    def _key(self, weights: Tensor, scores: Tensor | None, ids: Tensor) -> Tensor:
        """Return [tokens, k] int64, smaller is kept first; ties go by token, then by slot."""
        keep = self._policy.keep
        if keep == "score" and scores is not None:
            return descending_key(scores)
        if keep == "weight":
            return descending_key(weights)
        order = torch.arange(ids.shape[0], device=ids.device)
        if keep == "last":
            order = ids.shape[0] - 1 - order
        return order.unsqueeze(1).expand(ids.shape)

    def _count(
        self, safe: Tensor, offered: Tensor, kept: Tensor, tokens: Tensor, by_size: Tensor
    ) -> None:
        """Count in place, so that a replayed graph counts too."""
        for row, counted in enumerate((offered, kept)):
            self.loads[row].scatter_add_(0, safe.flatten(), counted.flatten().long())
        capped = (by_size != INT64_MAX).any() & (tokens > 0)
        if self._hosts is not None:
            capped = capped | ((tokens < self.few) & (tokens > 0))
        self.counts.add_(torch.stack([(tokens > 0).long(), capped.long(), tokens]))
