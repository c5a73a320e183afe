"""What a verb's options decide about a model: devices, placements and policies, as one plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.plan import Plan, PlanError

DEVICES = 8
"""Unless somebody says otherwise."""

PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan", help="Plan file (TOML): policies and placements, of all layers or of each."
    ),
]
Devices = Annotated[
    int | None, typer.Option(help="Devices that share the experts in order; 8 unless placed.")
]
PlacementFile = Annotated[
    Path | None,
    typer.Option("--placement", help="Plan file (TOML) of which only the placements are taken."),
]


def decided(devices: int | None, placement: Path | None, plan: Path | None) -> Plan:
    """One plan from the options that say where experts are.

    Raises:
        ValueError: if two options contradict each other, or a file can't be read.
    """
    if placement is not None and (devices is not None or plan is not None):
        other = "--devices" if devices is not None else "--plan"
        raise ValueError(f"--placement and {other} both place the experts: give one of them.")
    if placement is not None:
        found = Plan.load(placement)
        if not found.placements:
            raise PlanError(f"{placement} names no placement: allowed is placement or placements.")
        return found.replace(policies=())
    found = Plan() if plan is None else Plan.load(plan)
    if devices is None:
        return found
    if found.placements:
        raise ValueError(f"--devices and {plan} both place the experts: give one of them.")
    if devices < 1:
        raise ValueError(f"--devices {devices} is not allowed: it is at least 1.")
    return found.replace(placements=(devices,))


def on_devices(plan: Plan) -> Plan:
    """A plan that says where experts are: on 8 devices in order, unless it does."""
    return plan if plan.placements else plan.replace(placements=(DEVICES,))


def most_devices(plan: Plan) -> int:
    """Devices of the largest placement of a plan; 8 where it has none."""
    counts = [p if isinstance(p, int) else p.num_devices for p in plan.placements]
    return max(counts, default=DEVICES)


def named(placement: Path | None, plan: Path | None) -> dict[str, str | None]:
    """Which files decided, for the results."""
    return {
        "placement_file": None if placement is None else str(placement),
        "plan_file": None if plan is None else str(plan),
    }
