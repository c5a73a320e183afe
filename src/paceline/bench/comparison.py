"""What a plan says of the layers of a benchmark: where their experts are, and which policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.bench.workload import Shape
from paceline.placement import ExpertPlacement
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.settings import read_placement

DEVICES = 8
"""Emulated devices of a whole model, where no plan says how many."""


def policy_of(plan: Plan, layer: int) -> CapacityPolicy | None:
    """The policy of one layer, None where the plan names none.

    Raises:
        ValueError: if the plan has no such layer.

    >>> policy_of(Plan(), layer=3) is None
    True
    """
    found: CapacityPolicy | None = _of_layer(plan.policies, layer)
    return found


def placement_of(plan: Plan, layer: int, shape: Shape, ranks: int | None) -> ExpertPlacement:
    """Where a plan puts a layer's experts; else in order, over the ranks or the shape's devices.

    Raises:
        ValueError: if the plan doesn't fit the layer or the ranks.
    """
    plan.refuse_replicas()
    for name in ("experts", "k"):
        planned, found = getattr(plan, name), getattr(shape, name)
        if planned not in (None, found):
            raise ValueError(f"the plan is for {name}={planned}: the layer has {found}.")
    given = _of_layer(plan.placements, layer)
    return _read(given or ranks or shape.devices, shape.experts, ranks, layer)


def placements_of(plan: Plan, experts: Sequence[int], ranks: int | None) -> list[ExpertPlacement]:
    """Where a plan puts the experts of every layer of a model, [layers]; else in order.

    Args:
        plan: for all layers, or for each.
        experts: of each layer.
        ranks: of torchrun, None for emulated devices.

    Raises:
        ValueError: if the plan doesn't fit the layers or the ranks.
    """
    plan.refuse_replicas()
    given = plan.placements or (ranks or DEVICES,)
    if len(given) not in (1, len(experts)):
        raise ValueError(f"the plan places {len(given)} layers: the model has {len(experts)}.")
    return [
        _read(given[index % len(given)], count, ranks, index) for index, count in enumerate(experts)
    ]


def _of_layer(values: Sequence[Any], layer: int) -> Any:
    if len(values) > 1 and layer >= len(values):
        raise ValueError(f"layer {layer} is not allowed: the plan has {len(values)} layers.")
    return None if not values else values[0] if len(values) == 1 else values[layer]


def _read(given: Any, experts: int, ranks: int | None, layer: int) -> ExpertPlacement:
    placement = read_placement(given, experts, str(layer)) or ExpertPlacement.per_expert(experts)
    if ranks not in (None, placement.num_devices):
        raise ValueError(
            f"the plan has {placement.num_devices} devices: allowed are {ranks}, as many as ranks."
        )
    return placement
