"""Routing as a pure function: the model's choice in, an assignment within the limits out."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing.active import most_active
from paceline.routing.assignment import Assignment, Candidates, Survivors, topk_candidates
from paceline.routing.backends import Backend, backend_for
from paceline.routing.expansion import best_extras, trim
from paceline.routing.inputs import RoutingInputs
from paceline.routing.limits import Budget


def route(
    inputs: RoutingInputs, policy: CapacityPolicy, placement: ExpertPlacement | None = None
) -> Assignment:
    """Limit the load of every unit as `policy` requires (He et al., arXiv 2503.05066).

    Pure and deterministic; any device, no host sync on accelerators, output shapes that depend on
    input shapes and the policy alone. Under torch.compile it is one operator.

    Args:
        inputs: the model's choice for every token of one layer.
        policy: what to limit and what to keep.
        placement: which device hosts which expert; None: every expert is a device of its own.

    Returns:
        The assignment, [tokens, slots], with slots = k unless the policy expands.

    Raises:
        ValueError: if the policy needs an input that is missing, or its cap can never bind.

    Examples:
        >>> inputs = RoutingInputs(torch.tensor([[0], [0], [1]]), torch.ones(3, 1), num_experts=2)
        >>> policy = CapacityPolicy(gamma=0.6, keep="first", min_expert_load=0)
        >>> route(inputs, policy).topk_ids.tolist()
        [[0], [2], [1]]
    """
    _check_type("inputs", inputs, RoutingInputs)
    _check_type("policy", policy, CapacityPolicy)
    if placement is None:
        placement = _one_expert_per_device(inputs.experts())
    _check_type("placement", placement, ExpertPlacement)
    if not torch.compiler.is_compiling():  # it can't trace fractions
        check_binding(policy, placement, inputs.topk_ids.shape[1])
    return assign(inputs, policy, placement)


def assign(inputs: RoutingInputs, policy: CapacityPolicy, placement: ExpertPlacement) -> Assignment:
    """Route without the checks of `route`: for engines, which check a policy when it is set."""
    num_experts = inputs.experts(placement)
    budget = Budget(inputs, policy, placement)
    bounded = capacity = applies = None
    if policy.caps:
        if torch.compiler.is_compiling():
            bounded, capacity, applies = _survivors_in_graph(budget)
        else:
            bounded = survivors(budget)
    if bounded is not None and policy.mode == "enforce":
        shown = bounded
    else:
        chosen = topk_candidates(inputs, num_experts)
        shown = Survivors.of(chosen, chosen.offered)
    assignment = Assignment(
        topk_ids=shown.ids,
        topk_weights=shown.weights,
        kept=shown.kept,
        num_experts=num_experts,
        budget=budget,
        bounded_ids=(bounded or shown).ids,
    )
    if capacity is not None and applies is not None:
        assignment.capacity, assignment.max_active_applies = capacity, applies
    return assignment


def check_binding(policy: CapacityPolicy, placement: ExpertPlacement, k: int) -> None:
    """Refuse a policy that makes no sense for this placement or number of experts per token.

    Raises:
        ValueError: for a device cap on one device that allows its whole load, max_experts < k, or
            a max_active that no device's experts exceed.
    """
    if not policy.caps:
        return
    largest = max(placement.sizes)
    if policy.max_active is not None and most_active(policy.max_active, largest) == largest:
        raise ValueError(
            f"max_active must allow fewer experts than a device hosts, here {largest} of "
            f"{placement.num_experts} at most, got {policy.max_active}: it can never bind"
        )
    factor = policy.capacity_factor
    if policy.unit == "device" and placement.num_devices == 1 and (factor or 0) >= 1:
        raise ValueError(
            f'capacity_factor must be < 1 with unit="device" on 1 device, got {factor}: it can '
            'never bind; use more devices or unit="expert"'
        )
    if policy.max_experts is not None and policy.max_experts < k:
        raise ValueError(f"max_experts must be at least k = {k}, got {policy.max_experts}")


def _check_type(name: str, value: object, expected: type) -> None:
    if not isinstance(value, expected):
        raise ValueError(f"{name} must be of type {expected.__name__}, got {type(value).__name__}")


@lru_cache(maxsize=64)
def _one_expert_per_device(num_experts: int) -> ExpertPlacement:
    return ExpertPlacement.per_expert(num_experts)


# -- the caps --------------------------------------------------------------------------------------


def survivors(budget: Budget) -> Survivors:
    """Return the assignments that the policy's caps keep, of which at most one applies."""
    policy, backend, inputs = budget.policy, backend_for(budget.inputs), budget.inputs
    if policy.expand is None or policy.factor is None:
        candidates = topk_candidates(inputs, budget.num_experts)
    else:
        candidates = backend.expanded(budget)
    left = None if policy.max_active is None else backend.limit_active(budget, candidates)
    if policy.factor is None:
        left = left or Survivors.of(candidates, candidates.offered)
    elif left is None:
        left = _within_capacity(budget, backend, candidates)
    elif not backend.on_host:
        # which of the two caps applies is known on the device only: the other one changes nothing
        active = Candidates(inputs, budget.num_experts, left.ids, candidates.weights)
        left = _within_capacity(budget, backend, active)
    if policy.renormalize:
        left = left._replace(weights=_renormalized(left, candidates))
    return left


