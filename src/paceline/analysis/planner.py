"""Decision from a trace: place, cap, both, or neither; and the cap of each layer.

Placement comes first, since it loses nothing. Then every layer gets the cap that saves most time
for the gate mass it loses, under a budget for the whole model (a Lagrangian over layers): where a
cap saves little, none. Everything is chosen on one part of the traffic and judged on another. Gate
mass is a proxy for quality and no more: measure quality before a cap goes into service.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from pydantic import TypeAdapter, ValidationError

from paceline.analysis.expert_map import ExpertMap, maps_in_order
from paceline.analysis.placing import layer_plan, search_maps
from paceline.analysis.plan_goal import Goal, options
from paceline.analysis.plan_judge import (
    add_caps,
    judge_plans,
    largest_budget,
    plan_costs,
    variants,
)
from paceline.analysis.plan_verdict import decide
from paceline.analysis.results import JudgedPlan, PlanElsewhere, PlanResult
from paceline.analysis.traffic import (
    MAX_BATCHES,
    Part,
    batches_of,
    count_batches,
    picked,
    sample,
    spread_over,
)
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.progress import Progress, Steps
from paceline.traces import Trace

SCHEMA = "paceline-plan/1"
BUDGETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1)
"""Shares of gate mass at which the frontier is drawn."""


def make_plan(
    trace: Trace,
    goal: Goal,
    judge: Trace | None = None,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> tuple[Plan, PlanResult]:
    """Make the plan for a model from its traffic, and judge it.

    Chosen on the first half of the batches and judged on the second; the placement in the plan is
    fitted on all of them. With `judge`, all of that is judged on another traffic too.

    Args:
        trace: of choices.
        goal: limits and preferences.
        judge: another trace of the same model.
        batch_tokens: tokens per batch; None: the trace's own forwards, else 1024.
        progress: called with the steps done, and their number.

    Raises:
        ValueError: if the trace has counts alone or fewer than 2 batches, or doesn't fit the goal.

    >>> from paceline.analysis.cost import LayerShape
    >>> from paceline.analysis.hardware import PRESETS
    >>> from paceline.analysis.placing import PlacementSpec
    >>> from paceline.traces import sample
    >>> goal = Goal(PlacementSpec(8), LayerShape(2048, 1408, 64, 6), PRESETS["h20"])
    >>> plan, result = make_plan(sample("esft_v2lite_law"), goal, batch_tokens=2048)
    >>> result.decision in ("place", "place and cap")
    True
    """
    for each in [trace] if judge is None else [trace, judge]:
        _check(each, goal)
    cut = batches_of(trace, batch_tokens)
    batches = count_batches(cut)
    if batches < 2:
        raise ValueError(
            f"{trace.where} must have at least 2 batches, to choose a plan on some and judge it on "
            f"others, got {batches} (--batch-tokens cuts it)"
        )
    half = batches // 2
    pieces = 1 + bool(goal.spec.replicas)
    steps = Steps(progress, 5 + pieces * (1 if judge is None else 2))
    first = search_maps(cut, Part(0, half), goal.spec, steps.next("placing by half"))
    fit_trace = picked(cut, spread_over(Part(0, half), MAX_BATCHES))
    other = None if judge is None else batches_of(judge, batch_tokens)
    allowed = options(goal, fit_trace, *([] if other is None else [other]))
    chosen = {
        base: _choose(fit_trace, maps, allowed, goal, steps)
        for base, maps in (("in_order", maps_in_order(first.alone)), ("placed", first.alone))
    }
    seen, maps = picked(cut, spread_over(Part(half, batches), MAX_BATCHES)), first.alone
    second_half = deciding = judge_plans(seen, first, chosen, allowed, goal, steps)
    whole = search_maps(cut, Part(0, batches), goal.spec, steps.next("placing by all"))
    elsewhere = None
    if judge is not None and other is not None:
        seen = picked(other, spread_over(Part(0, count_batches(other)), MAX_BATCHES))
        maps = whole.alone
        found = judge_plans(seen, whole, chosen, allowed, goal, steps)
        values = {each.name: getattr(found, each.name) for each in fields(JudgedPlan)}
        elsewhere = deciding = PlanElsewhere(trace=judge.where, **values)
    budgets = {base: largest_budget(deciding, base, goal.max_mass_loss) for base in chosen}
    taken = {
        base: [] if budget is None else chosen[base][budget] for base, budget in budgets.items()
    }
    add_caps(second_half, budgets)
    if elsewhere is not None:
        add_caps(elsewhere, budgets)
    seconds = deciding.ways["nothing"].microseconds / 1e6
    result = PlanResult(
        schema=SCHEMA,
        trace=trace.where,
        model=trace.header.model,
        notes=list(trace.header.notes),
        devices=goal.spec.devices,
        hardware=goal.hardware.name,
        hardware_source=goal.hardware.source,
        precision=goal.shape.precision,
        max_mass_loss=goal.max_mass_loss,
        min_gain=goal.min_gain,
        min_expert_load=goal.min_expert_load,
        batches=batches,
        batch_tokens=batch_tokens,
        layers=[layer.name for layer in trace.header.layers],
        second_half=second_half,
        other_trace=elsewhere,
        budgets=budgets,
        variants=variants(seen, maps, taken["placed"], seconds, goal, steps),
        decision="",
        verdict=[],
        sample=sample(cut, Part(half, batches), goal.spec.devices),
    )
    result.decision, result.verdict = decide(result)
    base = "placed" if "place" in result.decision else "in_order"
    policies = taken[base] if "cap" in result.decision else []
    final = whole.alone if base == "placed" else maps_in_order(whole.alone)
    return layer_plan(trace, final, policies), result


def read_plan_result(text: bytes, source: str) -> PlanResult:
    """Read the JSON of a `PlanResult`.

    Args:
        source: names it in an error.

    Raises:
        ValueError: if it is cut off, or lacks a field.
    """
    try:
        result = TypeAdapter(PlanResult).validate_json(text)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        if not where:
            raise ValueError(f"{source} is a plan's JSON that is cut off or broken.") from None
        raise ValueError(
            f"{source} has no proper {where}: write it with paceline plan --json."
        ) from None
    if not result.verdict:
        raise ValueError(f"{source} has no proper verdict: write it with paceline plan --json.")
    return result


def _choose(
    trace: Trace,
    maps: Sequence[ExpertMap],
    allowed: Sequence[CapacityPolicy],
    goal: Goal,
    steps: Steps,
) -> dict[float, list[CapacityPolicy]]:
    """Choose the policy of each layer for every budget: the frontier's, and the goal's own."""
    plans = {str(i): layer_plan(trace, maps, [option]) for i, option in enumerate(allowed)}
    costs = plan_costs(trace, plans, goal.shape, goal.hardware, steps.next("choosing caps"))
    times = [costs[name].seconds for name in plans]
    losses = [costs[name].lost for name in plans]
    return {
        budget: [allowed[i] for i in allot(times, losses, budget)]
        for budget in {*BUDGETS, goal.max_mass_loss}
    }


def allot(
    times: Sequence[Sequence[float]], losses: Sequence[Sequence[float]], budget: float
) -> list[int]:
    """Choose the option of each layer: least time with a mean loss over layers within a budget.

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
    """Refuse a trace of counts, or of a model with other sizes."""
    if not trace.header.per_token:
        raise ValueError(
            f"{trace.where} holds {trace.header.content}, not what each token chose, which a cap "
            "needs: a placement alone needs no more than that (--place-only)."
        )
    for layer in trace.header.layers:
        if layer.experts != goal.shape.experts or layer.k not in (None, goal.shape.k):
            raise ValueError(
                f"{trace.where}: {layer.name} has {layer.experts} experts and {layer.k} per token; "
                f"the model's config has {goal.shape.experts} and {goal.shape.k} per token."
            )
        goal.spec.shape(layer.experts)
