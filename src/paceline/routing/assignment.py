"""Assignments of tokens to experts: candidates before a cap, survivors of it, and the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.routing.inputs import RoutingInputs
from paceline.routing.limits import INT64_MAX, Budget
from paceline.routing.pools import TokenPools
from paceline.routing.tensors import Array, lazy, table


class Candidates:
    """Assignments that compete for capacity: slots 0..k-1 chosen by the model, then the extras.

    Attributes:
        inputs: of the layer.
        num_experts: experts of the layer, E.
        ids: [tokens, slots] any integer dtype; outside [0, E): no assignment.
        weights: [tokens, slots] combine weights.
    """

    def __init__(self, inputs: RoutingInputs, num_experts: int, ids: Tensor, weights: Tensor):
        self.inputs, self.num_experts, self.ids, self.weights = inputs, num_experts, ids, weights
        self.k = inputs.topk_ids.shape[1]

    @lazy
    def offered(self) -> Tensor:
        """[tokens, slots] bool: True for an assignment (in range, of a valid token)."""
        in_range = (self.ids >= 0) & (self.ids < self.num_experts)
        valid = self.inputs.valid
        return in_range if valid is None else in_range & valid.unsqueeze(1)

    @lazy
    def safe_ids(self) -> Tensor:
        """[tokens, slots] int64 in [0, E), 0 where nothing is offered."""
        return torch.where(self.offered, self.ids.long(), 0)

    @property
    def scores(self) -> Tensor | None:
        """[tokens, slots] float32 gate scores, None where none are known; gathered anew."""
        if self.inputs.scores is not None:
            return self.inputs.scores.gather(1, self.safe_ids).float()
        return None if self.inputs.topk_scores is None else self.inputs.topk_scores.float()

    @property
    def genuine(self) -> Candidates:
        """The first k slots alone."""
        ids, weights = self.ids[:, : self.k], self.weights[:, : self.k]
        return Candidates(self.inputs, self.num_experts, ids, weights)

    def only(self, offered: Tensor) -> Candidates:
        """Return the candidates in `offered` [tokens, slots] bool; the others are no assignment."""
        ids = torch.where(offered, self.ids.long(), self.num_experts)
        return Candidates(self.inputs, self.num_experts, ids, self.weights)


def topk_candidates(inputs: RoutingInputs, num_experts: int) -> Candidates:
    """Return the model's own choice."""
    return Candidates(inputs, num_experts, inputs.topk_ids, inputs.topk_weights)


class Survivors(NamedTuple):
    """The candidates that a cap keeps.

    Attributes:
        ids: [tokens, slots] int64, num_experts where nothing is kept.
        weights: [tokens, slots], 0 where nothing is kept.
        kept: [tokens, slots] bool.
    """

    ids: Tensor
    weights: Tensor
    kept: Tensor

    @classmethod
    def of(cls, candidates: Candidates, kept: Tensor) -> Survivors:
        """Select the candidates in `kept` [tokens, slots] bool."""
        ids = torch.where(kept, candidates.ids.long(), candidates.num_experts)
        return cls(ids, torch.where(kept, candidates.weights, 0), kept)


@dataclass(eq=False)
class Assignment:
    """The assignments that experts have to compute.

    The counts below are properties, computed on the device when asked for. Under mode="shadow"
    the tensors are the model's own choice and the counts say what "enforce" would have done.

    Attributes:
        topk_ids: [tokens, slots] int64; a dropped or unused slot is `num_experts`, the sentinel.
        topk_weights: [tokens, slots] in the dtype of the input weights, 0 where nothing is kept.
        kept: [tokens, slots] bool.
        num_experts: experts of the layer, E.
        budget: limits of the call.
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
        """[pools, units] int64 capacities; the largest int64 without a cap."""
        policy = self.budget.policy
        return self.budget.capacity(policy.factor if policy.caps else None)

    @lazy
    def max_active_applies(self) -> Tensor:
        """[1] bool: True if max_active limited the call, with too few tokens for a capacity."""
        return self.budget.max_active_applies

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
        """0-d int64: assignments of the model's own choice that were dropped."""
        return self.dropped_slots.sum()

    @property
    def dropped_slots(self) -> Tensor:
        """[tokens, k] bool: True where an assignment of the model's own choice was dropped."""
        return self.genuine.offered & ~self._genuine_selected

    @property
    def tokens_without_expert(self) -> Tensor:
        """0-d int64: tokens all of whose assignments were dropped: routed experts add nothing."""
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
    """Sum scores (else weights) over the model's own choice, and over what is kept: [2] float64.

    Args:
        chosen: assignments of the model's own choice.
        kept: [tokens, k] bool.
    """
    scores = chosen.scores
    mass = chosen.weights if scores is None else scores
    mass = torch.where(chosen.offered, mass, 0).nan_to_num(nan=0.0).double()
    return torch.stack([mass.sum(), torch.where(kept, mass, 0).sum()])


