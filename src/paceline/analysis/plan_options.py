"""What a plan may cap, by what a traffic's batches are: rows where rows cost, active experts below.

Below `min_expert_load` rows an expert a device's time is the weights it reads: there max_active is
what can be capped, and a capacity factor does nothing. A trace may have batches of both kinds.
"""

from __future__ import annotations

import math
from typing import Any

from paceline.analysis.plan_goal import Goal
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


def options(goal: Goal, *traces: Trace) -> list[CapacityPolicy]:
    """What a layer may get; the first is no cap.

    Args:
        goal: of the plan.
        traces: whose batches are to be capped, and what judges: caps keep by what all of them hold.

    Raises:
        ValueError: if a trace can't bear the goal's pool.

    >>> from paceline.analysis.cost import LayerShape
    >>> from paceline.analysis.hardware import PRESETS
    >>> from paceline.analysis.placing import Wanted
    >>> from paceline.traces import sample
    >>> goal = Goal(Wanted(8), LayerShape(2880, 2880, 32, 4), PRESETS["h100"])
    >>> [p.max_active for p in options(goal, sample("gpt_oss_20b_decode"))]
    [None, 2, 3]
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
    """Policies that cap active experts alone, the tightest first; none where that can't be."""
    sizes = ExpertPlacement.contiguous(goal.shape.experts, goal.wanted.devices).sizes
    most = {math.ceil(share * max(sizes)) for share in ACTIVE_SHARES} - {max(sizes)}
    weighed = all("weight" in supported_keeps(trace) for trace in traces)
    if goal.pool == "request" or not weighed or not goal.min_expert_load:
        return []
    common: dict[str, Any] = {"pool": goal.pool, "min_expert_load": goal.min_expert_load}
    return [CapacityPolicy(max_active=count, **common) for count in sorted(most)]


def regimes(trace: Trace, goal: Goal) -> tuple[bool, bool]:
    """Whether a trace has batches below the goal's min_expert_load, and ones from there on."""
    small = large = False
    for table in load_tables(trace):
        assert table.tokens is not None  # what each token chose is known, so how many there are
        few = table.tokens.max(1) * goal.shape.k < goal.min_expert_load * goal.shape.experts
        small, large = small or bool(few.any()), large or bool((~few).any())
    return small, large
