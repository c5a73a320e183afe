"""The result of routing: who computes what, and the counts behind it when asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.routing.budget import Budget
from paceline.routing.candidates import Candidates, topk_candidates
from paceline.routing.constants import table
from paceline.routing.lazy import lazy
from paceline.routing.pools import TokenPools


@dataclass(eq=False)
class Assignment:
    """What the experts have to compute.

    The counts below are properties, computed on the device when asked for. Under mode="shadow"
    the tensors are the model's own choice and the counts say what "enforce" would have done.

    Attributes:
        topk_ids: [tokens, slots] int64; a dropped or unused slot is `num_experts`, the sentinel.
        topk_weights: [tokens, slots] in the dtype of the input weights, 0 where nothing is kept.
        kept: [tokens, slots] bool.
        num_experts: experts of the layer, E.
        budget: what limited the call.
        bounded_ids: [tokens, slots] int64 `topk_ids` as they are (or, in shadow, would be) under
            the cap.

    Examples:
        >>> from paceline import CapacityPolicy, RoutingInputs, route
        >>> route(RoutingInputs(torch.zeros(3, 1).int(), torch.ones(3, 1), num_experts=2),
        ...       CapacityPolicy(gamma=1, keep="first", min_expert_load=0)).loads_after
        tensor([[2, 0]])
    """

    topk_ids: Tensor
    topk_weights: Tensor
    kept: Tensor
    num_experts: int
    budget: Budget
    bounded_ids: Tensor

    @property
    def pools(self) -> TokenPools:
        """The tokens that share one budget."""
        return self.budget.pools

    @lazy
    def capacity(self) -> Tensor:
        """[pools, units] int64 places; the largest int64 without a cap."""
        policy = self.budget.policy
        return self.budget.capacity(policy.factor if policy.caps else None)

    @lazy
    def narrowed(self) -> Tensor:
        """[1] bool: whether the policy's max_active ruled: too few tokens for a capacity."""
        return self.budget.narrowed

    @lazy
    def loads_before(self) -> Tensor:
        """[pools, units] int64 assignments of the model's own choice."""
        return self._loads(self.genuine.ids, self.genuine.offered)

    @lazy
    def loads_after(self) -> Tensor:
        """[pools, units] int64 assignments that remain, extras included."""
        return self._loads(self.bounded_ids, self._selected)

    @lazy
    def expert_loads_before(self) -> Tensor:
        """[experts] int64 assignments of the model's own choice, over all pools."""
        return count_experts(self.genuine.ids, self.genuine.offered, self.num_experts)

    @lazy
    def expert_loads_after(self) -> Tensor:
        """[experts] int64 assignments that remain, over all pools, extras included."""
        return count_experts(self.bounded_ids, None, self.num_experts)

    @property
    def dropped(self) -> Tensor:
        """0-d int64: assignments of the model's own choice that were lost."""
        return self.dropped_slots.sum()

    @property
    def dropped_slots(self) -> Tensor:
        """[tokens, k] bool: which assignments of the model's own choice were lost."""
        return self.genuine.offered & ~self._genuine_selected

    @property
    def tokens_without_expert(self) -> Tensor:
        """0-d int64: tokens that lost every assignment, and so get nothing from routed experts."""
        return (self.genuine.offered.any(1) & ~self._selected.any(1)).sum()

    @lazy
    def active_before(self) -> Tensor:
        """[devices] int64 experts of each device that the model's own choice gives any token."""
        return self._active(self.expert_loads_before)

    @lazy
    def active_after(self) -> Tensor:
        """[devices] int64 experts of each device that still get any token, over all pools."""
        return self._active(self.expert_loads_after)

    @property
    def extras(self) -> Tensor:
        """0-d int64: assignments gained by expansion."""
        return self._selected[:, self.budget.k :].sum()

    @property
    def gate_mass(self) -> Tensor:
        """[2] float64: sum of scores (else weights) of the model's choice, and of what is kept."""
        return gate_mass(self.genuine, self._genuine_selected)

    @property
    def gate_mass_kept(self) -> Tensor:
        """0-d float64: share of the gate mass kept, 1 where there is none. Not a quality figure."""
        whole, kept = self.gate_mass
        return torch.where(whole > 0, kept / whole, 1.0)

    @lazy
    def genuine(self) -> Candidates:
        """The model's own choice."""
        return topk_candidates(self.budget.inputs, self.num_experts)

    @lazy
    def _selected(self) -> Tensor:
        return self.bounded_ids < self.num_experts

    @property
    def _genuine_selected(self) -> Tensor:
        return self._selected[:, : self.budget.k]

    def _active(self, expert_loads: Tensor) -> Tensor:
        placement = self.budget.placement
        device = table(placement.expert_to_device, expert_loads)
        active = torch.zeros(placement.num_devices, dtype=torch.int64, device=device.device)
        return active.scatter_add(0, device, (expert_loads > 0).long())

    def _loads(self, ids: Tensor, counted: Tensor) -> Tensor:
        group = unit_groups(self.budget, ids, counted)
        pools, units = self.pools.count, self.budget.units.count
        loads = torch.zeros(pools * units + 1, dtype=torch.int64, device=ids.device)
        loads = loads.scatter_add(0, group.flatten(), torch.ones_like(group).flatten())
        return loads[:-1].view(pools, units)


def gate_mass(chosen: Candidates, kept: Tensor) -> Tensor:
    """[2] float64: sum of scores (else weights) of what was chosen, and of what is kept of it.

    Args:
        chosen: assignments of the model's own choice.
        kept: [tokens, k] bool.
    """
    scores = chosen.scores
    mass = chosen.weights if scores is None else scores
    mass = torch.where(chosen.offered, mass, 0).nan_to_num(nan=0.0).double()
    return torch.stack([mass.sum(), torch.where(kept, mass, 0).sum()])


def unit_groups(budget: Budget, ids: Tensor, counted: Tensor) -> Tensor:
    """[tokens, slots] int64: pool * units + unit of each assignment; pools * units for none."""
    units, pools = budget.units.count, budget.pools
    group = budget.unit_of_expert[torch.where(counted, ids.long(), budget.num_experts)]
    if pools.of_token is not None:
        group = group + pools.of_token.unsqueeze(1) * units
    return torch.where(counted, group, pools.count * units)


def count_experts(ids: Tensor, counted: Tensor | None, num_experts: int) -> Tensor:
    """[experts] int64: assignments of each expert among `counted` [tokens, slots] bool.

    Ids outside [0, num_experts) are no assignments.
    """
    ids = ids.long()
    in_range = (ids >= 0) & (ids < num_experts)
    bins = torch.where(in_range if counted is None else in_range & counted, ids, num_experts)
    loads = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return loads.scatter_add(0, bins.flatten(), torch.ones_like(bins).flatten())[:-1]
