"""From a trace to a decision: place, cap, both, or neither; and which cap in which layer.

Placement comes first, since it loses nothing. Then every layer gets the cap that saves most time
for the gate mass it loses, under a budget for the whole model (a Lagrangian over layers): where a
cap pays little, none. Everything is chosen on one part of the traffic and judged on another. Gate
mass is a proxy for quality and no more: measure quality before a cap goes into service.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.analysis.expert_map import ExpertMap
from paceline.analysis.plan_cost import plan_costs
from paceline.analysis.plan_goal import Goal
from paceline.analysis.plan_judge import (
    BUDGETS,
    Steps,
    fitted,
    in_order,
    judged,
    layer_plan,
    take,
    variants,
    within,
)
from paceline.analysis.plan_options import options
from paceline.analysis.plan_words import verdict
from paceline.analysis.traffic import Part, batches_of, count_batches, picked, spread_over
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.progress import Progress
from paceline.traces import Trace

SCHEMA = "paceline-plan/1"
MAX_BATCHES = 32
"""Batches that each part of the work looks at, evenly spaced where there are more."""


def make_plan(
    trace: Trace,
    goal: Goal,
    judge: Trace | None = None,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> tuple[Plan, dict[str, Any]]:
    """The plan for a model from its traffic, and what it is worth, as JSON-able values.

    Chosen on the first half of the batches and judged on the second; the placement in the plan is
    fitted on all of them. With `judge`, all of that is judged on another traffic too.

    Args:
        trace: of choices.
        goal: what to reach.
        judge: another trace of the same model.
        batch_tokens: tokens of a batch; None: the trace's own forwards, else 1024.
        progress: told steps done, of how many.

    Raises:
        ValueError: if the trace has counts alone or fewer than 2 batches, or doesn't fit the goal.

    >>> from paceline.analysis.cost import LayerShape
    >>> from paceline.analysis.hardware import PRESETS
    >>> from paceline.analysis.placing import Wanted
    >>> from paceline.traces import sample
    >>> shape = LayerShape(2048, 1408, 64, 6)
    >>> goal = Goal(Wanted(8), shape, PRESETS["h20"])
    >>> plan, said = make_plan(sample("esft_v2lite_law"), goal, batch_tokens=2048)
    >>> said["decision"] in ("place", "place and cap")
    True
    """
    for given in [trace] if judge is None else [trace, judge]:
        _check(given, goal)
    cut = batches_of(trace, batch_tokens)
    batches = count_batches(cut)
    if batches < 2:
        raise ValueError(
            f"{trace.where} has {batches} batches: a plan is chosen on some and judged on others "
            "(say --batch-tokens to cut it)."
        )
    half = batches // 2
    parts = 1 + bool(goal.wanted.replicas)
    steps = Steps(progress, 5 + parts * (1 if judge is None else 2))
    first = fitted(cut, Part(0, half), goal.wanted, steps.of("placing by half"))
    fit_trace = picked(cut, spread_over(Part(0, half), MAX_BATCHES))
    other = None if judge is None else batches_of(judge, batch_tokens)
    allowed = options(goal, fit_trace, *([] if other is None else [other]))
    chosen = {
        base: _choose(fit_trace, maps, allowed, goal, steps)
        for base, maps in (("in_order", in_order(first.alone)), ("placed", first.alone))
    }
    rest = picked(cut, spread_over(Part(half, batches), MAX_BATCHES))
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "trace": trace.where,
        "model": trace.header.model,
        "notes": list(trace.header.notes),
        "devices": goal.wanted.devices,
        "hardware": goal.hardware.name,
        "hardware_source": goal.hardware.source,
        "precision": goal.shape.precision,
        "max_mass_loss": goal.max_mass_loss,
        "min_gain": goal.min_gain,
        "min_expert_load": goal.min_expert_load,
        "batches": batches,
        "batch_tokens": batch_tokens,
        "layers": [layer.name for layer in trace.header.layers],
        "second_half": judged(rest, first, chosen, allowed, goal, steps),
        "other_trace": None,
    }
    deciding, seen, maps = result["second_half"], rest, first.alone
    whole = fitted(cut, Part(0, batches), goal.wanted, steps.of("placing by all"))
    if judge is not None and other is not None:
        part = picked(other, spread_over(Part(0, count_batches(other)), MAX_BATCHES))
        result["other_trace"] = {
            "trace": judge.where,
            **judged(part, whole, chosen, allowed, goal, steps),
        }
        deciding, seen, maps = result["other_trace"], part, whole.alone
    budgets = {base: within(deciding, base, goal.max_mass_loss) for base in chosen}
    taken = {
        base: [] if budget is None else chosen[base][budget] for base, budget in budgets.items()
    }
    result["budgets"] = budgets
    for judged_part in (result["second_half"], result["other_trace"]):
        if judged_part is not None:
            take(judged_part, budgets)
    result["variants"] = variants(
        seen, maps, taken["placed"], deciding["ways"]["nothing"]["microseconds"], goal, steps
    )
    result["decision"], result["verdict"] = verdict(result)
    base = "placed" if result["decision"] in ("place", "place and cap") else "in_order"
    policies = taken[base] if "cap" in result["decision"] else []
    final = whole.alone if base == "placed" else in_order(whole.alone)
    return layer_plan(trace, final, policies), result


def _choose(
    trace: Trace,
    maps: Sequence[ExpertMap],
    allowed: Sequence[CapacityPolicy],
    goal: Goal,
    steps: Steps,
) -> dict[float, list[CapacityPolicy]]:
    """Budget -> the policy of each layer, for the frontier's budgets and the goal's own."""
    plans = {str(i): layer_plan(trace, maps, [option]) for i, option in enumerate(allowed)}
    costs = plan_costs(trace, plans, goal.shape, goal.hardware, steps.of("choosing caps"))
    times = [costs[name].seconds for name in plans]
    losses = [costs[name].lost for name in plans]
    return {
        budget: [allowed[i] for i in allot(times, losses, budget)]
        for budget in {*BUDGETS, goal.max_mass_loss}
    }


def allot(
    times: Sequence[Sequence[float]], losses: Sequence[Sequence[float]], budget: float
) -> list[int]:
    """The option of each layer: least time whose mean loss over layers is within a budget.

    For a price of loss every layer takes the option with the least time + price x loss; the price
    is the lowest at which the budget holds, found by bisection. The first option, without a loss,
    is always possible.

    Args:
        times: [options][layers] seconds.
        losses: [options][layers] share of the gate mass lost; none for the first option.
        budget: on the mean of losses over layers.

    >>> allot([[5.0, 5.0], [3.0, 4.9]], [[0.0, 0.0], [0.01, 0.01]], budget=0.005)
    [1, 0]
    """
    layers = range(len(times[0]))

    def at(price: float) -> list[int]:
        return [
            min(range(len(times)), key=lambda o: (times[o][n] + price * losses[o][n], losses[o][n]))
            for n in layers
        ]

    def lost(taken: list[int]) -> float:
        return sum(losses[o][n] for n, o in enumerate(taken)) / len(taken)

    if lost(at(0.0)) <= budget:
        return at(0.0)
    low, high = 0.0, 1.0
    while lost(at(high)) > budget:
        high *= 2
        if high > 1e30:  # only what loses nothing is within the budget
            return [0] * len(times[0])
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if lost(at(middle)) > budget else (low, middle)
    return at(high)


def _check(trace: Trace, goal: Goal) -> None:
    """Refuse a trace that says too little, or is of a model with other sizes."""
    if not trace.header.per_token:
        raise ValueError(
            f"{trace.where} holds {trace.header.content}, not what each token chose: a plan needs "
            "that (paceline plan --place-only doesn't)."
        )
    for layer in trace.header.layers:
        if layer.experts != goal.shape.experts or layer.k not in (None, goal.shape.k):
            raise ValueError(
                f"{trace.where}: {layer.name} has {layer.experts} experts, {layer.k} a token; the "
                f"model's config says {goal.shape.experts}, {goal.shape.k} a token."
            )
        goal.wanted.shape(layer.experts)