def unit_groups(budget: Budget, ids: Tensor, counted: Tensor) -> Tensor:
    """Return [tokens, slots] int64: pool * units + unit per assignment; pools * units for none."""
    units, pools = budget.units.count, budget.pools
    group = budget.unit_of_expert[torch.where(counted, ids.long(), budget.num_experts)]
    if pools.of_token is not None:
        group = group + pools.of_token.unsqueeze(1) * units
    return torch.where(counted, group, pools.count * units)


def count_experts(ids: Tensor, counted: Tensor | None, num_experts: int) -> Tensor:
    """Count the assignments of each expert, [experts] int64, among `counted` [tokens, slots] bool.

    Ids outside [0, num_experts) are no assignments.
    """
    ids = ids.long()
    in_range = (ids >= 0) & (ids < num_experts)
    bins = torch.where(in_range if counted is None else in_range & counted, ids, num_experts)
    loads = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return loads.scatter_add(0, bins.flatten(), torch.ones_like(bins).flatten())[:-1]


class ForwardCounts(NamedTuple):
    """Counts of one forward.

    Attributes:
        before, after: [experts] int64 loads.
        counts: forwards, those capped and those to which max_active applied, tokens, dropped,
            extras, tokens without an expert.
        mass: gate mass, and the part of it that is kept.
    """

    before: Array
    after: Array
    counts: tuple[int, int, int, int, int, int, int]
    mass: tuple[float, float]


def on_host(assignment: Assignment) -> bool:
    """Return True if `count_on_host` handles it: its tensors are plain ones on a CPU."""
    ids = assignment.bounded_ids
    return ids.is_cpu and type(ids) is Tensor and not torch.compiler.is_compiling()


def count_on_host(assignment: Assignment) -> ForwardCounts:
    """Count a routed forward, enforced or in shadow, whose tensors are on the CPU.

    The small torch operators that count on any device take ten times as long as routing there.
    """
    experts, inputs = assignment.num_experts, assignment.budget.inputs
    ids, valid = inputs.topk_ids.numpy(), inputs.valid
    offered = (ids >= 0) & (ids < experts)
    if valid is not None:
        offered &= valid.numpy()[:, None]
    ids = np.where(offered, ids, experts)
    before = np.bincount(ids.ravel(), minlength=experts + 1)[:experts]
    bounded = assignment.bounded_ids.numpy()
    after = np.bincount(bounded.ravel(), minlength=experts + 1)[:experts]
    kept = bounded[:, : ids.shape[1]] < experts
    assignments, survivors = int(before.sum()), int(np.count_nonzero(kept))
    without_expert = 0
    if survivors < assignments:  # else, as what is kept was offered, both are the same
        rows = np.flatnonzero(bounded[:, 0] == experts)  # few: sums along short rows are slow
        lost = offered[rows].any(1) & (bounded[rows] == experts).all(1)
        without_expert = int(np.count_nonzero(lost))
    mass = np.where(offered, _gate_scores(assignment, ids), 0)
    if not np.isfinite(mass.sum()):
        mass = np.nan_to_num(mass, nan=0.0)  # infinities become the largest number, as on a device
    whole = float(mass.sum(dtype=np.float64))
    left = whole
    if survivors < assignments:
        left = float(np.where(kept, mass, 0).sum(dtype=np.float64))
    tokens = assignment.budget.valid_tokens_on_host
    limited, capped = _limited_by(assignment, tokens)
    extras = int(after.sum()) - survivors
    dropped = assignments - survivors
    return ForwardCounts(
        before, after, (1, capped, limited, tokens, dropped, extras, without_expert), (whole, left)
    )


def _gate_scores(assignment: Assignment, ids: Array) -> Array:
    """Return [tokens, k] scores, else weights, of the model's own choice; any for no assignment."""
    inputs = assignment.budget.inputs
    if inputs.scores is not None:
        safe = np.minimum(ids, assignment.num_experts - 1).astype(np.int64, copy=False)
        known = inputs.scores.gather(1, torch.from_numpy(safe))
    else:
        known = inputs.topk_weights if inputs.topk_scores is None else inputs.topk_scores
    scores: Array = known.detach().float().numpy()
    return scores


def _limited_by(assignment: Assignment, tokens: int) -> tuple[int, int]:
    """Return 1 or 0: whether max_active, and whether any cap, applied to the forward."""
    budget = assignment.budget
    policy = budget.policy
    few = tokens < budget.tokens_needed
    limited = policy.caps and policy.max_active is not None and few
    plain = policy.pool == "batch" and policy.phase == "all"
    if not policy.caps or policy.capacity_factor is None:
        capped = False
    elif plain and policy.capacity_factor < 1e6:  # else its capacity may saturate
        capped = not few
    else:
        capped = bool((assignment.capacity != INT64_MAX).any())
    return int(limited), int(limited or capped)
