"""Routing as one operator for torch.compile: no graph break, no recompilation as T changes.

It is opaque to the compiler; inside runs the usual backend."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing.budget import Budget
from paceline.routing.cap import survivors
from paceline.routing.inputs import RoutingInputs
from paceline.routing.survivors import Survivors


def survivors_in_graph(budget: Budget) -> Survivors:
    """`paceline.routing.cap.survivors` as a single node of a graph."""
    inputs, placement = budget.inputs, budget.placement
    step = inputs.step
    if not isinstance(step, Tensor):
        step = torch.full((), step, dtype=torch.int64, device=budget.device)
    return Survivors(
        *_cap(
            inputs.topk_ids,
            inputs.topk_weights,
            inputs.scores,
            inputs.topk_scores,
            inputs.valid,
            inputs.token_source,
            inputs.token_request,
            inputs.token_priority,
            inputs.token_decode,
            step,
            inputs.layer,
            budget.policy.json_form,
            list(placement.expert_to_device),
            placement.num_devices,
            budget.slots,
        )
    )


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
    step: Tensor,
    layer: int,
    policy: str,
    expert_to_device: list[int],
    num_devices: int,
    slots: int,
) -> tuple[Tensor, Tensor, Tensor]:
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
        layer=layer,
        step=step,
    )
    placement = ExpertPlacement(tuple(expert_to_device), num_devices)
    left = survivors(Budget(inputs, _policy(policy), placement))
    return left.ids, left.weights, left.kept


@_cap.register_fake
def _(topk_ids: Tensor, topk_weights: Tensor, *others: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = (topk_ids.shape[0], others[-1])
    return (
        topk_ids.new_empty(shape, dtype=torch.int64),
        topk_weights.new_empty(shape),
        topk_ids.new_empty(shape, dtype=torch.bool),
    )


@lru_cache(maxsize=64)
def _policy(text: str) -> CapacityPolicy:
    return CapacityPolicy.from_json(text)
