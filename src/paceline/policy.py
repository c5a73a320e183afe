"""What the user wants: a validated, frozen capacity policy, and its text forms.

A policy says how much load a unit (a device or an expert) may get and which assignments survive
when it would get more. It holds no tensors and no model knowledge; `paceline.routing.route`
turns it into an assignment. See docs/method.md for what each field means.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from paceline.keeps import KEEP_ALIASES, KEEPS, registered_keeps
from paceline.text import shortened

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Unit = Literal["device", "expert"]
Pool = Literal["batch", "source", "request"]
Phase = Literal["all", "prefill"]
Mode = Literal["enforce", "shadow", "observe"]
Expand = Literal["own_device", "visited_devices", "all"]
ExpandRule = Literal["fill", "compete"]
Modality = Literal["text", "image", "audio", "video"]

AUTO_MIN_EXPERT_LOAD = {"cuda": 64.0, "cpu": 8.0}
"""Mean tokens an expert below which weights dominate and a cap saves no time, by device type."""


class PolicyError(ValueError):
    """A policy that can't be: one sentence naming the field, its value and what is allowed."""


class CapacityPolicy(BaseModel):
    """How much load a unit may get, and what survives a cap.

    Capacity of a unit hosting n experts in a pool of T valid tokens:
    `ceil(capacity_factor * T * k * n / num_experts)`, with the factor taken as the decimal
    that was written (He et al., arXiv 2503.05066, section 4; exactness and units are ours).

    Attributes:
        capacity_factor: load allowed relative to the mean, > 0; None or inf: no cap. Alias `gamma`.
        unit: what is capped: a "device" (all its experts together) or each "expert".
        pool: tokens that share one budget: "batch", "source" (per source device) or "request".
        keep: which assignments survive: "score", "weight", "first", "last", "random", or a name
            given to `paceline.register_keep`.
        min_expert_load: no cap while experts get fewer tokens than this on average;
            "auto" takes 64 on CUDA and 8 on CPU, 0 always caps.
        phase: "all", or "prefill": leave decode tokens alone.
        mode: "enforce", "shadow" (count only what would be dropped) or "observe" (loads only).
        renormalize: give a token's survivors the sum its weights had before.
        compensate: add what the stand-in of a dropped expert gives, with the weight that the model
            gave it; needs a calibration of the model. It changes no load and no survivor; with
            `renormalize` survivors' larger weights come on top.
        expand: experts a token may use beyond its top-k: those on its "own_device", on
            "visited_devices" or "all" (the last two for study); None: none.
        expand_limit: at most so many further experts a token.
        expand_rule: "fill" free places only, or "compete" with genuine choices (for study).
        max_experts: at most so many experts a token, at least k; None: no limit.
        fill_to: extras fill a unit up to this factor of the mean, never above capacity_factor.
        drop_first: modalities whose tokens are dropped before others.
        protect_first: the first so many tokens of every sequence are dropped last.
        seed: of keep="random".

    Raises:
        PolicyError: naming the field, the value and what is allowed.

    Examples:
        >>> CapacityPolicy(capacity_factor=1.25, unit="expert").caps
        True
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    capacity_factor: float | None = Field(default=None)
    unit: Unit = "device"
    pool: Pool = "batch"
    keep: str = "score"
    min_expert_load: float | Literal["auto"] = "auto"
    phase: Phase = "all"
    mode: Mode = "enforce"
    renormalize: bool = False
    compensate: bool = False
    expand: Expand | None = None
    expand_limit: int | None = None
    expand_rule: ExpandRule = "fill"
    max_experts: int | None = None
    fill_to: float = 1.0
    drop_first: tuple[Modality, ...] = ()
    protect_first: int = 0
    seed: int = 0

    def __init__(self, **fields: Any) -> None:
        if "gamma" in fields:
            if "capacity_factor" in fields:
                raise PolicyError(
                    f"gamma={fields['gamma']!r} and capacity_factor={fields['capacity_factor']!r} "
                    "are the same field: give one of them."
                )
            fields["capacity_factor"] = fields.pop("gamma")
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise PolicyError(_one_sentence(error)) from None

    # -- validation ---------------------------------------------------------------------------

    @field_validator("capacity_factor", mode="before")
    @classmethod
    def _factor_allowed(cls, value: Any) -> float | None:
        number = None if value is None else _number(value)
        if number is not None and not number > 0:
            raise ValueError("a number > 0, or None or inf for no cap")
        return None if number == math.inf else number

    @field_validator("fill_to", mode="before")
    @classmethod
    def _fill_allowed(cls, value: Any) -> float:
        number = _number(value)
        if not 0 <= number < math.inf:
            raise ValueError("a finite number >= 0")
        return number

    @field_validator("min_expert_load", mode="before")
    @classmethod
    def _load_allowed(cls, value: Any) -> float | str:
        if isinstance(value, str) and value == "auto":
            return "auto"
        number = _number(value)
        if not 0 <= number < math.inf:
            raise ValueError('a finite number of tokens >= 0, or "auto"')
        return number

    @field_validator("keep", mode="before")
    @classmethod
    def _keep_allowed(cls, value: Any) -> Any:
        value = KEEP_ALIASES.get(value, value) if isinstance(value, str) else value
        allowed = (*KEEPS, *registered_keeps())
        if not isinstance(value, str) or value not in allowed:
            aliases = ", ".join(KEEP_ALIASES)
            raise ValueError(f"one of {', '.join(allowed)} (or an alias: {aliases})")
        return value

    @field_validator("expand_limit", "max_experts", mode="after")
    @classmethod
    def _positive(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError("a whole number >= 1, or None for no limit")
        return value

    @field_validator("protect_first", mode="after")
    @classmethod
    def _not_negative(cls, value: int) -> int:
        if value < 0:
            raise ValueError("a whole number >= 0")
        return value

    @field_validator("drop_first", mode="before")
    @classmethod
    def _modalities(cls, value: Any) -> Any:
        if value is None:
            return ()
        return tuple(part for part in value.split("+") if part) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> CapacityPolicy:
        for field in ("expand_limit", "max_experts"):
            if getattr(self, field) is not None and self.expand is None:
                raise PolicyError(
                    f"{field}={getattr(self, field)} needs expand to be one of "
                    f"{', '.join(get_args(Expand))}."
                )
        if self.expand is not None and self.keep not in KEEPS:
            raise PolicyError(
                f"keep={self.keep!r} with expand={self.expand!r}: a registered metric knows only "
                f"the top-k, so expand needs keep to be one of {', '.join(KEEPS)}."
            )
        for name in ("factor", "fill_factor", "json_form"):
            getattr(self, name)  # derived once, here, not where a compiler looks on
        return self

    # -- derived ------------------------------------------------------------------------------

    @cached_property
    def factor(self) -> Fraction | None:
        """The exact capacity factor, None for no cap."""
        return None if self.capacity_factor is None else Fraction(str(self.capacity_factor))

    @cached_property
    def fill_factor(self) -> Fraction:
        """The exact factor up to which extras fill a unit, never above the capacity factor."""
        fill = Fraction(str(self.fill_to))
        return fill if self.factor is None else min(fill, self.factor)

    @property
    def caps(self) -> bool:
        """Whether the policy can drop anything, or count what would be dropped."""
        return self.capacity_factor is not None and self.mode != "observe"

    def replace(self, **changes: Any) -> CapacityPolicy:
        """The same policy with some fields changed, validated like a new one.

        What was never set stays unset: an engine may choose for a field that nobody named.

        Examples:
            >>> CapacityPolicy(capacity_factor=1.25).replace(unit="expert").capacity_factor
            1.25
        """
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        if "gamma" in changes:
            fields.pop("capacity_factor", None)
        return CapacityPolicy(**{**fields, **changes})

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> CapacityPolicy:
        """Pydantic's name for `replace`: a copy is checked, and derives its own exact factors."""
        return self.replace(**(update or {}))

    def resolved_min_expert_load(self, device_type: str) -> float:
        """Mean tokens an expert below which nothing is capped on `device_type` ("cuda", "cpu").

        Examples:
            >>> CapacityPolicy(capacity_factor=1.25).resolved_min_expert_load("cuda")
            64.0
        """
        if self.min_expert_load == "auto":
            return AUTO_MIN_EXPERT_LOAD.get(device_type, AUTO_MIN_EXPERT_LOAD["cuda"])
        return self.min_expert_load

    # -- text forms ---------------------------------------------------------------------------

    def changed_fields(self) -> dict[str, Any]:
        """The fields that differ from their defaults, in order; lists instead of tuples.

        Examples:
            >>> CapacityPolicy(capacity_factor=1.25, keep="score").changed_fields()
            {'capacity_factor': 1.25}
        """
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name in type(self).model_fields
            if (value := getattr(self, name)) != type(self).model_fields[name].default
        }

    def __str__(self) -> str:
        """Short form, "capacity_factor=1.25,unit=expert"; `parse` reads it back."""
        fields = self.changed_fields()
        return ",".join(
            f"{name}={'+'.join(value) if isinstance(value, list) else str(value).lower()}"
            if not isinstance(value, str)
            else f"{name}={value}"
            for name, value in fields.items()
        )

    @classmethod
    def parse(cls, text: str) -> CapacityPolicy:
        """Read the short form, for example "capacity_factor=1.25,unit=device,drop_first=image".

        Raises:
            PolicyError: on an unknown field, a missing "=" or a bad value.

        Examples:
            >>> CapacityPolicy.parse("capacity_factor=1.25,drop_first=image+video").drop_first
            ('image', 'video')
        """
        _require_text(text)
        fields: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or not value:
                raise PolicyError(
                    f"policy {text!r}: {part!r} is not of the form name=value, "
                    'as in "capacity_factor=1.25,unit=device".'
                )
            if name in fields:
                raise PolicyError(f"policy {text!r}: {name} is given twice.")
            fields[name] = None if value.lower() == "none" else value
        return cls(**fields)

    def to_json(self) -> str:
        """All fields as a JSON object; `from_json` reads it back.

        Examples:
            >>> CapacityPolicy(capacity_factor=1.25).to_json()[:40]
            '{"capacity_factor":1.25,"unit":"device",'
        """
        return self.json_form

    @cached_property
    def json_form(self) -> str:
        """`to_json`'s text, at hand where a compiler looks on."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> CapacityPolicy:
        """Read `to_json`'s form. Raises PolicyError on bad JSON or a bad field.

        Examples:
            >>> CapacityPolicy.from_json('{"capacity_factor": 1.25}').capacity_factor
            1.25
        """
        _require_text(text)
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise PolicyError(f"policy is not JSON: {error}.") from None
        return cls._from_mapping(fields)

    def to_toml(self) -> str:
        """The fields that differ from their defaults as a TOML table; `from_toml` reads it back.

        Examples:
            >>> CapacityPolicy(capacity_factor=1.25).to_toml()
            'capacity_factor = 1.25\\n'
        """
        return tomli_w.dumps(self.changed_fields())

    @classmethod
    def from_toml(cls, text: str) -> CapacityPolicy:
        """Read `to_toml`'s form. Raises PolicyError on bad TOML or a bad field.

        A float keeps the decimal that the file spells.

        Examples:
            >>> CapacityPolicy.from_toml("capacity_factor = 1.25").capacity_factor
            1.25
        """
        _require_text(text)
        try:
            fields = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PolicyError(f"policy is not TOML: {error}.") from None
        return cls._from_mapping(fields)

    @classmethod
    def _from_mapping(cls, fields: Any) -> CapacityPolicy:
        if not isinstance(fields, dict):
            raise PolicyError(f"policy {fields!r} is not a table of fields.")
        return cls(**fields)


def _require_text(text: Any) -> None:
    if not isinstance(text, str):
        raise PolicyError(f"policy is a {type(text).__name__}: allowed is a text.")


def _number(value: Any) -> float:
    """The decimal the user wrote as a float: numpy's float32(1.1) is 1.1, and so is "1.1".

    NaN stands for anything that is no number, and fails every range check.
    """
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value) if isinstance(value, Fraction) else float(str(value).strip())
    except (ValueError, OverflowError):
        return math.nan


def _one_sentence(error: ValidationError) -> str:
    """The first thing wrong, as "field=value: allowed is ..."."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, PolicyError):
        return str(cause)
    field = str(first["loc"][0]) if first["loc"] else "policy"
    if first["type"] == "extra_forbidden":
        known = ", ".join(CapacityPolicy.model_fields)
        return f"{field} is not a field of CapacityPolicy: allowed are {known} and gamma."
    allowed = str(cause) if cause is not None else first["msg"].removeprefix("Input should be ")
    # an array's repr is of several lines
    shown = shortened(" ".join(repr(first["input"]).split()))
    return f"{field}={shown} is not allowed: {field} is {allowed}."
