"""One file for everything that is decided about a model: policies, placements and calibration."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w

from paceline.files import MOST_SETTINGS, read_plain, whole_file
from paceline.placement import ExpertPlacement
from paceline.plan_fields import (
    MODEL_FIELDS,
    VERSION,
    PlanError,
    count,
    given_placement,
    given_policy,
    given_slots,
    placement_fields,
    put,
    read,
)
from paceline.policy import CapacityPolicy
from paceline.text import shortened

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Plan:
    """What is decided about the MoE layers of a model.

    Attributes:
        policies: one for all layers, or one a layer; empty: none is named.
        placements: likewise; a whole number is that many devices over which experts are spread in
            order.
        layers: MoE layers of the model that the plan was made for; None: any.
        experts: experts of each of its layers; None: any.
        k: experts a token; None: any.
        slots: expert of every slot of a layer, one row for all layers or one a layer, for engines
            that replicate experts; the slots lie on the devices in order, and are what such an
            engine routes to. Empty: every expert has one place.
        calibration: folder of the calibration, relative to the plan's file.
        folder: of the plan's file, None where it has none.

    Raises:
        PlanError: if a field is not what it should be, or there is neither one policy (or
            placement) nor one a layer.

    Examples:
        >>> Plan((CapacityPolicy(capacity_factor=1.25),), (8,)).policy_of(3).capacity_factor
        1.25
    """

    policies: tuple[CapacityPolicy, ...] = ()
    placements: tuple[ExpertPlacement | int, ...] = ()
    layers: int | None = None
    experts: int | None = None
    k: int | None = None
    slots: tuple[tuple[int, ...], ...] = ()
    calibration: str | None = None
    folder: Path | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in MODEL_FIELDS:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, count(f"model.{name}", getattr(self, name)))
        if not isinstance(self.calibration, str | None):
            raise PlanError(
                f"plan: calibration={shortened(self.calibration)} is not allowed: it is the name "
                "of a folder."
            )
        for name in ("policies", "placements"):
            values: Any = getattr(self, name)
            if not isinstance(values, (list, tuple)):
                raise PlanError(
                    f"plan: {name} is a {type(values).__name__}: allowed is a tuple with one for "
                    "all layers, or one a layer."
                )
            given = given_policy if name == "policies" else given_placement
            object.__setattr__(self, name, tuple(map(given, range(len(values)), values)))
        object.__setattr__(self, "slots", given_slots(self.slots, self.placements))
        several = {
            name: len(values)
            for name in ("policies", "placements", "slots")
            if len(values := getattr(self, name)) > 1
        }
        if self.slots and self.experts not in (None, len(set(self.slots[0]))):
            raise PlanError(
                f"plan: slots of {len(set(self.slots[0]))} experts are not allowed: "
                f"model.experts says {self.experts}."
            )
        if self.layers is not None:
            several["layers"] = self.layers
        if len(set(several.values())) > 1:
            said = ", ".join(f"{count} {name}" for name, count in several.items())
            raise PlanError(f"plan: {said}: allowed is one for all layers, or one a layer.")
        for index, placement in enumerate(self.placements):
            if isinstance(placement, int):
                continue
            if self.experts not in (None, placement.num_experts):
                raise PlanError(
                    f"plan: placements[{index}] has {placement.num_experts} experts: allowed is "
                    f"{self.experts}, as model.experts says."
                )

    def policy_of(self, layer: int) -> CapacityPolicy | None:
        """The policy of a layer, None where the plan names none.

        Examples:
            >>> Plan().policy_of(0) is None
            True
        """
        policy: CapacityPolicy | None = _of_layer(self.policies, layer)
        return policy

    def placement_of(self, layer: int) -> ExpertPlacement | int | None:
        """The placement of a layer (or a number of devices), None where the plan names none.

        Examples:
            >>> Plan(placements=(2,)).placement_of(0)
            2
        """
        placement: ExpertPlacement | int | None = _of_layer(self.placements, layer)
        return placement

    def calibration_folder(self) -> Path | None:
        """Where the calibration is, None where the plan names none.

        Examples:
            >>> Plan(calibration="found", folder=Path("plans")).calibration_folder()
            PosixPath('plans/found')
        """
        return None if self.calibration is None else (self.folder or Path()) / self.calibration

    def refuse_replicas(self) -> None:
        """Refuse a plan with slots, where every expert has one place.

        Raises:
            PlanError: if it has.

        >>> Plan(placements=(8,)).refuse_replicas()
        """
        if self.slots:
            raise PlanError(
                f"the plan has {len(self.slots[0])} slots for {len(set(self.slots[0]))} experts: "
                "here each expert has one place; it is for an engine that replicates experts and "
                "reads a map (paceline place --maps)."
            )

    def check_layers(self, count: int, replicates: bool = False) -> None:
        """Refuse a model with another number of MoE layers than the plan is for.

        Args:
            count: of the model's MoE layers.
            replicates: whether the experts may have several slots each.

        Raises:
            PlanError: naming both, or that the plan replicates experts.

        Examples:
            >>> Plan(layers=2).check_layers(2)
        """
        if not replicates:
            self.refuse_replicas()
        several = [n for n in (len(self.policies), len(self.placements), len(self.slots)) if n > 1]
        wanted = self.layers or next(iter(several), count)
        if wanted != count:
            raise PlanError(f"the plan is for {wanted} MoE layers, the model has {count}.")

    def check_model(
        self, experts: Sequence[int], k: Sequence[int], replicates: bool = False
    ) -> None:
        """Refuse a model that the plan wasn't made for.

        Args:
            experts: of each MoE layer of the model.
            k: experts a token, of each.
            replicates: whether the experts may have several slots each.

        Raises:
            PlanError: naming what differs.

        Examples:
            >>> Plan(layers=2).check_model([8, 8], [2, 2])
        """
        self.check_layers(len(experts), replicates)
        planned = len(set(self.slots[0])) if self.slots else self.experts
        for index, (found, chosen) in enumerate(zip(experts, k, strict=True)):
            if planned not in (None, found):
                raise PlanError(
                    f"the plan is for {planned} experts a layer, layer {index} has {found}."
                )
            if self.k not in (None, chosen):
                raise PlanError(
                    f"the plan is for {self.k} experts a token, layer {index} uses {chosen}."
                )
            placement = self.placement_of(index)
            if isinstance(placement, ExpertPlacement) and placement.num_experts != found:
                raise PlanError(
                    f"the plan places {placement.num_experts} experts in layer {index}, which has "
                    f"{found}."
                )

    # -- as a file ------------------------------------------------------------------------------

    def to_toml(self) -> str:
        """The plan as TOML; `from_toml` reads it back.

        Examples:
            >>> Plan(placements=(8,)).to_toml().splitlines()[0]
            'version = 1'
        """
        out: dict[str, Any] = {"version": VERSION}
        if self.calibration is not None:
            out["calibration"] = self.calibration
        known = {n: v for n in MODEL_FIELDS if (v := getattr(self, n)) is not None}
        if known:
            out["model"] = known
        put(out, "policy", "policies", [p.changed_fields() for p in self.policies])
        if self.slots:
            out["slots"] = [list(row) for row in self.slots]
        put(out, "placement", "placements", [placement_fields(p) for p in self.placements])
        return tomli_w.dumps(out)

    @classmethod
    def from_toml(cls, text: str, name: str = "plan") -> Plan:
        """Read `to_toml`'s form.

        Args:
            text: of the file.
            name: of the file, for messages.

        Raises:
            PlanError: naming the file, the field, its value and what is allowed.

        Examples:
            >>> Plan.from_toml("version = 1").policies
            ()
        """
        try:
            fields = tomllib.loads(text)
        except ValueError as error:  # a number of too many digits is no TOMLDecodeError
            raise PlanError(f"{name} is not TOML: {shortened(str(error), 160)}.") from None
        except RecursionError:
            raise PlanError(f"{name} is not allowed: it nests too deeply.") from None
        try:
            return cls(**read(fields))
        except ValueError as error:
            raise PlanError(f"{name}: {str(error).removeprefix('plan: ')}") from None

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
        return replace(cls.from_toml(text, str(path)), folder=Path(path).parent)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all.

        Raises:
            OSError: if the folder can't be written.
        """
        with whole_file(Path(path)) as file:
            file.write_text(self.to_toml(), encoding="utf-8")


def _of_layer(values: Sequence[Any], layer: int) -> Any:
    return None if not values else values[0] if len(values) == 1 else values[layer]
