"""The fields of a plan: checked as they are given, and as TOML has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.numbers import whole_number
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.text import shortened

VERSION = 1
"""Of the file format."""

MODEL_FIELDS = ("layers", "experts", "k")
_FIELDS = (
    "version", "calibration", "model", "policy", "policies", "placement", "placements", "slots",
)  # fmt: skip


class PlanError(ValueError):
    """A plan that can't be read or doesn't fit a model: one sentence naming file and field."""


def put(out: dict[str, Any], one: str, several: str, values: list[dict[str, Any]]) -> None:
    if values:
        out |= {one: values[0]} if len(values) == 1 else {several: values}


def placement_fields(placement: ExpertPlacement | int) -> dict[str, Any]:
    if isinstance(placement, int):
        return {"num_devices": placement}
    return {
        "num_devices": placement.num_devices,
        "expert_to_device": list(placement.expert_to_device),
    }


def count(name: str, value: Any) -> int:
    count = whole_number(value)
    if count is None or count < 1:
        raise PlanError(f"{name}={shortened(value)} is not allowed: it is a whole number >= 1.")
    return count


def given_policy(index: int, policy: Any) -> CapacityPolicy:
    if not isinstance(policy, CapacityPolicy):
        raise PlanError(
            f"plan: policies[{index}] is a {type(policy).__name__}: allowed is a CapacityPolicy."
        )
    return policy


def given_placement(index: int, placement: Any) -> ExpertPlacement | int:
    if isinstance(placement, ExpertPlacement):
        return placement
    return count(f"placements[{index}]", placement)


def given_slots(
    rows: Any, placements: tuple[ExpertPlacement | int, ...]
) -> tuple[tuple[int, ...], ...]:
    """The expert of every slot, row by row, if the devices are a number alone."""
    if not isinstance(rows, (list, tuple)) or not all(isinstance(r, (list, tuple)) for r in rows):
        raise PlanError("plan: slots is not allowed: it is a list of experts for each layer.")
    if not rows:
        return ()
    if len(placements) != 1 or not isinstance(placements[0], int):
        raise PlanError(
            "plan: slots lie on the devices in order: allowed beside them is one placement with "
            "num_devices alone."
        )
    for index, row in enumerate(rows):
        if any(type(expert) is not int for expert in row) or set(row) != set(range(len(set(row)))):
            raise PlanError(
                f"plan: slots[{index}]={shortened(row)} is not allowed: it names each of the "
                "experts 0, 1, ... at least once."
            )
    counts = {(len(row), len(set(row))) for row in rows}
    if len(counts) != 1 or not placements[0] <= len(rows[0]):
        raise PlanError(
            f"plan: {len(rows[0])} slots on {placements[0]} devices are not allowed: every layer "
            "has as many slots and experts, and every device has a slot."
        )
    return tuple(tuple(row) for row in rows)


def read(fields: Mapping[str, Any]) -> dict[str, Any]:
    unknown = [name for name in fields if name not in _FIELDS]
    if unknown:
        name = shortened(unknown[0])
        raise PlanError(f"{name} is not a field of a plan: allowed are {', '.join(_FIELDS)}.")
    if whole_number(fields.get("version")) != VERSION:
        raise PlanError(
            f"version={shortened(fields.get('version'))} is not allowed: it is {VERSION}."
        )
    model = fields.get("model", {})
    if not isinstance(model, dict) or not set(model) <= set(MODEL_FIELDS):
        raise PlanError(
            f"model={shortened(model)} is not allowed: its fields are layers, experts and k."
        )
    return {
        **model,
        "calibration": fields.get("calibration"),
        "slots": fields.get("slots", ()),
        "policies": tuple(map(_policy, _tables(fields, "policy", "policies"))),
        "placements": tuple(map(_placement, _tables(fields, "placement", "placements"))),
    }


def _tables(fields: Mapping[str, Any], one: str, several: str) -> list[dict[str, Any]]:
    """The tables under either name, one for all layers or one a layer."""
    if one in fields and several in fields:
        raise PlanError(f"{one} and {several} are both given: allowed is one of them.")
    tables = [fields[one]] if one in fields else fields.get(several, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise PlanError(f"{several} is not an array of tables, as in [[{several}]].")
    return tables


def _policy(fields: dict[str, Any]) -> CapacityPolicy:
    return CapacityPolicy(**fields)


def _placement(fields: dict[str, Any]) -> ExpertPlacement | int:
    devices: int | None = fields.get("num_devices")
    experts = fields.get("expert_to_device")
    unknown = set(fields) - {"num_devices", "expert_to_device"}
    if unknown or (devices is None and experts is None):
        raise PlanError(
            f"placement {shortened(sorted(fields))} is not allowed: its fields are num_devices and "
            "expert_to_device."
        )
    if devices is not None:
        devices = count("num_devices", devices)
    if experts is None and devices is not None:
        return devices
    if not isinstance(experts, list) or any(
        not isinstance(device, int) or isinstance(device, bool) for device in experts
    ):
        raise PlanError("expert_to_device is not allowed: it is one device for each expert.")
    return ExpertPlacement.explicit(experts, devices)
