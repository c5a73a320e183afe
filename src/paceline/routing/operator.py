"""Routing as one operator for torch.compile: no graph break, no recompilation as T changes.

It is opaque to the compiler; inside runs the usual backend."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing.budget import Budget
from paceline.routing.cap import survivors
from paceline.routing.inputs import RoutingInputs
from paceline.routing.survivors import Survivors


def survivors_in_graph(budget: Budget) -> tuple[Survivors, Tensor, Tensor]:
    """`paceline.routing.cap.survivors`, [pools, units] capacities, and [1] bool whether max_active
    ruled, as a single node of a graph.

    Capacities are worked out with fractions, which a compiler can't follow where it takes whole
    numbers as unknown (dynamic=True).
    """
    inputs, placement = budget.inputs, budget.placement
    step = inputs.step
    if not isinstance(step, Tensor):
        step = torch.full((), step, dtype=torch.int64, device=budget.device)
    *left, capacity, narrowed = _cap(
        inputs.topk_ids,
        inputs.topk_weights,
        inputs.scores,
        inputs.topk_scores,
        inputs.valid,
        inputs.token_source,
        inputs.token_request,
        inputs.token_priority,
        inputs.token_decode,
        inputs.expert_norms,
        step,
        inputs.layer,
        budget.policy.json_form,
        list(placement.expert_to_device),
        placement.num_devices,
        budget.slots,
    )
    return Survivors(*left), capacity, narrowed


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
        topk_ids,
        topk_weights,
        scores,
        topk_scores,
        valid,
        token_source,
        token_request,
        token_priority,
        token_decode,
        expert_norms,
        layer=layer,
        step=step,
    )
    placement = ExpertPlacement(tuple(expert_to_device), num_devices)
    budget = Budget(inputs, _policy(policy), placement)
    left = survivors(budget)
    capacity = budget.capacity(budget.policy.factor)
    return left.ids, left.weights, left.kept, capacity, budget.narrowed


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
