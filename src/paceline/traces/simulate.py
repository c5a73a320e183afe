"""What policies and placements would do on a trace: the same router on the same batches.

Nothing is modelled: every batch of every layer goes through `paceline.route` (unless its loads fit,
and it would come back as it is), so that what is counted here is what an attached model would do
with these tokens, to the assignment. What a drop does to quality, or to what later layers choose, a
trace can't tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.balance import straggler_loss
from paceline.plan import Plan
from paceline.progress import Progress
from paceline.routing import Assignment
from paceline.traces.policy_support import check_policies
from paceline.traces.tally import Given, Tally, gate_mass_lost, spread
from paceline.traces.trace import Trace

Watch = Callable[[str, int, int, Assignment], None]
"""Told the plan's name, the layer, the number of the batch and what was decided."""

SCHEMA = "paceline-simulate/1"
AXES = {
    "device_peak_to_mean": "largest device by rows / mean over devices before any cap; mean: sum "
    "over batches of the largest / sum of the means; p50, p95, max over batches",
    "gain": "sum over batches and layers of the reference's largest device / this plan's largest",
    "dropped_share": "dropped assignments / the model's own, over batches and layers",
    "gate_mass_lost": "1 - sum of gate scores kept / of all, over batches and layers",
    "most_active_experts": "experts with a row on the device with the most of them, mean over "
    "batches (overall: and layers); _before: without any cap",
    "lost_tokens": "rows of a layer whose every assignment was dropped",
}
"""What is reduced over what, in every result."""


def simulate(
    trace: Trace,
    plans: Mapping[str, Plan],
    *,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Route every batch of a trace under every plan, and sum up loads and losses.

    Memory holds one chunk, and three small numbers a plan, layer and batch.

    Args:
        trace: of choices or scores.
        plans: name -> policies and placements; where a plan has no placement every expert is a
            device, and where it has no policy nothing is capped. The first is what gains refer to.
        progress: told of layers done, of how many.
        watch: called with every assignment.

    Raises:
        ValueError: if the trace has counts alone, a plan doesn't fit it, or a policy needs what it
            doesn't hold, for example weights.

    >>> from paceline import CapacityPolicy
    >>> from paceline.traces import sample
    >>> capped = Plan((CapacityPolicy(capacity_factor=1.0),), (8,))
    >>> found = simulate(sample("esft_v2lite_law"), {"none": Plan(placements=(8,)), "cap": capped})
    >>> round(found["plans"]["cap"]["overall"]["device_peak_to_mean"]["mean"], 2)
    1.0
    """
    header = trace.header
    if not header.per_token:
        raise ValueError(
            f"{trace.where} holds {header.content}, not what each token chose: record it with "
            "--content choices to try policies on it."
        )
    if not plans:
        raise ValueError("plans={} is not allowed: name at least one.")
    for plan in plans.values():
        plan.check_model(
            [layer.experts for layer in header.layers], [layer.k or 1 for layer in header.layers]
        )
    check_policies(trace, {f"plan {name!r}": plan.policies for name, plan in plans.items()})
    tallies = {
        name: [Tally.of(layer, index, plan, name) for index, layer in enumerate(header.layers)]
        for name, plan in plans.items()
    }
    step = 0
    for number, chunk in enumerate(trace.chunks):
        for layer in range(len(header.layers)):
            given = Given.of(header, chunk, layer, step)
            for name, of_layers in tallies.items():
                of_layers[layer].add(given, _teller(watch, name, layer, step))
            if progress is not None:
                done = number * len(header.layers) + layer + 1
                total = max(done, len(trace.chunks) * len(header.layers))
                progress(done, total, header.layers[layer].name)
        step += chunk.batches
    if step == 0:
        raise ValueError(f"{trace.where} has no batches.")
    results = {name: _result(of_layers) for name, of_layers in tallies.items()}
    reference = next(iter(results.values()))["overall"]["busiest_rows_after"]
    for result in results.values():
        result["overall"]["gain"] = reference / max(1, result["overall"]["busiest_rows_after"])
    return {
        "schema": SCHEMA,
        "trace": trace.where,
        "model": header.model,
        "notes": list(header.notes),
        "batches": step,
        "batches_are": header.batches,
        "axes": AXES,
        "reference": next(iter(plans)),
        "plans": results,
    }


def _teller(
    watch: Watch | None, name: str, layer: int, first: int
) -> Callable[[int, Assignment], None] | None:
    """`watch` for one plan, layer and chunk."""
    if watch is None:
        return None
    return lambda batch, assignment: watch(name, layer, first + batch, assignment)


def _result(tallies: Sequence[Tally]) -> dict[str, Any]:
    """A plan's layers, and all of them together."""
    first = tallies[0]
    assignments = sum(tally.assignments for tally in tallies)
    dropped = sum(tally.dropped for tally in tallies)
    means = np.concatenate([np.frombuffer(tally.means, np.float32) for tally in tallies])
    before = np.concatenate([np.frombuffer(tally.before, np.float32) for tally in tallies])
    after = np.concatenate([np.frombuffer(tally.after, np.float32) for tally in tallies])
    total = sum(tally.assignments / tally.placement.num_devices for tally in tallies)
    rows_before = sum(tally.busiest_before for tally in tallies)
    rows_after = sum(tally.busiest_after for tally in tallies)
    steps = max(1, sum(tally.batches for tally in tallies))
    alike = len({tally.policy for tally in tallies}) == 1
    return {
        "policy": str(first.policy) if alike else "by layer",
        "devices": first.placement.num_devices,
        "min_expert_load": first.policy.resolved_min_expert_load("cpu"),
        "overall": {
            "assignments": assignments,
            "dropped": dropped,
            "extras": sum(tally.extras for tally in tallies),
            "dropped_share": dropped / max(1, assignments),
            "gate_mass_lost": gate_mass_lost(tallies),
            "lost_tokens": sum(tally.lost_tokens for tally in tallies),
            "batches_below_min_expert_load": sum(tally.too_small for tally in tallies),
            "batches_ruled_by_max_active": sum(tally.narrowed for tally in tallies),
            "most_active_experts_before": sum(tally.active_before for tally in tallies) / steps,
            "most_active_experts": sum(tally.active_after for tally in tallies) / steps,
            "busiest_rows_before": rows_before,
            "busiest_rows_after": rows_after,
            "device_peak_to_mean_before": spread(before, means, rows_before, total),
            "device_peak_to_mean": spread(after, means, rows_after, total),
            "straggler_loss": straggler_loss(rows_after / total) if total else 0.0,
        },
        "layers": [tally.result() for tally in tallies],
    }
