"""What a plan does to one layer of a trace, batch by batch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.balance import straggler_loss
from paceline.engines.settings import read_placement
from paceline.placement import ExpertPlacement
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.routing import Assignment, RoutingInputs, route
from paceline.routing.budget import places_on_host, units_of
from paceline.routing.candidates import topk_candidates
from paceline.routing.capacity import tokens_needed
from paceline.routing.route import check_binding
from paceline.traces.trace import Trace

Array = npt.NDArray[Any]
Watch = Callable[[str, int, int, Assignment], None]
"""Told the plan's name, the layer, the number of the batch and what was decided."""

UNCAPPED = CapacityPolicy(mode="observe")


@dataclass(frozen=True, eq=False)
class Given:
    """One batch of a layer, and what every plan has in common.

    Attributes:
        inputs: for `route`.
        loads: [experts] int64 the model's own assignments.
        rows: tokens with at least one.
        tokens: valid tokens.
        mass: [tokens, k] float64 gate scores (else weights) of assignments; None: unknown.
    """

    inputs: RoutingInputs
    loads: Array
    rows: int
    tokens: int
    mass: Array | None

    @classmethod
    def of(cls, inputs: RoutingInputs, weighed: bool) -> Given:
        experts, ids = inputs.experts(None), inputs.topk_ids.numpy().astype(np.int64)
        offered = (ids >= 0) & (ids < experts)
        if inputs.valid is not None:
            offered &= inputs.valid.numpy()[:, None]
        loads = np.bincount(ids[offered], minlength=experts)
        tokens = len(ids) if inputs.valid is None else int(inputs.valid.sum())
        mass = None
        if weighed:
            known = topk_candidates(inputs, experts)
            scores = known.weights if known.scores is None else known.scores
            mass = np.where(offered, np.nan_to_num(scores.double().numpy(), nan=0.0), 0.0)
        return cls(inputs, loads, int(offered.any(1).sum()), tokens, mass)


class Tally:
    """What one plan does to one layer, over the batches so far."""

    def __init__(
        self, name: str, layer: str, policy: CapacityPolicy, placement: ExpertPlacement, k: int
    ) -> None:
        check_binding(policy, placement, k)
        self.name, self.layer, self.policy, self.placement, self.k = (
            name,
            layer,
            policy,
            placement,
            k,
        )
        self.peaks = array("f")  # before and after, by turns, in rows
        self.means = array("f")  # rows a device before
        self.tokens = self.assignments = self.dropped = self.extras = 0
        self.too_small = self.lost_tokens = 0
        self.busiest_before = self.busiest_after = 0
        self.loads_after = np.zeros(placement.num_experts, dtype=np.int64)
        self.mass = self.mass_kept = 0.0
        self.weighed = True
        self._device_of = np.array(placement.expert_to_device)
        self._units = units_of(placement, policy.unit)
        self._few = tokens_needed(
            policy.resolved_min_expert_load("cpu"), k, placement.num_experts
        )  # fmt: skip

    @classmethod
    def of(cls, trace: Trace, plan: Plan, name: str, layer: int) -> Tally:
        """For a layer of a trace, if the plan fits it."""
        described = trace.header.layers[layer]
        try:
            policy = plan.policy_of(layer) or UNCAPPED
            placement = read_placement(plan.placement_of(layer), described.experts, described.name)
            if placement is None:
                placement = ExpertPlacement.per_expert(described.experts)
            return cls(name, described.name, policy, placement, described.k or 1)
        except ValueError as error:
            raise ValueError(f"plan {name!r}, {described.name}: {error}") from None

    def add(self, given: Given, step: int, watch: Watch | None, layer: int) -> None:
        """Count one batch."""
        if self.policy.caps and self.policy.keep == "weight" and given.mass is None:
            raise ValueError(
                f'plan {self.name!r}: keep="weight" needs weights, which the trace doesn\'t hold.'
            )
        after, lost = given.loads, 0
        kept_mass = whole = 0.0 if given.mass is None else float(given.mass.sum())
        if watch is not None or not self._loses_nothing(given):
            a = self._route(given)
            if watch is not None:
                watch(self.name, layer, step, a)
            bounded = a.bounded_ids.numpy()
            kept = bounded < self.placement.num_experts
            after = np.bincount(bounded[kept], minlength=self.placement.num_experts)
            genuine = kept[:, : self.k]
            self.dropped += int(given.loads.sum()) - int(genuine.sum())
            self.extras += int(kept[:, self.k :].sum())
            lost = given.rows - int(kept.any(1).sum())
            if given.mass is not None:
                kept_mass = float(given.mass[genuine].sum())
        before_peak, after_peak = self._busiest(given.loads), self._busiest(after)
        assignments = int(given.loads.sum())
        self.peaks.extend((before_peak, after_peak))
        self.means.append(assignments / self.placement.num_devices)
        self.busiest_before += before_peak
        self.busiest_after += after_peak
        self.tokens += given.tokens
        self.assignments += assignments
        self.lost_tokens += lost
        self.loads_after += after
        by_batch = self.policy.caps and self.policy.pool != "request"
        self.too_small += by_batch and given.tokens < self._few
        self.weighed &= given.mass is not None
        self.mass += whole
        self.mass_kept += kept_mass

    def _route(self, given: Given) -> Assignment:
        try:
            return route(given.inputs, self.policy, self.placement)
        except ValueError as error:
            raise ValueError(f"plan {self.name!r}, {self.layer}: {error}") from None

    def _loses_nothing(self, given: Given) -> bool:
        """Whether `route` certainly leaves this batch as it is: most of the small ones."""
        policy = self.policy
        if not policy.caps:
            return True
        if policy.expand is not None or policy.pool != "batch":
            return False
        if policy.keep == "score" and given.mass is None:
            return False  # route says what is missing
        factor = policy.capacity_factor
        if given.tokens < self._few or factor is None:
            return True
        places = places_on_host(self._units, (factor,), self.k, given.tokens)[0]
        loads = np.bincount(self._units.on_host, given.loads, minlength=self._units.count)
        return bool((loads <= places).all())

    def _busiest(self, loads: Array) -> int:
        devices = np.bincount(self._device_of, loads, minlength=self.placement.num_devices)
        return int(devices.max())

    def result(self) -> dict[str, Any]:
        """Sums, and figures over batches, as JSON-able values."""
        means = np.frombuffer(self.means, np.float32)
        before, after = np.frombuffer(self.peaks, np.float32).reshape(-1, 2).T
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
            "expert_loads_after": self.loads_after.tolist(),
            "device_peak_to_mean_before": spread(before, means, self.busiest_before, total),
            "device_peak_to_mean": spread(after, means, self.busiest_after, total),
            "straggler_loss": straggler_loss(self.busiest_after / total) if total else 0.0,
        }


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
