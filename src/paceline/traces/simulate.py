"""Simulation of policies and placements on a trace: the same router on the same batches.

Nothing is modelled: every batch of every layer goes through `paceline.route` (unless its loads fit,
and it would come back as it is), so the counts are those of an attached model with these tokens, to
the assignment. A trace can't tell what a drop does to quality, or to what later layers choose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from paceline.plan import Plan
from paceline.progress import Progress
from paceline.routing import Assignment
from paceline.text import capped_nothing
from paceline.traces.policy_support import check_policies
from paceline.traces.results import SimulatedModel, SimulatedPlan, Simulation
from paceline.traces.simulate_layer import LayerBatches, LayerSimulation, sum_up
from paceline.traces.trace import Trace

Watch = Callable[[str, int, int, Assignment], None]
"""Called with a plan's name, the layer, the number of the batch, and the assignment."""

SCHEMA = "paceline-simulate/1"
AXES = {
    "device_peak_to_mean": "largest device by rows / mean over devices before any cap; mean: sum "
    "over batches of the largest / sum of the means; p50, p95, max over batches",
    "gain": "sum over batches and layers of the reference's largest device / this plan's largest, "
    "on the same devices",
    "dropped_share": "dropped assignments / the model's own, over batches and layers",
    "gate_mass_lost": "1 - sum of gate scores kept / of all, over batches and layers",
    "most_active_experts": "experts with a row on the device with the most of them, mean over "
    "batches (overall: and layers); _before: without any cap",
    "lost_tokens": "rows of a layer whose every assignment was dropped",
}
"""The reduction behind each figure, in every result."""


def simulate(
    trace: Trace,
    plans: Mapping[str, Plan],
    *,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> Simulation:
    """Route every batch of a trace under every plan, and sum up loads and losses.

    Memory holds one chunk, and three small numbers per plan, layer and batch.

    Args:
        trace: of choices or scores.
        plans: name -> policies and placements; where a plan has no placement every expert is a
            device, and where it has no policy nothing is capped. Gains refer to the first plan, so
            all must have its devices.
        progress: called with the layers done, their number, and a layer's name.
        watch: called with every assignment.

    Raises:
        ValueError: if the trace has counts alone, a plan doesn't fit it, plans differ in their
            devices, or a policy needs what the trace doesn't hold, for example weights.

    >>> from paceline import CapacityPolicy
    >>> from paceline.traces import sample
    >>> capped = Plan((CapacityPolicy(capacity_factor=1.0),), (8,))
    >>> found = simulate(sample("esft_v2lite_law"), {"none": Plan(placements=(8,)), "cap": capped})
    >>> round(found.plans["cap"].overall.device_peak_to_mean.mean, 2)
    1.0
    """
    header = trace.header
    if not header.per_token:
        raise ValueError(
            f"{trace.where} holds {header.content}, not what each token chose: record it with "
            "--content choices to try policies on it."
        )
    if not plans:
        raise ValueError("plans must name at least one plan, got {}")
    for plan in plans.values():
        plan.check_model(
            [layer.experts for layer in header.layers], [layer.k or 1 for layer in header.layers]
        )
    check_policies(trace, {f"plan {name!r}": plan.policies for name, plan in plans.items()})
    simulations = {
        name: [
            LayerSimulation.of(layer, index, plan, name)
            for index, layer in enumerate(header.layers)
        ]
        for name, plan in plans.items()
    }
    _check_same_devices(simulations)
    step = 0
    for number, chunk in enumerate(trace.chunks):
        for layer in range(len(header.layers)):
            batches = LayerBatches.of(header, chunk, layer, step)
            for name, layers in simulations.items():
                layers[layer].add(batches, _watch_layer(watch, name, layer, step))
            if progress is not None:
                done = number * len(header.layers) + layer + 1
                total = max(done, len(trace.chunks) * len(header.layers))
                progress(done, total, header.layers[layer].name)
        step += chunk.batches
    if step == 0:
        raise ValueError(f"{trace.where} has no batches.")
    results = {name: _result(layers) for name, layers in simulations.items()}
    reference = next(iter(results.values())).overall.busiest_rows_after
    for result in results.values():
        result.overall.gain = reference / max(1, result.overall.busiest_rows_after)
    return Simulation(
        schema=SCHEMA,
        trace=trace.where,
        model=header.model,
        notes=list(header.notes),
        batches=step,
        batches_are=header.batches,
        axes=AXES,
        reference=next(iter(plans)),
        plans=results,
    )


def _check_same_devices(simulations: Mapping[str, Sequence[LayerSimulation]]) -> None:
    """Refuse plans for other devices than the first: fewer or more change every load.

    Raises:
        ValueError: naming a layer where two plans differ.
    """
    reference, *others = simulations.items()
    for name, layers in others:
        for first, layer in zip(reference[1], layers, strict=True):
            wanted, devices = first.placement.num_devices, layer.placement.num_devices
            if devices != wanted:
                raise ValueError(
                    f"plans must be for the same number of devices to be compared, got {wanted} "
                    f"({reference[0]}) and {devices} ({name}) in {layer.name}"
                )


def _watch_layer(
    watch: Watch | None, name: str, layer: int, first: int
) -> Callable[[int, Assignment], None] | None:
    """Return `watch` for one plan, layer and chunk."""
    if watch is None:
        return None
    return lambda batch, assignment: watch(name, layer, first + batch, assignment)


def _result(layers: Sequence[LayerSimulation]) -> SimulatedPlan:
    """Sum up a plan's layers."""
    first = layers[0]
    alike = len({layer.policy for layer in layers}) == 1
    return SimulatedPlan(
        policy=str(first.policy) if alike else "by layer",
        devices=first.placement.num_devices,
        min_expert_load=first.policy.resolved_min_expert_load("cpu"),
        overall=SimulatedModel(
            busiest_rows_before=sum(layer.busiest_before for layer in layers),
            busiest_rows_after=sum(layer.busiest_after for layer in layers),
            **sum_up(layers),
        ),
        layers=[layer.result() for layer in layers],
        capped_nothing=_idle(layers),
    )


def _idle(layers: Sequence[LayerSimulation]) -> str | None:
    """Return why policies that may cap dropped nothing, None where one did or none can."""
    capping = [layer for layer in layers if layer.policy.caps and layer.policy.pool != "request"]
    if len(capping) < len([layer for layer in layers if layer.policy.caps]) or not capping:
        return None
    factors = [layer for layer in capping if layer.policy.capacity_factor is not None]
    if any(layer.dropped or layer.extras for layer in capping):
        return None
    batches = max(1, sum(layer.batches for layer in capping))
    experts = max(layer.placement.num_experts for layer in capping)
    return capped_nothing(
        min(layer.policy.resolved_min_expert_load("cpu") for layer in capping),
        sum(layer.assignments for layer in capping) / batches / experts,
        sum(layer.tokens for layer in capping) / batches,
        factor=bool(factors),
    )
