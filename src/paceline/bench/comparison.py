"""The sides of a benchmark: policies beside no cap, and where a plan puts the experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.bench.workload import Shape
from paceline.engines.rules import with_default_pool
from paceline.placement import ExpertPlacement
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.settings import read_placement

DEVICES = 8
"""Emulated devices of a whole model, where no plan names a number."""

Compared = CapacityPolicy | Sequence[CapacityPolicy] | None
"""A policy of a benchmark: one for all layers, one per layer, or None for no cap."""


def parse_policies(
    texts: Sequence[str], shares_batch: bool, any_load: bool = True, planned: Compared = None
) -> dict[str, Any]:
    """Return label -> policy, or one per layer; "none", no cap, always comes first, "plan" last.

    Where devices have a batch each and no pool is named, it is "source".

    Args:
        texts: short forms of policies.
        shares_batch: True if all devices hold the same tokens.
        any_load: cap however small a batch is, unless min_expert_load is named.
        planned: of a plan, compared under the label "plan".

    Raises:
        ValueError: on a bad policy, or one that can't be in this layout.
    """
    policies: dict[str, Any] = {"none": None}
    for text in texts:
        if text != "none":
            policies[text] = _compared(CapacityPolicy.parse(text), text, shares_batch, any_load)
    if planned is not None:
        layers = [planned] if isinstance(planned, CapacityPolicy) else list(planned)
        # layers that a plan doesn't cap are intended, unless no layer is capped
        caps = [policy for policy in layers if policy.caps] or layers
        checked = {policy: _compared(policy, "plan", shares_batch, any_load) for policy in caps}
        each = [checked.get(policy, policy) for policy in layers]
        policies["plan"] = each[0] if len(each) == 1 else each
    return policies


def _compared(
    policy: CapacityPolicy, text: str, shares_batch: bool, any_load: bool
) -> CapacityPolicy:
    """Check that a benchmark can time a policy, and fill in what it leaves open."""
    if policy.compensate:
        raise ValueError(f"policy {text!r}: compensate must be off: stand-ins are not timed.")
    if policy.keep == "contribution":
        raise ValueError(f"policy {text!r}: keep=contribution needs a calibration, none is here.")
    if not policy.caps or policy.mode != "enforce":
        raise ValueError(f'policy {text!r} caps nothing: use "none" for the layer without a cap.')
    if any_load and policy.min_expert_load == "auto" and policy.max_active is None:
        policy = policy.replace(min_expert_load=0)
    policy = with_default_pool(policy, own_batches=not shares_batch)
    if shares_batch and (policy.pool == "source" or policy.expand == "own_device"):
        raise ValueError(
            f"policy {text!r} needs tokens that are on a device: with a shared batch they are on "
            'all; allowed is pool="batch" without expand="own_device".'
        )
    return policy


def policy_of(plan: Plan, layer: int) -> CapacityPolicy | None:
    """Return the policy of one layer, None where the plan names none.

    Raises:
        ValueError: if the plan has no such layer.

    >>> policy_of(Plan(), layer=3) is None
    True
    """
    _check_layer(plan.policies, layer)
    return plan.policy_of(layer)


def placement_of(plan: Plan, layer: int, shape: Shape, ranks: int | None) -> ExpertPlacement:
    """Return the plan's placement of a layer; else in order, over ranks or the shape's devices.

    Raises:
        ValueError: if the plan doesn't fit the layer or the ranks.
    """
    plan.refuse_replicas()
    for name in ("experts", "k"):
        planned, found = getattr(plan, name), getattr(shape, name)
        if planned not in (None, found):
            raise ValueError(f"the plan is for {name}={planned}: the layer has {found}.")
    _check_layer(plan.placements, layer)
    return _read(plan.placement_of(layer) or ranks or shape.devices, shape.experts, ranks, layer)


def placements_of(plan: Plan, experts: Sequence[int], ranks: int | None) -> list[ExpertPlacement]:
    """Return the plan's placement of every layer of a model, [layers]; else in order.

    Args:
        plan: for all layers, or for each.
        ranks: of torchrun, None for emulated devices.

    Raises:
        ValueError: if the plan doesn't fit the layers or the ranks.
    """
    plan.refuse_replicas()
    if len(plan.placements) not in (0, 1, len(experts)):
        raise ValueError(
            f"the plan places {len(plan.placements)} layers: the model has {len(experts)}."
        )
    return [
        _read(plan.placement_of(layer) or ranks or DEVICES, count, ranks, layer)
        for layer, count in enumerate(experts)
    ]


def _check_layer(values: Sequence[Any], layer: int) -> None:
    if len(values) > 1 and layer >= len(values):
        raise ValueError(f"layer must be below {len(values)}: the plan has {len(values)} layers.")


def _read(place: Any, experts: int, ranks: int | None, layer: int) -> ExpertPlacement:
    placement = read_placement(place, experts, str(layer)) or ExpertPlacement.per_expert(experts)
    if ranks not in (None, placement.num_devices):
        raise ValueError(
            f"the plan must have as many devices as ranks, {ranks}, got {placement.num_devices}."
        )
    return placement
