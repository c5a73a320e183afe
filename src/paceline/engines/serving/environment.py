"""Settings from environment variables, which reach every process of a deployment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from paceline.files import MOST_SETTINGS, read_plain
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.text import shortened, signed_percent
from paceline.traces.record import Recording as Content

POLICY, DEVICES, PLAN = "PACELINE_POLICY", "PACELINE_DEVICES", "PACELINE_PLAN"
CALIBRATION = "PACELINE_CALIBRATION"
RECORD, RECORD_CONTENT = "PACELINE_RECORD", "PACELINE_RECORD_CONTENT"
CONTENTS = get_args(Content)
ACCEPT_SHARED_BUDGET = "PACELINE_ACCEPT_SHARED_BUDGET"
FORM, FORMS = "PACELINE_FORM", ("kept_rows", "weight_zero")
"""Variable and values: how the experts of a CPU leave dropped slots out; unset: the first that was
tried with success."""
LADDER = "ladder.json"
"""File of `paceline tune` beside its plan: rungs that a running server can change to."""
OBSERVE = "mode=observe"
"""The policy that counts loads and does nothing else."""
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
"""Variable of prometheus_client: the folder in which processes share their counts."""


@dataclass(frozen=True)
class Settings:
    """Settings of the plugin.

    Attributes:
        policy: for all MoE layers, None if the plan names the policies.
        devices: number of devices that share the experts in order, None if not set.
        plan: policies and placements, one for all layers or one per layer.
        accept_shared_budget: True if requests that share a batch, and its cache, may affect each
            other.
        record: new folder for a trace; if several ranks record, each adds its number.
        record_content: counts, choices or scores.
        calibration: folder of a calibration; takes precedence over that of the plan.
        form: of `FORMS`; weight_zero saves nothing, and is used only if it is asked for.
    """

    policy: CapacityPolicy | None = None
    devices: int | None = None
    plan: Plan | None = None
    accept_shared_budget: bool = False
    record: Path | None = None
    record_content: Content = "counts"
    calibration: Path | None = None
    form: str = FORMS[0]

    @property
    def policies(self) -> tuple[CapacityPolicy, ...]:
        """One policy for all layers, or one per layer; `policy` overrides those of the plan.

        >>> Settings(CapacityPolicy(capacity_factor=1.5)).policies[0].capacity_factor
        1.5
        """
        if self.policy is not None:
            return (self.policy,)
        return self.plan.policies if self.plan is not None else ()

    def rung(self, name: str) -> tuple[tuple[CapacityPolicy, ...], str]:
        """Return the policies of a rung of the ladder beside the plan, and what it cost.

        Raises:
            ValueError: if there is no such ladder or rung.

        """
        folder = None if self.plan is None else self.plan.folder
        path = None if folder is None else folder / LADDER
        if path is None or not path.exists():
            raise ValueError(f"rung must be of a {LADDER} beside the plan, and there is none.")
        rungs = _read_rungs(path)
        if name not in rungs:
            raise ValueError(f"rung must be one of {', '.join(rungs)}, got {shortened(name)}.")
        return rungs[name]

    @property
    def calibration_folder(self) -> Path | None:
        """Folder of the calibration, None if there is none."""
        if self.calibration is None and self.plan is not None:
            return self.plan.calibration_folder()
        return self.calibration


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings | None:
    """Read the plugin's settings; None if the environment asks for nothing.

    Raises:
        ValueError: naming the variable, its value and what is allowed.

    >>> read_settings({"PACELINE_POLICY": "capacity_factor=1.25", "PACELINE_DEVICES": "8"}).devices
    8
    """
    names = (POLICY, PLAN, DEVICES, CALIBRATION, RECORD, RECORD_CONTENT, ACCEPT_SHARED_BUDGET, FORM)
    policy, plan, devices, calibration, record, content, accept, form = (
        environ.get(name, "").strip() for name in names
    )
    if form and form not in FORMS:
        raise ValueError(f"{FORM} must be {' or '.join(FORMS)}, got {form}.")
    if content and content not in CONTENTS:
        raise ValueError(f"{RECORD_CONTENT} must be {', '.join(CONTENTS)}, got {content}.")
    if content and not record:
        raise ValueError(f"{RECORD_CONTENT}={content} has no effect without {RECORD}.")
    if record and not policy and not plan:
        policy = OBSERVE
    if not policy and not plan:
        if devices:
            raise ValueError(f"{DEVICES}={devices} has no effect without {POLICY} or {PLAN}.")
        return None
    if accept not in ("", "0", "1"):
        raise ValueError(f"{ACCEPT_SHARED_BUDGET} must be 1 or 0, got {accept}.")
    settings = Settings(
        policy=CapacityPolicy.parse(policy) if policy else None,
        devices=_read_devices(devices) if devices else None,
        plan=Plan.load(Path(plan)) if plan else None,
        accept_shared_budget=accept == "1",
        record=Path(record).absolute() if record else None,
        record_content=cast(Content, content or "counts"),
        calibration=Path(calibration).absolute() if calibration else None,
        form=form or FORMS[0],
    )
    if not settings.policies:
        raise ValueError(f"{PLAN}={plan} must name a policy, or {POLICY} must be set.")
    if settings.plan is not None and settings.plan.placements and settings.devices is not None:
        raise ValueError(f"{DEVICES}={devices} contradicts the placements of {plan}: set only one.")
    return settings


def plugin_environment(
    policy: str | None = None,
    devices: int | None = None,
    plan: Path | None = None,
    accept: bool = False,
    record: Path | None = None,
    content: str = "counts",
    calibration: Path | None = None,
) -> dict[str, str]:
    """Return the environment variables that configure the plugin, checked.

    Raises:
        ValueError: if the policy, the plan or the devices are not allowed.

    >>> plugin_environment("capacity_factor=1.25", 8)["PACELINE_DEVICES"]
    '8'
    """
    if policy is None and plan is None:
        policy = os.environ.get(POLICY) or (None if os.environ.get(PLAN) else OBSERVE)
    given = {
        POLICY: policy,
        DEVICES: None if devices is None else str(devices),
        PLAN: None if plan is None else str(plan.absolute()),
        ACCEPT_SHARED_BUDGET: "1" if accept else None,
        CALIBRATION: None if calibration is None else str(calibration.absolute()),
        RECORD: None if record is None else str(record.absolute()),
        RECORD_CONTENT: None if record is None else content,
    }
    environ = {name: value for name, value in given.items() if value is not None}
    read_settings({**os.environ, **environ})
    return environ


def _read_rungs(path: Path) -> dict[str, tuple[tuple[CapacityPolicy, ...], str]]:
    """Read the rungs of a ladder by their names.

    Raises:
        ValueError: if it can't be read.
    """
    try:
        ladder = json.loads(read_plain(path, MOST_SETTINGS))
        tokens = int(ladder["tokens"]["judge"])
        return {
            f"{float(rung['bound']):g}": (
                tuple(map(CapacityPolicy.parse, rung["policies"])),
                f"rung {float(rung['bound']):g} changed perplexity by "
                f"{signed_percent(float(rung['change']))} on {tokens:,} tokens of its own text",
            )
            for rung in ladder["rungs"]
        }
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no ladder of paceline tune: {error}.") from None


def _read_devices(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{DEVICES} must be a whole number of at least 1, got {text}.")
    return int(text)
