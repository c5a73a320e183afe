"""Capacity policies: validated and frozen.

A policy sets how much load a unit (a device or an expert) may get and which assignments survive
when it would get more. It holds no tensors and no model knowledge; `paceline.routing.route`
turns it into an assignment. docs/method.md explains each field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from paceline.numbers import is_flag, whole_number
from paceline.policy_text import PolicyError, TextForms
from paceline.text import shortened

Unit = Literal["device", "expert"]
Pool = Literal["batch", "source", "request"]
Phase = Literal["all", "prefill"]
Mode = Literal["enforce", "shadow", "observe"]
Expand = Literal["own_device", "visited_devices", "all"]
ExpandRule = Literal["fill", "compete"]
Modality = Literal["text", "image", "audio", "video"]

KEEPS = ("score", "weight", "contribution", "first", "last", "random")
"""Built-in values of `keep`: the names say what is kept."""

KEEP_ALIASES = {  # the paper names the order in which tokens arrive, or what is dropped
    "order": "first",
    "reverse": "last",
    "reverse_order": "last",
}

REGISTERED: dict[str, Callable[..., Any]] = {}
"""Name -> function, as passed to `paceline.register_keep`."""

AUTO_MIN_EXPERT_LOAD = {"cuda": 64.0, "cpu": 8.0}
"""Mean tokens per expert below which reading weights dominates and a cap saves no time."""


class CapacityPolicy(TextForms):
    """The load that a unit may get, and the assignments that survive a cap.

    Capacity of a unit hosting n experts in a pool of T valid tokens:
    `ceil(capacity_factor * T * k * n / num_experts)`, with the factor taken as the decimal
    that was written (He et al., arXiv 2503.05066, section 4; exactness and units are ours).

    Attributes:
        capacity_factor: load allowed relative to the mean, > 0; None or inf: no cap. Alias `gamma`.
        unit: what is capped: a "device" (all its experts together) or each "expert".
        pool: tokens that share one budget: "batch", "source" (per source device) or "request".
        keep: which assignments survive: "score", "weight", "contribution" (the weight times the
            norm of what dropping leaves out: the expert's mean, or with compensate the value
            expected at the token, from a calibration), "first", "last", "random", or a name
            passed to `paceline.register_keep`.
        min_expert_load: no cap while experts get fewer tokens than this on average;
            "auto" takes 64 on CUDA and 8 on CPU, 0 always caps.
        max_active: maximum number of experts per device that get any token, those with the largest
            sum of weights, in a forward below min_expert_load, where reading weights dominates; a
            whole number >= 1, or a share of the experts that a device hosts (0 < x < 1, rounded
            up).
        phase: "all", or "prefill": leave decode tokens alone.
        mode: "enforce", "shadow" (count only what would be dropped) or "observe" (loads only).
        renormalize: scale the weights of a token's survivors to the sum of all its weights before.
        compensate: add the output of a dropped expert's stand-in, with the weight that the model
            gave the expert; needs a calibration of the model. It changes no load and no survivor,
            and excludes `renormalize`, which gives survivors that weight already.
        expand: experts that a token may use beyond its top-k: those on its "own_device", on
            "visited_devices" or "all" (the last two for study); None: none.
        expand_limit: maximum number of further experts per token.
        expand_rule: "fill" free places only, or "compete" with genuine choices (for study).
        max_experts: maximum number of experts per token, at least k; None: no limit.
        fill_to: extras fill a unit up to this factor of the mean, never above capacity_factor.
        drop_first: modalities whose tokens are dropped before others.
        protect_first: number of first tokens of every sequence that are dropped last.
        seed: of keep="random".

    Raises:
        PolicyError: naming the field, what it must be, and the value.

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
    max_active: int | float | None = None
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
                    "gamma and capacity_factor are the same field and must not both be set, got "
                    f"gamma={fields['gamma']!r} and capacity_factor={fields['capacity_factor']!r}"
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
            raise ValueError("a number > 0, inf or None")
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
            raise ValueError('a finite number >= 0 or "auto"')
        return number

    @field_validator("max_active", mode="before")
    @classmethod
    def _active_allowed(cls, value: Any) -> int | float | None:
        if value is None:
            return None
        text = value.strip() if isinstance(value, str) else ""
        count = int(text) if text.isdecimal() and len(text) < 20 else whole_number(value)
        if count is not None and count >= 1:
            return count
        share = math.nan if count is not None else _number(value)
        if not 0 < share < 1:
            raise ValueError(
                "a whole number of experts >= 1, a share of a device's experts > 0 and < 1, or None"
            )
        return share

    @field_validator("keep", mode="before")
    @classmethod
    def _keep_allowed(cls, value: Any) -> Any:
        value = KEEP_ALIASES.get(value, value) if isinstance(value, str) else value
        registered = registered_keeps()
        allowed = (*KEEPS, *registered)
        if not isinstance(value, str) or value not in allowed:
            aliases = ", ".join(KEEP_ALIASES)
            own = f"registered: {shortened(', '.join(registered))}; " if registered else ""
            raise ValueError(f"one of {', '.join(KEEPS)} ({own}aliases: {aliases})")
        return value

    @field_validator("expand_limit", "max_experts", "protect_first", "seed", mode="before")
    @classmethod
    def _no_flag(cls, value: Any) -> Any:
        if is_flag(value):
            raise ValueError("a whole number")
        return value

    @field_validator("expand_limit", "max_experts", mode="after")
    @classmethod
    def _positive(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError("a whole number >= 1 or None")
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
                    f"expand must be one of {', '.join(get_args(Expand))} with "
                    f"{field}={getattr(self, field)}, got None"
                )
        if self.compensate and self.renormalize:
            raise PolicyError(
                "renormalize must be False with compensate=True, got True: dropped weight would "
                "count twice, in stand-ins and in survivors"
            )
        if self.expand is not None and self.keep not in KEEPS:
            raise PolicyError(
                f"keep must be one of {', '.join(KEEPS)} with expand={self.expand!r}, got "
                f"{self.keep!r}: a registered metric knows only the top-k"
            )
        if self.max_active is not None:
            self._check_max_active(self.max_active)
        for name in ("factor", "fill_factor", "json_form"):
            getattr(self, name)  # derived here, once, not inside a compiled graph
        return self

    def _check_max_active(self, most: float) -> None:
        """Refuse fields that contradict max_active, which serves batches that decode."""
        if self.pool == "request":
            raise PolicyError(
                f'pool must be "batch" or "source" with max_active={most}, got "request": a device '
                "reads an expert for all requests of a batch"
            )
        if self.phase == "prefill":
            raise PolicyError(
                f'phase must be "all" with max_active={most}, got "prefill": max_active caps what '
                "decode reads"
            )
        if self.min_expert_load == 0:
            raise PolicyError(
                f"min_expert_load must be > 0 with max_active={most}, got 0: max_active applies "
                "below it"
            )

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
        """True if the policy can drop anything, or count what would be dropped."""
        some = self.capacity_factor is not None or self.max_active is not None
        return some and self.mode != "observe"

    def replace(self, **changes: Any) -> CapacityPolicy:
        """Return the same policy with some fields changed, validated like a new one.

        Fields never set stay unset: an engine may choose their values.

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
        """Copy as `replace` does: checked, and with exact factors of its own."""
        return self.replace(**(update or {}))

    def resolved_min_expert_load(self, device_type: str) -> float:
        """Return `min_expert_load` on a device type ("cuda", "cpu"), a number where it is "auto".

        Examples:
            >>> CapacityPolicy(capacity_factor=1.25).resolved_min_expert_load("cuda")
            64.0
        """
        if self.min_expert_load == "auto":
            return AUTO_MIN_EXPERT_LOAD.get(device_type, AUTO_MIN_EXPERT_LOAD["cuda"])
        return self.min_expert_load


def registered_keeps() -> tuple[str, ...]:
    """Return the names passed to `paceline.register_keep`, sorted."""
    return tuple(sorted(REGISTERED))


def _number(value: Any) -> float:
    """Read the decimal that the user wrote as a float: numpy's float32(1.1) is 1.1, like "1.1".

    NaN for anything that is no number: it fails every range check.
    """
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value) if isinstance(value, Fraction) else float(str(value).strip())
    except (ValueError, OverflowError):
        return math.nan


def _one_sentence(error: ValidationError) -> str:
    """Describe the first error, as "field must be ..., got ..."."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, PolicyError):
        return str(cause)
    field = str(first["loc"][0]) if first["loc"] else "policy"
    if first["type"] == "extra_forbidden":
        known = ", ".join(CapacityPolicy.model_fields)
        return f"field of CapacityPolicy must be one of {known} and gamma, got {field}"
    allowed = str(cause) if cause is not None else first["msg"].removeprefix("Input should be ")
    # an array's repr is of several lines
    shown = shortened(" ".join(repr(first["input"]).split()))
    return f"{field} must be {allowed}, got {shown}"
