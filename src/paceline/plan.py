"""All decisions about a model in one file: policies, placements and calibration."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)

from paceline.files import MOST_SETTINGS, atomic_file, read_plain
from paceline.numbers import whole_number
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.policy_text import PolicyError
from paceline.text import shortened

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VERSION = 1
"""Version of the file format."""

_MODEL_FIELDS = ("layers", "experts", "k")
_FILE_FIELDS = (
    "version", "calibration", "model", "policy", "policies", "placement", "placements", "slots",
)  # fmt: skip
_SEVERAL = {"policy": "policies", "placement": "placements"}
_COUNT = "a whole number >= 1"
_ALLOWED = {
    "policies": "a list of policies, one for all layers or one per layer",
    "policies[]": "a capacity policy",
    "placements": "a list of placements, one for all layers or one per layer",
    "placements[]": "a placement or a number of devices >= 1",
    "slots": "a list of rows, one for all layers or one per layer",
    "slots[]": "a row of experts as whole numbers",
    "calibration": "the name of a folder",
    "folder": "a path",
    **dict.fromkeys(_MODEL_FIELDS, _COUNT),
}


class PlanError(ValueError):
    """A plan that can't be read or doesn't fit a model: one sentence naming file and field."""


def _count(value: Any) -> int:
    count = whole_number(value)
    if count is None or count < 1:
        raise ValueError(f"must be {_COUNT}")
    return count


def _placement(value: Any) -> ExpertPlacement | int:
    """Check a placement: itself, a number of devices, or its table in a file."""
    if isinstance(value, ExpertPlacement):
        return value
    if not isinstance(value, dict):
        return _count(value)
    devices, experts = value.get("num_devices"), value.get("expert_to_device")
    if set(value) - {"num_devices", "expert_to_device"} or (devices is None and experts is None):
        raise PlanError(
            f"placement must have the fields num_devices and expert_to_device, or one of them, "
            f"got {shortened(sorted(value))}."
        )
    count = None if devices is None else whole_number(devices) or 0
    if count is not None and count < 1:
        raise PlanError(f"num_devices must be {_COUNT}, got {shortened(devices)}.")
    if experts is None and count is not None:
        return count
    if not isinstance(experts, list) or any(type(device) is not int for device in experts):
        raise PlanError(
            f"expert_to_device must be a list of one device per expert, got {shortened(experts)}."
        )
    try:
        return ExpertPlacement.explicit(experts, count)
    except ValueError as error:
        raise PlanError(str(error)) from None


Count = Annotated[int, BeforeValidator(_count)]


class Plan(BaseModel):
    """Decisions about the MoE layers of a model.

    Attributes:
        policies: one for all layers, or one per layer; empty: the plan names none.
        placements: likewise; a whole number is that many devices over which experts are spread in
            order.
        layers: MoE layers of the model that the plan was made for; None: any.
        experts: experts per layer; None: any.
        k: experts per token; None: any.
        slots: expert of every slot of a layer, one row for all layers or one per layer, for engines
            that replicate experts; slots are on the devices in order. Empty: one place per expert.
        calibration: folder of the calibration, relative to the plan's file.
        folder: of the plan's file, None where it has none; plans that differ in it alone are equal.

    Raises:
        PlanError: naming the field, its value and what it must be.

    >>> Plan((CapacityPolicy(capacity_factor=1.25),), (8,)).policy_of(3).capacity_factor
    1.25
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policies: tuple[CapacityPolicy, ...] = ()
    placements: tuple[Annotated[ExpertPlacement | int, PlainValidator(_placement)], ...] = ()
    layers: Count | None = None
    experts: Count | None = None
    k: Count | None = None
    slots: tuple[tuple[StrictInt, ...], ...] = ()
    calibration: str | None = None
    folder: Path | None = None

    def __init__(self, policies: Any = (), placements: Any = (), **fields: Any) -> None:
        try:
            super().__init__(policies=policies, placements=placements, **fields)
        except ValidationError as error:
            raise PlanError(_sentence(error)) from None

    @field_validator("policies", "placements", "slots", mode="before")
    @classmethod
    def _listed(cls, values: Any) -> Any:
        if not isinstance(values, (list, tuple)):
            raise ValueError("must be a list")
        return values

    def __eq__(self, other: object) -> bool:
        names = [name for name in Plan.model_fields if name != "folder"]
        return isinstance(other, Plan) and all(getattr(self, n) == getattr(other, n) for n in names)

    def __hash__(self) -> int:
        return hash((self.policies, self.placements))

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        numbers = {name: len(getattr(self, name)) for name in ("policies", "placements", "slots")}
        several = {name: count for name, count in numbers.items() if count > 1}
        if self.layers is not None:
            several["layers"] = self.layers
        if len(set(several.values())) > 1:
            listed = ", ".join(f"{count} {name}" for name, count in several.items())
            raise PlanError(f"a plan must have one for all layers or one per layer, got {listed}.")
        for index, placement in enumerate(self.placements):
            found = None if isinstance(placement, int) else placement.num_experts
            if self.experts is not None and found not in (None, self.experts):
                raise PlanError(
                    f"placements[{index}] must have {self.experts} experts, as in model.experts, "
                    f"got {found}."
                )
        if self.slots:
            self._check_slots()
        return self

    def _check_slots(self) -> None:
        if len(self.placements) != 1 or not isinstance(self.placements[0], int):
            raise PlanError(
                "slots are on the devices in order: beside them must be one placement with "
                "num_devices alone."
            )
        for index, row in enumerate(self.slots):
            if set(row) != set(range(len(set(row)))):
                raise PlanError(
                    f"slots[{index}] must name each of the experts 0, 1, ... at least once, got "
                    f"{shortened(list(row))}."
                )
        experts, devices = len(set(self.slots[0])), self.placements[0]
        sizes = {(len(row), len(set(row))) for row in self.slots}
        if len(sizes) != 1 or devices > len(self.slots[0]):
            raise PlanError(
                "every layer must have the same number of slots and of experts, and every device "
                f"a slot, got {len(self.slots[0])} slots on {devices} devices."
            )
        if self.experts not in (None, experts):
            raise PlanError(
                f"slots must name {self.experts} experts, as in model.experts, got {experts}."
            )

    def replace(self, **changes: Any) -> Plan:
        """Return the plan with some fields changed, checked like a new one.

        >>> Plan(placements=(8,)).replace(layers=2).layers
        2
        """
        return Plan(**{**dict(self), **changes})

    def policy_of(self, layer: int) -> CapacityPolicy | None:
        """Return the policy of a layer, None where the plan names none.

        >>> Plan().policy_of(0) is None
        True
        """
        return self.policies[layer if len(self.policies) > 1 else 0] if self.policies else None

    def placement_of(self, layer: int) -> ExpertPlacement | int | None:
        """Return the placement of a layer (or a number of devices), None where there is none.

        >>> Plan(placements=(2,)).placement_of(0)
        2
        """
        places = self.placements
        return places[layer if len(places) > 1 else 0] if places else None

    def calibration_folder(self) -> Path | None:
        """Return the folder of the calibration, None where the plan names none.

        >>> Plan(calibration="found", folder=Path("plans")).calibration_folder()
        PosixPath('plans/found')
        """
        return None if self.calibration is None else (self.folder or Path()) / self.calibration

    def refuse_replicas(self) -> None:
        """Refuse a plan with slots, for callers that keep every expert in one place.

        Raises:
            PlanError: if the plan has slots.

        >>> Plan(placements=(8,)).refuse_replicas()
        """
        if self.slots:
            raise PlanError(
                f"the plan has {len(self.slots[0])} slots for {len(set(self.slots[0]))} experts: "
                "here each expert has one place; it is for an engine that replicates experts and "
                "reads a map (paceline plan --maps)."
            )

    def check_layers(self, count: int, replicates: bool = False) -> None:
        """Refuse a model with another number of MoE layers than the plan is for.

        Raises:
            PlanError: naming both; or, unless `replicates`, that an expert has several slots.

        >>> Plan(layers=2).check_layers(2)
        """
        if not replicates:
            self.refuse_replicas()
        several = [n for n in (len(self.policies), len(self.placements), len(self.slots)) if n > 1]
        planned = self.layers or next(iter(several), count)
        if planned != count:
            raise PlanError(f"the plan is for {planned} MoE layers, the model has {count}.")

    def check_model(
        self, experts: Sequence[int], k: Sequence[int], replicates: bool = False
    ) -> None:
        """Refuse a model that the plan wasn't made for.

        Args:
            experts: of each MoE layer of the model.
            k: experts per token, of each layer.
            replicates: True if experts may have several slots each.

        Raises:
            PlanError: naming the difference.

        >>> Plan(layers=2).check_model([8, 8], [2, 2])
        """
        self.check_layers(len(experts), replicates)
        planned = len(set(self.slots[0])) if self.slots else self.experts
        for index, (found, chosen) in enumerate(zip(experts, k, strict=True)):
            if planned not in (None, found):
                raise PlanError(
                    f"the plan is for {planned} experts per layer, layer {index} has {found}."
                )
            if self.k not in (None, chosen):
                raise PlanError(
                    f"the plan is for {self.k} experts per token, layer {index} uses {chosen}."
                )
            places = self.placement_of(index)
            placed = places.num_experts if isinstance(places, ExpertPlacement) else found
            if placed != found:
                raise PlanError(
                    f"the plan places {placed} experts in layer {index}, which has {found}."
                )

    def to_toml(self) -> str:
        """Return the plan as TOML; `from_toml` reads it back.

        >>> Plan(placements=(8,)).to_toml().splitlines()[0]
        'version = 1'
        """
        out: dict[str, Any] = {"version": VERSION}
        if self.calibration is not None:
            out["calibration"] = self.calibration
        known = {name: v for name in _MODEL_FIELDS if (v := getattr(self, name)) is not None}
        if known:
            out["model"] = known
        if self.slots:
            out["slots"] = [list(row) for row in self.slots]
        placements = [
            {"num_devices": p}
            if isinstance(p, int)
            else {"num_devices": p.num_devices, "expert_to_device": list(p.expert_to_device)}
            for p in self.placements
        ]
        policies = [policy.changed_fields() for policy in self.policies]
        for (one, several), tables in zip(_SEVERAL.items(), (policies, placements), strict=True):
            if tables:
                out |= {one: tables[0]} if len(tables) == 1 else {several: tables}
        return tomli_w.dumps(out)

    @classmethod
    def from_toml(cls, text: str, name: str = "plan") -> Plan:
        """Read `to_toml`'s form; `name` is the file's, for messages.

        Raises:
            PlanError: naming the file, the field, its value and what it must be.

        >>> Plan.from_toml("version = 1").policies
        ()
        """
        try:
            fields = tomllib.loads(text)
        except ValueError as error:  # a number of too many digits is no TOMLDecodeError
            raise PlanError(f"{name} is not TOML: {shortened(str(error), 160)}.") from None
        except RecursionError:
            raise PlanError(f"{name} is not TOML that can be read: it nests too deeply.") from None
        try:
            return cls(**_fields_of_file(fields))
        except ValueError as error:
            raise PlanError(f"{name}: {error}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a file.

        Raises:
            PlanError: if there is no such file, or it holds no plan.
        """
        try:
            text = read_plain(Path(path), MOST_SETTINGS).decode("utf-8")
        except UnicodeDecodeError:
            raise PlanError(f"{path} is not UTF-8 text.") from None
        except OSError as error:
            raise PlanError(f"{path} can't be read: {error.strerror}.") from None
        except (TypeError, ValueError) as error:  # no path at all, or one with a null byte
            raise PlanError(f"{path!r} can't be read: {shortened(str(error), 200)}.") from None
        return cls.from_toml(text, str(path)).replace(folder=Path(path).parent)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, atomically.

        Raises:
            OSError: if the folder can't be written.
        """
        with atomic_file(Path(path)) as file:
            file.write_text(self.to_toml(), encoding="utf-8")


def _fields_of_file(file: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a plan from those of its file, which has other names for some."""
    unknown = [name for name in file if name not in _FILE_FIELDS]
    if unknown:
        known = ", ".join(_FILE_FIELDS)
        raise PlanError(f"a field of a plan must be one of {known}, got {shortened(unknown[0])}.")
    if whole_number(file.get("version")) != VERSION:
        raise PlanError(f"version must be {VERSION}, got {shortened(file.get('version'))}.")
    model = file.get("model", {})
    if not isinstance(model, dict) or not set(model) <= set(_MODEL_FIELDS):
        raise PlanError(f"model must be a table of layers, experts and k, got {shortened(model)}.")
    fields = {**model, **{name: file[name] for name in ("calibration", "slots") if name in file}}
    for one, several in _SEVERAL.items():
        if one in file and several in file:
            raise PlanError(f"a plan must have {one} or {several}, got both.")
        tables = [file[one]] if one in file else file.get(several, [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            value = shortened(tables)
            raise PlanError(f"{several} must be an array of tables [[{several}]], got {value}.")
        fields[several] = tables
    return fields


def _sentence(error: ValidationError) -> str:
    """Return the first thing wrong as "field must be ..., got ..."."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if not first["loc"] or isinstance(cause, (PlanError, PolicyError)):
        return str(cause)
    field, *inner = first["loc"]
    if first["type"] == "extra_forbidden":
        return f"{field} is not a field of Plan: it must be one of {', '.join(Plan.model_fields)}."
    index = next((part for part in inner if isinstance(part, int)), None)
    place, kind = (field, field) if index is None else (f"{field}[{index}]", f"{field}[]")
    value = shortened(" ".join(repr(first["input"]).split()))  # an array's repr has several lines
    return f"{place} must be {_ALLOWED[str(kind)]}, got {value}."