def _within_capacity(budget: Budget, backend: Backend, candidates: Candidates) -> Survivors:
    """Apply capacity_factor: Token Drop, or Expanded Drop where the policy expands."""
    policy = budget.policy
    if policy.expand is None:
        return backend.keep_best(budget, candidates)
    if policy.expand_rule == "compete":
        left = backend.keep_best(budget, candidates)
        if policy.max_experts is None:
            return left
        return Survivors.of(candidates, trim(candidates, left.kept, policy.max_experts))
    if policy.max_experts is not None:
        # extras can't change which genuine ones stay: a token knows how many extras it may have
        genuine = backend.keep_best(budget, candidates.genuine).kept
        candidates = best_extras(candidates, policy.max_experts - genuine.sum(1))
    return backend.keep_best(budget, candidates, fill=True)


def _renormalized(left: Survivors, candidates: Candidates) -> Tensor:
    """Scale the weights of tokens that lost something to their former sum: [tokens, slots]."""
    genuine = candidates.genuine
    lost = (genuine.offered & ~left.kept[:, : genuine.k]).any(1)
    former = torch.where(genuine.offered, genuine.weights, 0).double().sum(1)
    now = left.weights.double().sum(1)
    usable = lost & (now > 0) & now.isfinite() & former.isfinite()
    # no division by zero even where the result is not used: its gradient would be NaN
    scale = former / torch.where(usable, now, 1)
    scaled = (left.weights.double() * scale.unsqueeze(1)).to(left.weights.dtype)
    return torch.where(usable.unsqueeze(1), scaled, left.weights)


# -- under torch.compile ---------------------------------------------------------------------------


def _survivors_in_graph(budget: Budget) -> tuple[Survivors, Tensor, Tensor]:
    """Compute survivors, capacities and `max_active_applies` as a single node of a graph.

    Opaque to the compiler: no graph break, and no recompilation as T changes. Capacities need
    fractions, which a compiler can't trace where it takes integers as unknown (dynamic=True).
    """
    inputs, placement = budget.inputs, budget.placement
    step = inputs.step
    if not isinstance(step, Tensor):
        step = torch.full((), step, dtype=torch.int64, device=budget.device)
    *left, capacity, applies = _cap(
        inputs.topk_ids, inputs.topk_weights, inputs.scores, inputs.topk_scores, inputs.valid,
        inputs.token_source, inputs.token_request, inputs.token_priority, inputs.token_decode,
        inputs.expert_norms, step, inputs.layer, budget.policy.json_form,
        list(placement.expert_to_device), placement.num_devices, budget.slots,
    )  # fmt: skip
    return Survivors(*left), capacity, applies


@torch.library.custom_op("paceline::cap", mutates_args=())
def _cap(
    topk_ids: Tensor,
    topk_weights: Tensor,
    scores: Tensor | None,
    topk_scores: Tensor | None,
    valid: Tensor | None,
    token_source: Tensor | None,
    token_request: Tensor | None,
    token_priority: Tensor | None,
    token_decode: Tensor | None,
    expert_norms: Tensor | None,
    step: Tensor,
    layer: int,
    policy: str,
    expert_to_device: list[int],
    num_devices: int,
    slots: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = RoutingInputs(
        topk_ids, topk_weights, scores, topk_scores, valid, token_source, token_request,
        token_priority, token_decode, expert_norms, layer=layer, step=step,
    )  # fmt: skip
    placement = ExpertPlacement(tuple(expert_to_device), num_devices)
    budget = Budget(inputs, _policy(policy), placement)
    left = survivors(budget)
    capacity = budget.capacity(budget.policy.factor)
    return left.ids, left.weights, left.kept, capacity, budget.max_active_applies


@_cap.register_fake
def _(topk_ids: Tensor, topk_weights: Tensor, *others: Any) -> tuple[Tensor, ...]:
    rows, (text, expert_to_device, devices, slots) = topk_ids.shape[0], others[-4:]
    policy = _policy(text)
    pools = {"batch": 1, "source": devices, "request": rows}[policy.pool]
    units = devices if policy.unit == "device" else len(expert_to_device)
    return (
        topk_ids.new_empty((rows, slots), dtype=torch.int64),
        topk_weights.new_empty((rows, slots)),
        topk_ids.new_empty((rows, slots), dtype=torch.bool),
        topk_ids.new_empty((pools, units), dtype=torch.int64),
        topk_ids.new_empty((1,), dtype=torch.bool),
    )


@lru_cache(maxsize=64)
def _policy(text: str) -> CapacityPolicy:
    return CapacityPolicy.from_json(text)
