"""Simulation of one layer of a trace under a plan, batch by batch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.balance import Peaks, Spread, share, spread, straggler_loss, unit_matrix
from paceline.placement import ExpertPlacement
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.routing import Assignment, RoutingInputs, route
from paceline.routing.active import most_active
from paceline.routing.assignment import topk_candidates
from paceline.routing.limits import capacities_on_host, tokens_needed, units_of
from paceline.routing.route import check_binding
from paceline.settings import read_placement
from paceline.traces.chunk import Chunk
from paceline.traces.format import Header, Layer
from paceline.traces.results import SimulatedLayer

Array = npt.NDArray[Any]
UNCAPPED = CapacityPolicy(mode="observe")
_ROW_BY_ROW = ("score", "weight", "first", "last")
"""Values of `keep` that don't depend on the number of the batch, as a random choice does."""
_SMALL = 256
"""Tokens per batch below which routing many batches at once is quicker than one by one."""


@dataclass(frozen=True, eq=False)
class LayerBatches:
    """Input of one layer in the batches of a chunk; the same for every plan.

    Attributes:
        inputs: of all batches, one after the other.
        inputs_of: inputs of one batch, by its number in the chunk.
        batch_of: [tokens] int64 batch of each row.
        loads: [batches, experts] int64 the model's own assignments.
        rows: [batches] tokens with at least one assignment.
        tokens: [batches] valid tokens.
        mass: [tokens, k] float64 gate scores (else weights) of assignments; None: unknown.
    """

    inputs: RoutingInputs
    inputs_of: Callable[[int], RoutingInputs]
    batch_of: Array
    loads: Array
    rows: Array
    tokens: Array
    mass: Array | None

    @classmethod
    def of(cls, header: Header, chunk: Chunk, layer: int, first_step: int) -> LayerBatches:
        """Read one layer of a chunk, whose first batch has the number `first_step`."""
        inputs = chunk.inputs_of_rows(header, layer, 0, chunk.tokens)
        batches, experts = chunk.batches, inputs.experts(None)
        ids = inputs.topk_ids.numpy().astype(np.int64)
        batch_of = np.repeat(np.arange(batches), np.diff(chunk.starts.numpy()))
        valid = np.ones(len(ids), bool) if inputs.valid is None else inputs.valid.numpy()
        offered = (ids >= 0) & (ids < experts) & valid[:, None]
        mass = None
        if not (chunk.weights is None and chunk.topk_scores is None and chunk.scores is None):
            known = topk_candidates(inputs, experts)
            scores = known.weights if known.scores is None else known.scores
            mass = np.where(offered, np.nan_to_num(scores.double().numpy(), nan=0.0), 0.0)
        return cls(
            inputs=inputs,
            inputs_of=lambda batch: chunk.inputs(header, layer, batch, first_step + batch),
            batch_of=batch_of,
            loads=_table(batch_of, ids, offered, batches, experts),
            rows=np.bincount(batch_of[offered.any(1)], minlength=batches),
            tokens=np.bincount(batch_of[valid], minlength=batches),
            mass=mass,
        )


