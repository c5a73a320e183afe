"""What placements and caps are worth on batches that took no part in choosing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.analysis.expert_map import ExpertMap, replica_bytes
from paceline.analysis.hardware import BYTES
from paceline.analysis.placement_search import search_map
from paceline.analysis.placing import Wanted
from paceline.analysis.plan_cost import Costs, physical, plan_costs
from paceline.analysis.plan_goal import Goal
from paceline.analysis.traffic import Part, count_batches, pieces_of
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.traces import Trace

Progress = Callable[[int, int, str], None]

BUDGETS = (0.0025, 0.005, 0.01, 0.02, 0.05, 0.1)
"""Shares of gate mass at which the frontier is drawn."""


@dataclass(frozen=True)
class Fitted:
    """Searched maps, [layers] each.

    Attributes:
        alone: every expert once.
        copied: with replicas, empty where none are wanted.
    """

    alone: list[ExpertMap]
    copied: list[ExpertMap]


def fitted(trace: Trace, part: Part, wanted: Wanted) -> Fitted:
    """The searched maps of some batches, to be judged on others.

    >>> from paceline.traces import sample
    >>> found = fitted(sample("gpt_oss_20b_decode"), Part(0, 8), Wanted(devices=8))
    >>> len(found.alone), found.copied
    (6, [])
    """
    pieces = pieces_of(trace, part)
    alone = [search_map(loads, wanted.shape(loads.shape[1], 0)) for loads in pieces]
    copies = pieces if wanted.replicas else []
    return Fitted(alone, [search_map(loads, wanted.shape(loads.shape[1])) for loads in copies])


def judged(
    trace: Trace,
    found: Fitted,
    chosen: Mapping[str, Mapping[float, list[CapacityPolicy]]],
    goal: Goal,
    steps: Steps,
) -> dict[str, Any]:
    """What every way costs on batches that took no part in choosing it, as JSON-able values."""
    maps = found.alone
    ways = {
        "nothing": layer_plan(trace, in_order(maps), []),
        "cap": layer_plan(trace, in_order(maps), chosen["in_order"][goal.max_mass_loss]),
        "place": layer_plan(trace, maps, []),
        "place and cap": layer_plan(trace, maps, chosen["placed"][goal.max_mass_loss]),
    }
    frontier = {
        f"{base} {budget}": layer_plan(
            trace, maps if base == "placed" else in_order(maps), chosen[base][budget]
        )
        for base in chosen
        for budget in BUDGETS
    }
    best = chosen["placed"][goal.max_mass_loss]
    variants = {
        name: layer_plan(trace, maps, [p.replace(**change) if p.caps else p for p in best])
        for name, change in _variants(trace, best).items()
    }
    every = ways | frontier | variants
    costs = plan_costs(trace, every, goal.shape, goal.hardware, steps.of("judged"))
    base = sum(costs["nothing"].seconds)
    out: dict[str, Any] = {
        "batches": count_batches(trace),
        "ways": {name: _said(costs[name], base) for name in ways},
        "frontier": [
            {"placement": name.split()[0], "budget": float(name.split()[1])}
            | _said(costs[name], base)
            for name in frontier
        ],
        "variants": [{"change": name} | _said(costs[name], base) for name in variants],
        "perfect_balance_gain": base / sum(costs["nothing"].balanced) - 1,
    }
    if goal.wanted.replicas:
        out["ways"]["replicas"] = _replicated(trace, found.copied, goal, base, steps)
    return out


def _variants(trace: Trace, policies: Sequence[CapacityPolicy]) -> dict[str, dict[str, Any]]:
    """What else the caps of a plan could say, as far as the trace tells what that needs."""
    caps = [policy for policy in policies if policy.caps]
    first = next(iter(trace.chunks), None)
    if not caps or first is None:
        return {}
    told = {
        "pool=request": first.request is not None,
        "pool=source": first.source is not None,
        "keep=weight": first.weights is not None,
        "keep=first": True,
    }
    possible: dict[str, dict[str, Any]] = {
        name: dict([name.split("=")]) for name, known in told.items() if known
    }
    possible["min_expert_load=0"] = {"min_expert_load": 0}
    return {
        name: change
        for name, change in possible.items()
        if any(getattr(caps[0], field) != value for field, value in change.items())
    }


def _replicated(
    trace: Trace, copied: Sequence[ExpertMap], goal: Goal, base: float, steps: Steps
) -> dict[str, Any]:
    """What replicas give on top of a placement, and the memory they take."""
    shape = replace(goal.shape, experts=len(copied[0].slots))
    plan = Plan(placements=(goal.wanted.devices,), layers=len(copied))
    costs = plan_costs(
        physical(trace, copied), {"replicas": plan}, shape, goal.hardware, steps.of("replicas")
    )
    taken = replica_bytes(copied, shape.hidden, shape.expert_size, BYTES[goal.shape.precision])
    return _said(costs["replicas"], base) | {"replica_gb_a_device": taken / 1e9}


def _said(costs: Costs, base: float) -> dict[str, Any]:
    return costs.as_json() | {"gain": base / sum(costs.seconds) - 1}


def layer_plan(trace: Trace, maps: Sequence[ExpertMap], policies: Sequence[CapacityPolicy]) -> Plan:
    """Maps and policies as a plan; what is the same in all layers is said once.

    >>> from paceline.traces import sample
    >>> layer_plan(sample("gpt_oss_20b_decode"), [ExpertMap.contiguous(32, 8)] * 6, []).placements
    (8,)
    """
    contiguous = all(own.slots == tuple(range(own.num_experts)) for own in maps)
    placements = (maps[0].num_devices,) if contiguous else tuple(own.placement for own in maps)
    ks = {layer.k for layer in trace.header.layers}
    experts = {layer.experts for layer in trace.header.layers}
    return Plan(
        policies=tuple(policies[:1] if len(set(policies)) == 1 else policies),
        placements=placements,
        layers=len(maps),
        experts=experts.pop() if len(experts) == 1 else None,
        k=ks.pop() if len(ks) == 1 else None,
    )


def in_order(maps: Sequence[ExpertMap]) -> list[ExpertMap]:
    """As many experts on as many devices, nobody having placed them.

    >>> in_order([ExpertMap((1, 0), 2, 2)])[0].slots
    (0, 1)
    """
    return [ExpertMap.contiguous(own.num_experts, own.num_devices) for own in maps]


class Steps:
    """Progress over several pieces of work."""

    def __init__(self, tell: Progress | None, total: int) -> None:
        self._tell, self._total, self._done = tell, total, 0

    def of(self, what: str) -> Progress | None:
        """A function for one piece of work, the next one."""
        if self._tell is None:
            return None
        start, tell, total = self._done, self._tell, self._total
        self._done += 1

        def part(done: int, of: int, name: str) -> None:
            tell(start * 100 + 100 * done // max(1, of), total * 100, f"{what}: {name}")

        return part
