"""What placements and caps are worth on batches that took no part in choosing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.analysis.cap_words import lost
from paceline.analysis.expert_map import ExpertMap, replica_bytes
from paceline.analysis.hardware import BYTES
from paceline.analysis.placement_search import search_map
from paceline.analysis.placing import Wanted
from paceline.analysis.plan_cost import Costs, physical, plan_costs
from paceline.analysis.plan_goal import Goal
from paceline.analysis.traffic import Part, count_batches, pieces_of
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.progress import Progress
from paceline.traces import Trace
from paceline.traces.policy_support import supported_keeps, supported_pools

Chosen = Mapping[str, Mapping[float, list[CapacityPolicy]]]
"""Placement ("in_order" or "placed") -> budget of gate mass -> policy of each layer."""

BUDGETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1)
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


def fitted(trace: Trace, part: Part, wanted: Wanted, progress: Progress | None = None) -> Fitted:
    """The searched maps of some batches, to be judged on others.

    >>> from paceline.traces import sample
    >>> found = fitted(sample("gpt_oss_20b_decode"), Part(0, 8), Wanted(devices=8))
    >>> len(found.alone), found.copied
    (6, [])
    """
    pieces = pieces_of(trace, part, progress)
    alone = [search_map(loads, wanted.shape(loads.shape[1], 0)) for loads in pieces]
    copies = pieces if wanted.replicas else []
    return Fitted(alone, [search_map(loads, wanted.shape(loads.shape[1])) for loads in copies])


def judged(
    trace: Trace,
    found: Fitted,
    chosen: Chosen,
    allowed: Sequence[CapacityPolicy],
    goal: Goal,
    steps: Steps,
) -> dict[str, Any]:
    """What every way costs on batches that took no part in choosing it, as JSON-able values.

    `take` adds the ways with caps, once it is known which of the frontier's are taken. "active" is
    what every max_active among the policies that are `allowed` gives, the same in all layers.
    """
    maps = {"in_order": in_order(found.alone), "placed": found.alone}
    plans = {base: layer_plan(trace, own, []) for base, own in maps.items()}
    points = [(base, budget) for base in maps for budget in sorted(chosen[base])]
    plans |= {f"{b} {x}": layer_plan(trace, maps[b], chosen[b][x]) for b, x in points}
    actives = [p for p in allowed if p.max_active is not None and p.factor is None]
    narrowed = [(b, policy) for b in maps for policy in actives]
    plans |= {f"{b} {p.max_active} active": layer_plan(trace, maps[b], [p]) for b, p in narrowed}
    costs = plan_costs(trace, plans, goal.shape, goal.hardware, steps.of("judged"))
    base = sum(costs["in_order"].seconds)
    out: dict[str, Any] = {
        "batches": count_batches(trace),
        "ways": {
            "nothing": _said(costs["in_order"], base),
            "place": _said(costs["placed"], base),
        },
        "frontier": [
            {"placement": b, "budget": x} | _said(costs[f"{b} {x}"], base) for b, x in points
        ],
        "active": [
            {"placement": b, "max_active": p.max_active}
            | _said(costs[f"{b} {p.max_active} active"], base)
            for b, p in narrowed
        ],
        "perfect_balance_gain": base / sum(costs["in_order"].balanced) - 1,
    }
    if goal.wanted.replicas:
        out["ways"]["replicas"] = _replicated(trace, found.copied, goal, base, steps)
    return out


def within(part: Mapping[str, Any], placement: str, most: float) -> float | None:
    """The largest budget whose caps lose at most so much on what they are judged on.

    Caps that lost little where they were chosen may lose more elsewhere. Where gate mass is unknown
    the share of the assignments is what they may lose. None: none is within.

    >>> point = {"placement": "placed", "budget": 0.01, "gate_mass_lost": None}
    >>> point |= {"dropped_share": 0.02}
    >>> within({"frontier": [point]}, "placed", most=0.01) is None
    True
    """
    budgets = [
        point["budget"]
        for point in part["frontier"]
        if point["placement"] == placement and point["budget"] <= most and lost(point) <= most
    ]
    return max(budgets, default=None)


def take(part: dict[str, Any], budgets: Mapping[str, float | None]) -> None:
    """Add "cap" and "place and cap" to the ways of a part: the frontier's points that are taken.

    Args:
        part: from `judged`.
        budgets: placement -> budget, None: no cap.
    """
    alone = {"in_order": "nothing", "placed": "place"}
    for name, base in (("cap", "in_order"), ("place and cap", "placed")):
        points = [
            {key: value for key, value in point.items() if key not in ("placement", "budget")}
            for point in part["frontier"]
            if (point["placement"], point["budget"]) == (base, budgets[base])
        ]
        part["ways"][name] = points[0] if points else part["ways"][alone[base]]


def variants(
    trace: Trace,
    maps: Sequence[ExpertMap],
    policies: Sequence[CapacityPolicy],
    base: float,
    goal: Goal,
    steps: Steps,
) -> list[dict[str, Any]]:
    """What other settings of the chosen caps would give on the same batches.

    Args:
        trace: whose batches.
        maps: of each layer.
        policies: of each layer.
        base: microseconds of a step with nothing done, to which gains refer.
        goal: shape and hardware.
        steps: progress.
    """
    plans = {
        name: layer_plan(trace, maps, [p.replace(**change) if _varies(p) else p for p in policies])
        for name, change in _variants(trace, policies).items()
    }
    if not plans:
        return []
    costs = plan_costs(trace, plans, goal.shape, goal.hardware, steps.of("other settings"))
    return [{"change": name} | _said(costs[name], base / 1e6) for name in plans]


def _varies(policy: CapacityPolicy) -> bool:
    """Whether a policy caps rows alone: max_active bears neither request pools nor every load."""
    return policy.caps and policy.factor is not None and policy.max_active is None


def _variants(trace: Trace, policies: Sequence[CapacityPolicy]) -> dict[str, dict[str, Any]]:
    """What else the caps of a plan could say, as far as the trace tells what that needs."""
    caps = [policy for policy in policies if _varies(policy)]
    if not caps:
        return {}
    possible: dict[str, dict[str, Any]] = {
        f"pool={pool}": {"pool": pool} for pool in supported_pools(trace) if pool != "batch"
    }
    keeps = supported_keeps(trace)
    possible |= {f"keep={k}": {"keep": k} for k in ("weight", "first") if k in keeps}
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
    replicated = any(own.replicas for own in maps)
    contiguous = all(own.slots == tuple(range(own.num_experts)) for own in maps)
    in_order = replicated or contiguous
    ks = {layer.k for layer in trace.header.layers}
    experts = {layer.experts for layer in trace.header.layers}
    return Plan(
        policies=tuple(policies[:1] if len(set(policies)) == 1 else policies),
        placements=(maps[0].num_devices,) if in_order else tuple(own.placement for own in maps),
        layers=len(maps),
        experts=experts.pop() if len(experts) == 1 else None,
        k=ks.pop() if len(ks) == 1 else None,
        slots=tuple(own.slots for own in maps) if replicated else (),
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
