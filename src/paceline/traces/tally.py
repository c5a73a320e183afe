"""What a plan does to one layer of a trace, batch by batch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.balance import straggler_loss
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

Array = npt.NDArray[Any]
UNCAPPED = CapacityPolicy(mode="observe")
_ROW_BY_ROW = ("score", "weight", "first", "last")
"""Orders that don't depend on the number of the batch, as a random one does."""
_SMALL = 256
"""Tokens a batch below which routing many batches at once is quicker than one by one."""


@dataclass(frozen=True, eq=False)
class Given:
    """What a layer got in the batches of a chunk, and what every plan has in common.

    Attributes:
        inputs: of all batches, one after the other.
        inputs_of: those of one batch.
        batch_of: [tokens] int64 batch of each row.
        loads: [batches, experts] int64 the model's own assignments.
        rows: [batches] tokens with at least one.
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
    def of(cls, header: Header, chunk: Chunk, layer: int, first_step: int) -> Given:
        """For one layer of a chunk, whose first batch has the number `first_step`."""
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


class Tally:
    """What one plan does to one layer, over the batches so far."""

    def __init__(
        self, name: str, layer: Layer, policy: CapacityPolicy, placement: ExpertPlacement
    ) -> None:
        self.k = layer.k or 1
        check_binding(policy, placement, self.k)
        self.name, self.layer, self.policy, self.placement = name, layer.name, policy, placement
        self.before, self.after = array("f"), array("f")  # rows of the busiest device, by batch
        self.means = array("f")  # rows a device before
        self.tokens = self.assignments = self.dropped = self.extras = 0
        self.too_small = self.narrowed = self.lost_tokens = 0
        self.batches = self.active_before = self.active_after = 0  # of the device with the most
        self.busiest_before = self.busiest_after = 0
        self.loads_after = np.zeros(placement.num_experts, dtype=np.int64)
        self.mass = self.mass_kept = 0.0
        self.weighed = True
        self._host = _host(placement.expert_to_device, placement.num_devices)
        self._units = units_of(placement, policy.unit)
        self._unit = _host(tuple(self._units.on_host.tolist()), self._units.count)
        enough = policy.resolved_min_expert_load("cpu")
        self._few = tokens_needed(enough, self.k, placement.num_experts)

    @classmethod
    def of(cls, layer: Layer, index: int, plan: Plan, name: str) -> Tally:
        """For a layer of a trace, if the plan fits it."""
        try:
            policy = plan.policy_of(index) or UNCAPPED
            placement = read_placement(plan.placement_of(index), layer.experts, layer.name)
            if placement is None:
                placement = ExpertPlacement.per_expert(layer.experts)
            return cls(name, layer, policy, placement)
        except ValueError as error:
            raise ValueError(f"plan {name!r}, {layer.name}: {error}") from None

    def add(self, given: Given, told: Callable[[int, Assignment], None] | None = None) -> None:
        """Count the batches of a chunk; `told` gets each batch's index and assignment."""
        experts = self.placement.num_experts
        after, lost = given.loads.copy(), 0
        kept_mass = mass = 0.0 if given.mass is None else float(given.mass.sum())
        for rows, bounded in self._routed(given, told):
            batch_of = given.batch_of[rows]
            kept = bounded < experts
            genuine = kept[:, : self.k]
            touched = np.unique(batch_of)
            after[touched] = _table(batch_of, bounded, kept, len(after), experts)[touched]
            self.dropped += int(given.loads[touched].sum()) - int(genuine.sum())
            self.extras += int(kept[:, self.k :].sum())
            lost += int(given.rows[touched].sum()) - int(kept.any(1).sum())
            if given.mass is not None:
                kept_mass -= float(given.mass[rows][~genuine].sum())
        before_peaks, after_peaks = ((loads @ self._host).max(1) for loads in (given.loads, after))
        self.batches += len(after)
        self.active_before += int(self._active(given.loads).max(1).sum())
        self.active_after += int(self._active(after).max(1).sum())
        assignments = given.loads.sum(1)
        self.before.extend(before_peaks)
        self.after.extend(after_peaks)
        self.means.extend(assignments / self.placement.num_devices)
        self.busiest_before += int(before_peaks.sum())
        self.busiest_after += int(after_peaks.sum())
        self.tokens += int(given.tokens.sum())
        self.assignments += int(assignments.sum())
        self.lost_tokens += lost
        self.loads_after += after.sum(0)
        few = int((given.tokens < self._few).sum())
        if self.policy.max_active is not None and self.policy.caps:
            self.narrowed += few
        elif self.policy.caps and self.policy.pool != "request":
            self.too_small += few
        self.weighed &= given.mass is not None
        self.mass += mass
        self.mass_kept += kept_mass

    def _routed(
        self, given: Given, told: Callable[[int, Assignment], None] | None
    ) -> Iterator[tuple[Array | slice, Array]]:
        """Rows and their bounded ids [rows, slots], of every batch that may lose or gain any."""
        policy = self.policy
        if told is None and not policy.caps:
            return
        wanted = np.ones(len(given.loads), bool)
        by_batch = policy.caps and policy.expand is None and policy.pool == "batch"
        if told is None and by_batch and (given.mass is not None or policy.keep != "score"):
            wanted = self._over_full(given)
        if told is None and by_batch and policy.factor and policy.keep in _ROW_BY_ROW:
            small = given.tokens < self._few  # where max_active may rule: batch by batch
            many = wanted & ~small
            if many.any() and given.tokens[many].mean() < _SMALL:
                # a request is judged by its own tokens, as a batch is: one call for all of them
                rows = slice(None) if many.all() else np.flatnonzero(many[given.batch_of])
                inputs = _labelled(given.inputs, given.batch_of, rows)
                alone = policy.replace(pool="request", max_active=None)
                yield rows, self._route(inputs, alone).bounded_ids.numpy()
                wanted = wanted & small
        for batch in np.flatnonzero(wanted).tolist():
            start, end = np.searchsorted(given.batch_of, (batch, batch + 1))
            assignment = self._route(given.inputs_of(batch), policy)
            if told is not None:
                told(batch, assignment)
            yield slice(int(start), int(end)), assignment.bounded_ids.numpy()

    def _over_full(self, given: Given) -> Array:
        """[batches] bool: whether a unit has more than its places; others come back as they are."""
        factor, few = self.policy.capacity_factor, given.tokens < self._few
        full = np.zeros(len(few), bool)
        if factor is not None:
            sizes, index = np.unique(given.tokens, return_inverse=True)
            places = np.stack(
                [capacities_on_host(self._units, (factor,), self.k, int(n))[0] for n in sizes]
            )[index]
            full = ((given.loads @ self._unit) > places).any(1) & ~few
        most = self.policy.max_active
        if most is not None:
            allowed = np.array([most_active(most, size) for size in self.placement.sizes])
            full = full | ((self._active(given.loads) > allowed).any(1) & few)
        return np.asarray(full)

    def _active(self, loads: Array) -> Array:
        """[batches, devices] experts of each device that get any row."""
        return np.asarray((loads > 0).astype(np.int64) @ self._host)

    def _route(self, inputs: RoutingInputs, policy: CapacityPolicy) -> Assignment:
        try:
            return route(inputs, policy, self.placement)
        except ValueError as error:
            raise ValueError(f"plan {self.name!r}, {self.layer}: {error}") from None

    def result(self) -> dict[str, Any]:
        """Sums, and figures over batches, as JSON-able values."""
        means = np.frombuffer(self.means, np.float32)
        before, after = (np.frombuffer(x, np.float32) for x in (self.before, self.after))
        total = self.assignments / self.placement.num_devices
        return {
            "name": self.layer,
            "tokens": self.tokens,
            "assignments": self.assignments,
            "dropped": self.dropped,
            "extras": self.extras,
            "dropped_share": self.dropped / max(1, self.assignments),
            "gate_mass_lost": gate_mass_lost([self]),
            "lost_tokens": self.lost_tokens,
            "batches_below_min_expert_load": self.too_small,
            "batches_ruled_by_max_active": self.narrowed,
            "most_active_experts_before": self.active_before / max(1, self.batches),
            "most_active_experts": self.active_after / max(1, self.batches),
            "expert_loads_after": self.loads_after.tolist(),
            "device_peak_to_mean_before": spread(before, means, self.busiest_before, total),
            "device_peak_to_mean": spread(after, means, self.busiest_after, total),
            "straggler_loss": straggler_loss(self.busiest_after / total) if total else 0.0,
        }