class LayerSimulation:
    """Sums over batches of one layer under one plan."""

    def __init__(
        self, name: str, layer: Layer, policy: CapacityPolicy, placement: ExpertPlacement
    ) -> None:
        self.k = layer.k or 1
        check_binding(policy, placement, self.k)
        self.name, self.layer, self.policy, self.placement = name, layer.name, policy, placement
        self.before, self.after = array("f"), array("f")  # rows of the busiest device, by batch
        self.means = array("f")  # mean rows per device before any cap, by batch
        self.tokens = self.assignments = self.dropped = self.extras = 0
        self.too_small = self.ruled_by_active = self.lost_tokens = 0
        self.batches = self.active_before = self.active_after = 0  # of the device with the most
        self.busiest_before = self.busiest_after = 0
        self.loads_after = np.zeros(placement.num_experts, dtype=np.int64)
        self.mass = self.mass_kept = 0.0
        self.weighed = True
        self._host = unit_matrix(placement.expert_to_device, placement.num_devices)
        self._units = units_of(placement, policy.unit)
        self._unit = unit_matrix(tuple(self._units.on_host.tolist()), self._units.count)
        enough = policy.resolved_min_expert_load("cpu")
        self._few = tokens_needed(enough, self.k, placement.num_experts)

    @classmethod
    def of(cls, layer: Layer, index: int, plan: Plan, name: str) -> LayerSimulation:
        """Make the simulation of a layer.

        Raises:
            ValueError: if the plan doesn't fit the layer.
        """
        try:
            policy = plan.policy_of(index) or UNCAPPED
            placement = read_placement(plan.placement_of(index), layer.experts, layer.name)
            if placement is None:
                placement = ExpertPlacement.per_expert(layer.experts)
            return cls(name, layer, policy, placement)
        except ValueError as error:
            raise ValueError(f"plan {name!r}, {layer.name}: {error}") from None

    def add(
        self, batches: LayerBatches, watch: Callable[[int, Assignment], None] | None = None
    ) -> None:
        """Count the batches of a chunk; `watch` gets each batch's index and assignment."""
        experts = self.placement.num_experts
        after, lost = batches.loads.copy(), 0
        kept_mass = mass = 0.0 if batches.mass is None else float(batches.mass.sum())
        for rows, bounded in self._routed(batches, watch):
            batch_of = batches.batch_of[rows]
            kept = bounded < experts
            genuine = kept[:, : self.k]
            touched = np.unique(batch_of)
            after[touched] = _table(batch_of, bounded, kept, len(after), experts)[touched]
            self.dropped += int(batches.loads[touched].sum()) - int(genuine.sum())
            self.extras += int(kept[:, self.k :].sum())
            lost += int(batches.rows[touched].sum()) - int(kept.any(1).sum())
            if batches.mass is not None:
                kept_mass -= float(batches.mass[rows][~genuine].sum())
        before_peaks = (batches.loads @ self._host).max(1)
        after_peaks = (after @ self._host).max(1)
        self.batches += len(after)
        self.active_before += int(self._active(batches.loads).max(1).sum())
        self.active_after += int(self._active(after).max(1).sum())
        assignments = batches.loads.sum(1)
        self.before.extend(before_peaks)
        self.after.extend(after_peaks)
        self.means.extend(assignments / self.placement.num_devices)
        self.busiest_before += int(before_peaks.sum())
        self.busiest_after += int(after_peaks.sum())
        self.tokens += int(batches.tokens.sum())
        self.assignments += int(assignments.sum())
        self.lost_tokens += lost
        self.loads_after += after.sum(0)
        few = int((batches.tokens < self._few).sum())
        if self.policy.max_active is not None and self.policy.caps:
            self.ruled_by_active += few
        elif self.policy.caps and self.policy.pool != "request":
            self.too_small += few
        self.weighed &= batches.mass is not None
        self.mass += mass
        self.mass_kept += kept_mass

    def _routed(
        self, batches: LayerBatches, watch: Callable[[int, Assignment], None] | None
    ) -> Iterator[tuple[Array | slice, Array]]:
        """Yield rows and their bounded ids [rows, slots] of batches that may lose or gain any."""
        policy = self.policy
        if watch is None and not policy.caps:
            return
        routed = np.ones(len(batches.loads), bool)
        by_batch = policy.caps and policy.expand is None and policy.pool == "batch"
        if watch is None and by_batch and (batches.mass is not None or policy.keep != "score"):
            routed = self._over_full(batches)
        if watch is None and by_batch and policy.factor and policy.keep in _ROW_BY_ROW:
            small = batches.tokens < self._few  # where max_active may rule: batch by batch
            many = routed & ~small
            if many.any() and batches.tokens[many].mean() < _SMALL:
                # a request is judged by its own tokens, as a batch is: one call for all of them
                rows = slice(None) if many.all() else np.flatnonzero(many[batches.batch_of])
                inputs = _labelled(batches.inputs, batches.batch_of, rows)
                alone = policy.replace(pool="request", max_active=None)
                yield rows, self._route(inputs, alone).bounded_ids.numpy()
                routed = routed & small
        for batch in np.flatnonzero(routed).tolist():
            start, end = np.searchsorted(batches.batch_of, (batch, batch + 1))
            assignment = self._route(batches.inputs_of(batch), policy)
            if watch is not None:
                watch(batch, assignment)
            yield slice(int(start), int(end)), assignment.bounded_ids.numpy()

    def _over_full(self, batches: LayerBatches) -> Array:
        """Mark the batches where a unit has more than its places, [batches] bool."""
        factor, few = self.policy.capacity_factor, batches.tokens < self._few
        full = np.zeros(len(few), bool)
        if factor is not None:
            sizes, index = np.unique(batches.tokens, return_inverse=True)
            places = np.stack(
                [capacities_on_host(self._units, (factor,), self.k, int(n))[0] for n in sizes]
            )[index]
            full = ((batches.loads @ self._unit) > places).any(1) & ~few
        most = self.policy.max_active
        if most is not None:
            allowed = np.array([most_active(most, size) for size in self.placement.sizes])
            full = full | ((self._active(batches.loads) > allowed).any(1) & few)
        return np.asarray(full)

    def _active(self, loads: Array) -> Array:
        """Count the experts of each device that get any row, [batches, devices]."""
        return np.asarray((loads > 0).astype(np.int64) @ self._host)

    def _route(self, inputs: RoutingInputs, policy: CapacityPolicy) -> Assignment:
        try:
            return route(inputs, policy, self.placement)
        except ValueError as error:
            raise ValueError(f"plan {self.name!r}, {self.layer}: {error}") from None

    def result(self) -> SimulatedLayer:
        """Return the sums, and figures over batches."""
        return SimulatedLayer(
            name=self.layer,
            tokens=self.tokens,
            expert_loads_after=self.loads_after.tolist(),
            **sum_up([self]),
        )


