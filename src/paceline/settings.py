"""What a user gives an engine, read: policies and placements, one for all layers or one a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from paceline.numbers import whole_number
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.text import shortened

PolicyLike: TypeAlias = "CapacityPolicy | str | None"
PoliciesLike: TypeAlias = "PolicyLike | Sequence[PolicyLike]"
PlacementLike: TypeAlias = "ExpertPlacement | int | Sequence[int] | None"
PlacementsLike: TypeAlias = "PlacementLike | Sequence[PlacementLike]"


def read_policy(policy: Any) -> CapacityPolicy:
    """A policy from itself, its short form, or None, which only counts loads.

    Raises:
        ValueError: if it is anything else, or no policy.

    >>> read_policy("capacity_factor=1.25").capacity_factor
    1.25
    """
    if policy is None:
        return CapacityPolicy(mode="observe")
    if isinstance(policy, str):
        return CapacityPolicy.parse(policy)
    if not isinstance(policy, CapacityPolicy):
        raise ValueError(
            f"policy is a {type(policy).__name__}: allowed is a CapacityPolicy, its short form, "
            "or a sequence with one a layer."
        )
    return policy


def read_policies(policy: Any, layers: int) -> tuple[CapacityPolicy, ...]:
    """The policy of each of so many layers.

    Raises:
        ValueError: if it is no policy, and no sequence with one a layer.

    >>> len(read_policies("capacity_factor=1.25", layers=3))
    3
    """
    if isinstance(policy, (list, tuple)):
        if len(policy) != layers:
            raise ValueError(
                f"policy has {len(policy)} entries: allowed is one policy, or one for each of "
                f"the {layers} MoE layers."
            )
        return tuple(map(read_policy, policy))
    return (read_policy(policy),) * layers


def read_placement(placement: Any, num_experts: int, layer: str = "") -> ExpertPlacement | None:
    """The placement of a layer with so many experts; None: every expert is a device of its own.

    Args:
        placement: itself, a number of devices over which experts are spread in order, the device
            of each expert, or None.
        num_experts: of the layer.
        layer: its name, for messages.

    Raises:
        ValueError: if it is anything else, or doesn't fit the layer.

    >>> read_placement([0, 0, 1, 1], num_experts=4).sizes
    (2, 2)
    """
    if placement is None:
        return None
    count = whole_number(placement)
    if count is not None:
        return ExpertPlacement.contiguous(num_experts, count)
    if _whole_numbers(placement):
        placement = ExpertPlacement.explicit(list(placement))
    if not isinstance(placement, ExpertPlacement):
        raise ValueError(
            f"placement={shortened(repr(placement))} is not allowed: it is an ExpertPlacement, a "
            "number of devices, a list with the device of each expert, or a sequence with one a "
            "layer."
        )
    if placement.num_experts != num_experts:
        raise ValueError(
            f"placement has {placement.num_experts} experts, layer {layer} has {num_experts}: "
            "allowed is the same number, or a number of devices."
        )
    return placement


def placement_for(placement: Any, layer: int, layers: int) -> Any:
    """What a user gave for one of so many layers, to be read by `read_placement`.

    A list of whole numbers is one placement for all layers, the device of each expert; any other
    sequence holds one a layer.

    Raises:
        ValueError: if it is a sequence of another length.

    >>> placement_for([4, None], layer=0, layers=2), placement_for([[0, 1], 2], 1, 2)
    (4, 2)
    """
    if not isinstance(placement, (list, tuple)) or _whole_numbers(placement):
        # [4, 4] is two experts on device 4: a number of devices a layer needs None or placements
        return placement
    if len(placement) != layers:
        raise ValueError(
            f"placement has {len(placement)} entries: allowed is one placement, or one for each "
            f"of the {layers} MoE layers."
        )
    return placement[layer]


def _whole_numbers(values: Any) -> bool:
    """Whether it is a list, a tuple or a flat array of whole numbers."""
    if isinstance(values, (str, bytes, ExpertPlacement)) or not hasattr(values, "__len__"):
        return False
    try:
        return len(values) > 0 and all(whole_number(value) is not None for value in values)
    except TypeError:
        return False
