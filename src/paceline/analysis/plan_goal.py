"""Goal of a plan, and the policies that a layer may get under it.

Below `min_expert_load` rows per expert a device's time is the weights it reads: there max_active is
what can be capped, and a capacity factor does nothing. A trace may have batches of both kinds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from paceline.analysis.cost import LayerShape
from paceline.analysis.hardware import Hardware
from paceline.analysis.placing import PlacementSpec
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.traces import Trace
from paceline.traces.policy_support import check_policies, supported_keeps
from paceline.traces.tables import load_tables

DEVICE_FACTORS = (1.0, 1.1, 1.25, 1.5, 2.0)
EXPERT_FACTORS = (1.0, 1.25, 1.5, 2.0)
ACTIVE_SHARES = (0.875, 0.75, 0.625, 0.5)
"""Of the experts that a device hosts."""

NO_CAP = CapacityPolicy(mode="observe")


@dataclass(frozen=True)
class Goal:
    """Goal of a plan.

    Attributes:
        spec: devices, replicas to compare with, groups.
        max_mass_loss: share of the gate mass that a cap may lose.
        min_gain: share of the step's MoE time below which nothing is worth it.

    Raises:
        ValueError: if a share is outside [0, 1), or the pool is unknown.

    >>> from paceline.analysis.hardware import PRESETS
    >>> Goal(PlacementSpec(8), LayerShape(2048, 1408, 64, 6), PRESETS["h20"]).min_expert_load
    8
    """

    spec: PlacementSpec
    shape: LayerShape
    hardware: Hardware
    max_mass_loss: float = 0.01
    min_gain: float = 0.05
    pool: str = "batch"

    def __post_init__(self) -> None:
        for name in ("max_mass_loss", "min_gain"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be from 0 to below 1, got {getattr(self, name)}")
        if self.pool not in ("batch", "request", "source"):
            raise ValueError(f"pool must be batch, request or source, got {self.pool!r}")

    @property
    def min_expert_load(self) -> int:
        """Mean rows per expert below which a cap is left off.

        There rows take less than a fifth of the experts' time, and the rest is reading weights.
        """
        reading = self.hardware.per_expert + self.shape.expert_bytes / self.hardware.memory
        row = self.shape.row_flops / self.hardware.reachable(self.shape.precision)
        return math.ceil(reading / row / 4)


def options(goal: Goal, *traces: Trace) -> list[CapacityPolicy]:
    """List the policies that a layer may get; the first is no cap.

    Args:
        traces: whose batches are to be capped, and those that judge: caps keep by what all of them
            hold.

    Raises:
        ValueError: if a trace lacks what the goal's pool needs.
    """
    possible = [supported_keeps(trace) for trace in traces]
    keep = next(k for k in possible[0] if all(k in keeps for keeps in possible))
    common: dict[str, Any] = {"pool": goal.pool, "min_expert_load": goal.min_expert_load}
    small, large = regimes(traces[0], goal)
    caps = [
        CapacityPolicy(capacity_factor=factor, unit=unit, keep=keep, **common)
        for unit, factors in (("device", DEVICE_FACTORS), ("expert", EXPERT_FACTORS))
        for factor in factors
    ]
    for trace in traces:
        check_policies(trace, {"the plan's caps": caps})
    actives = active_options(goal, *traces) if small else []
    if not large:
        return [NO_CAP, *actives]
    both = [
        cap.replace(max_active=active.max_active)
        for cap in caps[: len(DEVICE_FACTORS)]
        for active in actives
    ]
    return [NO_CAP, *caps, *actives, *both]


def active_options(goal: Goal, *traces: Trace) -> list[CapacityPolicy]:
    """List policies that cap active experts alone, the tightest first; none where none can."""
    sizes = ExpertPlacement.contiguous(goal.shape.experts, goal.spec.devices).sizes
    most = {math.ceil(share * max(sizes)) for share in ACTIVE_SHARES} - {max(sizes)}
    weighed = all("weight" in supported_keeps(trace) for trace in traces)
    if goal.pool == "request" or not weighed or not goal.min_expert_load:
        return []
    common: dict[str, Any] = {"pool": goal.pool, "min_expert_load": goal.min_expert_load}
    return [CapacityPolicy(max_active=count, **common) for count in sorted(most)]


def regimes(trace: Trace, goal: Goal) -> tuple[bool, bool]:
    """Return if a trace has batches below the goal's min_expert_load, and if it has larger ones."""
    small = large = False
    for table in load_tables(trace):
        assert table.tokens is not None  # what each token chose is known, so how many there are
        few = table.tokens.max(1) * goal.shape.k < goal.min_expert_load * goal.shape.experts
        small, large = small or bool(few.any()), large or bool((~few).any())
    return small, large