def _labelled(inputs: RoutingInputs, batch_of: Array, rows: Array | slice) -> RoutingInputs:
    """Some rows of the inputs, whose request is their batch."""
    chosen = rows if isinstance(rows, slice) else torch.from_numpy(rows)
    changed: dict[str, Any] = {"token_request": torch.from_numpy(batch_of[rows])}
    for name in ("topk_ids", "topk_weights", "scores", "topk_scores", "valid", "token_source",
                 "token_priority", "token_decode"):  # fmt: skip
        tensor = getattr(inputs, name)
        changed[name] = None if tensor is None else tensor[chosen]
    return replace(inputs, **changed)


def _table(batch_of: Array, ids: Array, counted: Array, batches: int, experts: int) -> Array:
    """[batches, experts] int64 how many of the `counted` ids [tokens, slots] name each expert."""
    place = (batch_of[:, None] * experts + ids)[counted]
    return np.bincount(place, minlength=batches * experts).reshape(batches, experts)


@lru_cache(maxsize=256)
def _host(unit_of: tuple[int, ...], units: int) -> Array:
    """[experts, units] int64: 1 where a unit hosts an expert."""
    table = np.zeros((len(unit_of), units), dtype=np.int64)
    table[np.arange(len(unit_of)), np.array(unit_of)] = 1
    return table


def gate_mass_lost(tallies: Sequence[Tally]) -> float | None:
    """Share of the gate mass that was dropped, None where it is unknown."""
    if not all(tally.weighed for tally in tallies):
        return None
    mass = sum(tally.mass for tally in tallies)
    return 1 - sum(tally.mass_kept for tally in tallies) / mass if mass > 0 else 0.0


def spread(peaks: Array, means: Array, busiest: int, total: float) -> dict[str, float | None]:
    """Peak-to-mean weighted by time, and its percentiles over batches (and layers)."""
    busy = means > 0
    if not busy.any():
        return {"mean": None, "p50": None, "p95": None, "max": None}
    ratios = peaks[busy] / means[busy]
    return {
        "mean": busiest / total,
        "p50": float(np.percentile(ratios, 50)),
        "p95": float(np.percentile(ratios, 95)),
        "max": float(ratios.max()),
    }
