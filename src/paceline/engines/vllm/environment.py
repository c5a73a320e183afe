"""What the plugin is told: environment variables, which reach every process of a deployment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.traces.record import Recording as Content

POLICY, DEVICES, PLAN = "PACELINE_POLICY", "PACELINE_DEVICES", "PACELINE_PLAN"
CALIBRATION = "PACELINE_CALIBRATION"
RECORD, RECORD_CONTENT = "PACELINE_RECORD", "PACELINE_RECORD_CONTENT"
CONTENTS = get_args(Content)
ACCEPT_SHARED_BUDGET = "PACELINE_ACCEPT_SHARED_BUDGET"
OBSERVE = "mode=observe"
"""The policy that counts loads and does nothing else."""
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's: the folder where processes leave their counts."""


@dataclass(frozen=True)
class Recording:
    """What to record.

    Attributes:
        folder: for the trace, to be made; several ranks that record have one each.
        content: counts, choices or scores.
    """

    folder: Path
    content: Content = "counts"


@dataclass(frozen=True)
class Wanted:
    """What the environment asks for.

    Attributes:
        policy: for all MoE layers, None where only a plan names policies.
        devices: over which the experts are spread in order, None where it isn't said.
        plan: policies and placements, one for all layers or one a layer.
        accept_shared_budget: users who share a batch, and its cache, may affect each other.
        recording: of what the layers choose.
        calibration: folder of one, before that of the plan.
    """

    policy: CapacityPolicy | None = None
    devices: int | None = None
    plan: Plan | None = None
    accept_shared_budget: bool = False
    recording: Recording | None = None
    calibration: Path | None = None

    @property
    def policies(self) -> tuple[CapacityPolicy, ...]:
        """One for all layers, or one a layer; a policy outweighs those of the plan.

        >>> Wanted(CapacityPolicy(capacity_factor=1.5)).policies[0].capacity_factor
        1.5
        """
        if self.policy is not None:
            return (self.policy,)
        return self.plan.policies if self.plan is not None else ()


def wanted(environ: Mapping[str, str] = os.environ) -> Wanted | None:
    """What the environment asks for; None where it asks for nothing.

    Raises:
        ValueError: naming the variable, its value and what is allowed.

    >>> wanted({"PACELINE_POLICY": "capacity_factor=1.25", "PACELINE_DEVICES": "8"}).devices
    8
    """
    policy, plan, devices = (environ.get(name, "").strip() for name in (POLICY, PLAN, DEVICES))
    recording, calibration = _recording(environ), environ.get(CALIBRATION, "").strip()
    if not policy and not plan and recording is not None:
        policy = OBSERVE
    if not policy and not plan:
        if devices:
            raise ValueError(f"{DEVICES}={devices} says nothing without {POLICY} or {PLAN}.")
        return None
    accept = environ.get(ACCEPT_SHARED_BUDGET, "").strip().lower()
    if accept not in ("", "0", "1"):
        raise ValueError(f"{ACCEPT_SHARED_BUDGET}={accept} is not allowed: it is 1 or 0.")
    read = Wanted(
        policy=CapacityPolicy.parse(policy) if policy else None,
        devices=_devices(devices) if devices else None,
        plan=Plan.load(Path(plan)) if plan else None,
        accept_shared_budget=accept == "1",
        recording=recording,
        calibration=Path(calibration).absolute() if calibration else None,
    )
    if not read.policies:
        raise ValueError(f"{PLAN}={plan} names no policy: name one there, or set {POLICY}.")
    if read.plan is not None and read.plan.placements and read.devices is not None:
        raise ValueError(f"{DEVICES}={devices} and the placements of {plan}: give one of them.")
    return read


def _recording(environ: Mapping[str, str]) -> Recording | None:
    folder, content = (environ.get(name, "").strip() for name in (RECORD, RECORD_CONTENT))
    if content and content not in CONTENTS:
        raise ValueError(f"{RECORD_CONTENT}={content} is not allowed: {', '.join(CONTENTS)}.")
    if not folder:
        if content:
            raise ValueError(f"{RECORD_CONTENT}={content} says nothing without {RECORD}.")
        return None
    return Recording(Path(folder).absolute(), cast(Content, content or "counts"))


def _devices(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{DEVICES}={text} is not allowed: it is a whole number of at least 1.")
    return int(text)