def _labelled(inputs: RoutingInputs, batch_of: Array, rows: Array | slice) -> RoutingInputs:
    """Take some rows of the inputs, each batch as one request."""
    chosen = rows if isinstance(rows, slice) else torch.from_numpy(rows)
    changed: dict[str, Any] = {"token_request": torch.from_numpy(batch_of[rows])}
    for name in ("topk_ids", "topk_weights", "scores", "topk_scores", "valid", "token_source",
                 "token_priority", "token_decode"):  # fmt: skip
        tensor = getattr(inputs, name)
        changed[name] = None if tensor is None else tensor[chosen]
    return replace(inputs, **changed)


def _table(batch_of: Array, ids: Array, counted: Array, batches: int, experts: int) -> Array:
    """Count how many of the `counted` ids [tokens, slots] name each expert, [batches, experts]."""
    place = (batch_of[:, None] * experts + ids)[counted]
    return np.bincount(place, minlength=batches * experts).reshape(batches, experts)


def sum_up(layers: Sequence[LayerSimulation]) -> dict[str, Any]:
    """Sum up layers: the fields that `SimulatedLayer` and `SimulatedModel` have in common."""
    assignments = sum(layer.assignments for layer in layers)
    dropped = sum(layer.dropped for layer in layers)
    batches = sum(layer.batches for layer in layers)
    mean = sum(layer.assignments / layer.placement.num_devices for layer in layers)
    before = sum(layer.busiest_before for layer in layers)
    after = sum(layer.busiest_after for layer in layers)
    mass = sum(layer.mass for layer in layers)
    lost = 1 - sum(layer.mass_kept for layer in layers) / mass if mass > 0 else 0.0
    return {
        "assignments": assignments,
        "dropped": dropped,
        "extras": sum(layer.extras for layer in layers),
        "dropped_share": share(dropped, assignments),
        "gate_mass_lost": lost if all(layer.weighed for layer in layers) else None,
        "lost_tokens": sum(layer.lost_tokens for layer in layers),
        "batches_below_min_expert_load": sum(layer.too_small for layer in layers),
        "batches_ruled_by_max_active": sum(layer.ruled_by_active for layer in layers),
        "most_active_experts_before": share(sum(x.active_before for x in layers), batches),
        "most_active_experts": share(sum(x.active_after for x in layers), batches),
        "device_peak_to_mean_before": _spread([layer.before for layer in layers], layers, before),
        "device_peak_to_mean": _spread([layer.after for layer in layers], layers, after),
        "straggler_loss": straggler_loss(share(after, mean)),
    }


def _spread(
    busiest: Sequence[array[float]], layers: Sequence[LayerSimulation], rows: int
) -> Spread:
    """Sum up the peaks of all batches of all layers; `rows` is the exact sum of the busiest."""
    tables = [np.frombuffer(table, np.float32) for table in busiest]
    means = [np.frombuffer(layer.means, np.float32) for layer in layers]
    total = sum(layer.assignments / layer.placement.num_devices for layer in layers)
    over_batches = Peaks(("batch",), np.concatenate(tables), np.concatenate(means))
    return spread(over_batches, rows / total if total else None)
