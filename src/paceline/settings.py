"""Readers of policies and placements that users pass to engines, one for all layers or one each."""

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
    """Return a policy from itself, its short form, or None, which only counts loads.

    Raises:
        ValueError: if it is anything else, or not valid.

    >>> read_policy("capacity_factor=1.25").capacity_factor
    1.25
    """
    if policy is None:
        return CapacityPolicy(mode="observe")
    if isinstance(policy, str):
        return CapacityPolicy.parse(policy)
    if not isinstance(policy, CapacityPolicy):
        raise ValueError(
            "policy must be a CapacityPolicy, its short form, or a sequence with one per layer, "
            f"got {type(policy).__name__}."
        )
    return policy


def read_policies(policy: Any, layers: int) -> tuple[CapacityPolicy, ...]:
    """Return one policy per layer.

    Raises:
        ValueError: if it is neither a policy nor a sequence with one per layer.

    >>> len(read_policies("capacity_factor=1.25", layers=3))
    3
    """
    if isinstance(policy, (list, tuple)):
        if len(policy) != layers:
            raise ValueError(
                f"policy must be one policy, or one for each of the {layers} MoE layers, got "
                f"{len(policy)} entries."
            )
        return tuple(map(read_policy, policy))
    return (read_policy(policy),) * layers


def read_placement(placement: Any, num_experts: int, layer: str = "") -> ExpertPlacement | None:
    """Return the placement of one layer; None: every expert is a device of its own.

    Args:
        placement: itself, a number of devices that share the experts in order, the device of
            each expert, or None.
        layer: its name, for messages.

    Raises:
        ValueError: if it is anything else, or has another number of experts.

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
            "placement must be an ExpertPlacement, a number of devices, a list with the device of "
            f"each expert, or a sequence with one per layer, got {shortened(repr(placement))}."
        )
    if placement.num_experts != num_experts:
        raise ValueError(
            f"placement must be of the {num_experts} experts of layer {layer}, or a number of "
            f"devices, got one of {placement.num_experts} experts."
        )
    return placement


def placement_for(placement: Any, layer: int, layers: int) -> Any:
    """Return the part of a user's placement that is for one layer, for `read_placement`.

    A list of whole numbers is one placement for all layers, the device of each expert; any other
    sequence holds one a layer.

    Raises:
        ValueError: if it is a sequence of another length.

    >>> placement_for([4, None], layer=0, layers=2), placement_for([[0, 1], 2], 1, 2)
    (4, 2)
    """
    if not isinstance(placement, (list, tuple)) or _whole_numbers(placement):
        # [4, 4] is two experts on device 4, not a number of devices for each of two layers
        return placement
    if len(placement) != layers:
        raise ValueError(
            f"placement must be one placement, or one for each of the {layers} MoE layers, got "
            f"{len(placement)} entries."
        )
    return placement[layer]


def _whole_numbers(values: Any) -> bool:
    """Return True for a list, a tuple or a flat array of whole numbers."""
    if isinstance(values, (str, bytes, ExpertPlacement)) or not hasattr(values, "__len__"):
        return False
    try:
        return len(values) > 0 and all(whole_number(value) is not None for value in values)
    except TypeError:
        return False
