"""Routing as a pure function: the model's choice in, a bounded assignment out."""

from __future__ import annotations

from functools import lru_cache

import torch

from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing.active import most_active
from paceline.routing.assignment import Assignment
from paceline.routing.budget import Budget
from paceline.routing.candidates import topk_candidates
from paceline.routing.cap import survivors
from paceline.routing.inputs import RoutingInputs
from paceline.routing.operator import survivors_in_graph
from paceline.routing.survivors import Survivors


def route(
    inputs: RoutingInputs, policy: CapacityPolicy, placement: ExpertPlacement | None = None
) -> Assignment:
    """Bound the load of every unit, as `policy` says (He et al., arXiv 2503.05066).

    Pure and deterministic; any device, no host sync on accelerators, output shapes that depend on
    input shapes and the policy alone. Under torch.compile it is one operator.

    Args:
        inputs: the model's choice for every token of one layer.
        policy: what to bound and what to keep.
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
    if not isinstance(inputs, RoutingInputs):
        raise _wrong("inputs", inputs, RoutingInputs)
    if not isinstance(policy, CapacityPolicy):
        raise _wrong("policy", policy, CapacityPolicy)
    if placement is not None and not isinstance(placement, ExpertPlacement):
        raise _wrong("placement", placement, ExpertPlacement)
    num_experts = inputs.experts(placement)
    if placement is None:
        placement = _alone(num_experts)
    if not torch.compiler.is_compiling():  # it can't trace fractions
        check_binding(policy, placement, inputs.topk_ids.shape[1])
    return assign(inputs, policy, placement)


def assign(inputs: RoutingInputs, policy: CapacityPolicy, placement: ExpertPlacement) -> Assignment:
    """Route without the checks of `route`: for engines, which check a policy when it is set."""
    num_experts = inputs.experts(placement)
    budget = Budget(inputs, policy, placement)
    bounded = capacity = narrowed = None
    if policy.caps:
        if torch.compiler.is_compiling():
            bounded, capacity, narrowed = survivors_in_graph(budget)
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
    if capacity is not None and narrowed is not None:
        assignment.capacity, assignment.narrowed = capacity, narrowed
    return assignment


def check_binding(policy: CapacityPolicy, placement: ExpertPlacement, k: int) -> None:
    """Refuse a policy that this placement, or this many experts a token, makes meaningless.

    Raises:
        ValueError: for a device cap on one device that allows its whole load, max_experts < k, or
            a max_active that no device's experts exceed.
    """
    if not policy.caps:
        return
    largest = max(placement.sizes)
    if policy.max_active is not None and most_active(policy.max_active, largest) == largest:
        raise ValueError(
            f"max_active={policy.max_active} can never bind where a device hosts at most {largest} "
            f"of the {placement.num_experts} experts: allowed is less, or a placement of them on "
            "fewer devices."
        )
    factor = policy.capacity_factor
    if policy.unit == "device" and placement.num_devices == 1 and (factor or 0) >= 1:
        raise ValueError(
            f'capacity_factor={factor} with unit="device" on 1 device can never '
            'bind: allowed is a factor < 1, more devices, or unit="expert".'
        )
    if policy.max_experts is not None and policy.max_experts < k:
        raise ValueError(
            f"max_experts={policy.max_experts} is not allowed: it is at least k, here {k}."
        )


def _wrong(name: str, value: object, allowed: type) -> ValueError:
    return ValueError(f"{name} is a {type(value).__name__}: allowed is a {allowed.__name__}.")


@lru_cache(maxsize=64)
def _alone(num_experts: int) -> ExpertPlacement:
    return ExpertPlacement.per_expert(num_experts)
