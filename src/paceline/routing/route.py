"""Routing as a pure function: the model's choice in, a bounded assignment out."""

from __future__ import annotations

from functools import lru_cache

import torch

from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
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
    """
    num_experts = inputs.experts(placement)
    if placement is None:
        placement = _alone(num_experts)
    budget = Budget(inputs, policy, placement)
    check_binding(policy, placement, budget.k)
    bounded = None
    if policy.caps:
        compiling = torch.compiler.is_compiling()
        bounded = survivors_in_graph(budget) if compiling else survivors(budget)
    if bounded is not None and policy.mode == "enforce":
        shown = bounded
    else:
        chosen = topk_candidates(inputs, num_experts)
        shown = Survivors.of(chosen, chosen.offered)
    return Assignment(
        topk_ids=shown.ids,
        topk_weights=shown.weights,
        kept=shown.kept,
        num_experts=num_experts,
        budget=budget,
        bounded_ids=(bounded or shown).ids,
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


@lru_cache(maxsize=64)
def _alone(num_experts: int) -> ExpertPlacement:
    return ExpertPlacement.per_expert(num_experts)
