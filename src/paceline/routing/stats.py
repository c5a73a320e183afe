"""Loads of one MoE layer, accumulated over forwards and read when asked for."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.balance import Peaks, share, straggler_loss
from paceline.placement import ExpertPlacement
from paceline.routing.assignment import (
    Assignment,
    ForwardCounts,
    count_experts,
    count_on_host,
    on_host,
)
from paceline.routing.inputs import expert_ids
from paceline.routing.layer_stats import LayerStats
from paceline.routing.limits import INT64_MAX

_FLUSH_FORWARDS, _FLUSH_ROWS = 256, 1 << 16
"""Uncapped forwards are counted in bulk: a decode step then costs one list append."""

_COUNTS = (
    "forwards", "capped", "narrowed", "tokens", "dropped", "extras", "tokens_without_expert"
)  # fmt: skip
_PEAKS = (
    "device_peak_to_mean_before", "device_peak_to_mean_after",
    "expert_peak_to_mean_before", "expert_peak_to_mean_after",
)  # fmt: skip


class LoadAccumulator:
    """Sum of the loads of one layer over forwards; any number of threads may add to it.

    Args:
        name: of the layer.
        placement: expert -> device.
        k: experts per token.
        device: where the counts are kept.

    Attributes:
        min_expert_load: of the policy in force, resolved, for `LayerStats`; to be set.
    """

    def __init__(
        self, name: str, placement: ExpertPlacement, k: int, device: torch.device | str
    ) -> None:
        self.name, self.placement, self.k = name, placement, k
        self.min_expert_load: float | None = None
        self._device = torch.device(device)
        # Held wherever a count is read or written, except in code that a compiler traces.
        self._lock = threading.Lock()
        with torch.inference_mode(False):  # counts go on outside of it
            self._device_of = torch.tensor(placement.expert_to_device, device=device)
        self.reset()

    def reset(self) -> None:
        """Set all counts to zero."""
        experts, device = self.placement.num_experts, self._device
        with self._lock, torch.inference_mode(False):
            self._loads = torch.zeros((2, experts), dtype=torch.int64, device=device)
            self._counts = torch.zeros(len(_COUNTS), dtype=torch.int64, device=device)
            self._busiest = torch.zeros(len(_PEAKS), dtype=torch.int64, device=device)
            self._mass = torch.zeros(2, dtype=torch.float64, device=device)  # all, and kept
            self._distance = torch.zeros(2, dtype=torch.float64, device=device)  # sum, of how many
            self._worst = torch.zeros(len(_PEAKS), dtype=torch.float64, device=device)
            devices = self.placement.num_devices  # and the device with the most, in each forward
            self._active = torch.zeros((2, devices + 1), dtype=torch.int64, device=device)
            self._pending: list[tuple[Tensor, Tensor | None]] = []
            self._pending_rows = 0
            self._whole: list[Tensor] = []  # gate mass of forwards that max_active left whole
            self._counted: list[ForwardCounts] = []  # routed forwards on a CPU

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: its own counts, all of one moment."""
        with self._lock, torch.inference_mode(False):
            state = {name: value for name, value in vars(self).items() if name != "_lock"}
            for name in (
                "_loads",
                "_counts",
                "_busiest",
                "_mass",
                "_worst",
                "_active",
                "_distance",
            ):
                state[name] = state[name].clone()
            for name in ("_pending", "_whole", "_counted"):
                state[name] = list(state[name])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def observe(
        self, topk_ids: Tensor, valid: Tensor | None = None, whole: Tensor | None = None
    ) -> None:
        """Count a forward that ran as the model chose; the tensors must not change afterwards.

        Args:
            topk_ids: [tokens, k] expert ids, any integer dtype.
            valid: [tokens] bool, or None: every token.
            whole: [tokens, k] gate mass of a forward to which max_active applied and which it left
                whole, every token valid; on a CPU.
        """
        if not (isinstance(topk_ids, Tensor) and topk_ids.dtype is torch.int64):
            topk_ids = expert_ids(topk_ids)
        if torch.compiler.is_compiling():
            self._count_one(topk_ids, valid)  # a growing list would recompile at every forward
            return
        with self._lock:
            self._pending.append((topk_ids, valid))
            if whole is not None:
                self._whole.append(whole.detach())
            self._pending_rows += topk_ids.shape[0]
            if len(self._pending) >= _FLUSH_FORWARDS or self._pending_rows >= _FLUSH_ROWS:
                self._flush()

    def add(self, assignment: Assignment) -> None:
        """Count a forward that was routed (enforced or in shadow)."""
        if on_host(assignment):
            counted = count_on_host(assignment)
            with self._lock:
                self._counted.append(counted)
                if len(self._counted) >= _FLUSH_FORWARDS:
                    self._flush()
            return
        before = assignment.expert_loads_before
        after = assignment.expert_loads_after
        whole, kept = assignment.gate_mass
        tokens = assignment.pools.total
        limited = assignment.max_active_applies.any()
        capped = limited | (assignment.capacity != INT64_MAX).any()
        counts = torch.stack(
            [
                torch.ones_like(tokens),
                capped.long(),
                limited.long(),
                tokens,
                assignment.dropped,
                assignment.extras,
                assignment.tokens_without_expert,
            ]
        )
        mass = torch.stack([whole, kept])
        if torch.compiler.is_compiling():
            self._accumulate(before[None], after[None], tokens[None], counts, mass)
            return
        with self._lock:
            self._accumulate(before[None], after[None], tokens[None], counts, mass)

    def add_distance(self, distance: Tensor, assignments: Tensor) -> None:
        """Add the distance of inputs of stand-ins from those of the calibration.

        Args:
            distance: 0-d sum of squared distances.
            assignments: 0-d number of them.
        """
        more = torch.stack([distance.double(), assignments.double()]).to(self._device)
        if torch.compiler.is_compiling():
            self._distance += more
            return
        with self._lock:
            self._distance += more

    def result(self) -> LayerStats:
        """Return the statistics so far (this waits for the device)."""
        with self._lock:
            self._flush()
            counts = dict(zip(_COUNTS, self._counts.tolist(), strict=True))
            busiest = self._busiest.double()
            mass, mass_kept = self._mass.tolist()
            worst = dict(zip(_PEAKS, self._worst.tolist(), strict=True))
            before, after = self._loads.clone()
            active = (self._active.double() / max(1, counts["forwards"])).tolist()
            distance, compensated = self._distance.tolist()
        means = self._means(torch.tensor([counts["tokens"]], device=busiest.device))[:, 0]
        peaks = dict(zip(_PEAKS, Peaks(("peak",), busiest, means).ratio.tolist(), strict=True))
        assignments = int(before.sum())
        return LayerStats(
            name=self.name,
            forwards=counts["forwards"],
            capped_forwards=counts["capped"],
            narrowed_forwards=counts["narrowed"],
            min_expert_load=self.min_expert_load,
            tokens=counts["tokens"],
            assignments=assignments,
            dropped=counts["dropped"],
            extras=counts["extras"],
            tokens_without_expert=counts["tokens_without_expert"],
            dropped_share=share(counts["dropped"], assignments),
            gate_mass_kept=mass_kept / mass if mass else 1.0,
            expert_loads_before=before.tolist(),
            expert_loads_after=after.tolist(),
            device_loads_before=self._per_device(before[None])[0].tolist(),
            device_loads_after=self._per_device(after[None])[0].tolist(),
            **peaks,
            **{f"worst_{name}": value for name, value in worst.items()},
            straggler_loss_before=straggler_loss(peaks["device_peak_to_mean_before"]),
            straggler_loss_after=straggler_loss(peaks["device_peak_to_mean_after"]),
            active_experts_before=active[0][:-1],
            active_experts_after=active[1][:-1],
            most_active_experts_before=active[0][-1],
            most_active_experts_after=active[1][-1],
            stand_in_distance=distance / compensated if compensated else None,
        )

    def _flush(self) -> None:
        """Count the pending forwards."""
        if self._pending:
            pending, self._pending, self._pending_rows = self._pending, [], 0
            self._count(pending)
        if self._whole:
            whole, self._whole = self._whole, []
            for name in ("capped", "narrowed"):
                self._counts[_COUNTS.index(name)] += len(whole)
            self._mass += sum(m.float().nan_to_num(nan=0.0).double().sum() for m in whole)
        if self._counted:
            tallied, self._counted = self._counted, []
            before, after, counts, mass = zip(*tallied, strict=True)
            counted = torch.tensor(counts)
            self._accumulate(
                torch.from_numpy(np.stack(before)),
                torch.from_numpy(np.stack(after)),
                counted[:, _COUNTS.index("tokens")],
                counted.sum(0),
                torch.tensor(mass, dtype=torch.float64).sum(0),
            )

    def _count_one(self, ids: Tensor, valid: Tensor | None) -> None:
        """Count a forward in a graph, for any number of tokens."""
        ids = ids.to(self._device)
        counted = None if valid is None else valid.to(self._device).unsqueeze(1)
        loads = count_experts(ids, counted, self.placement.num_experts)[None]
        tokens = torch.ones_like(ids[:, :1]) if counted is None else counted
        tokens = tokens.long().sum().reshape(1)
        self._accumulate(
            loads, loads, tokens, self._counts_of(1, tokens), torch.zeros_like(self._mass)
        )

    def _counts_of(self, forwards: int, tokens: Tensor) -> Tensor:
        """Return the counts of forwards that ran as the model chose, with [forwards] tokens."""
        counts = torch.zeros_like(self._counts)
        counts[_COUNTS.index("forwards")] = forwards
        counts[_COUNTS.index("tokens")] = tokens.sum()
        return counts

    def _count(self, pending: list[tuple[Tensor, Tensor | None]]) -> None:
        """Count pending forwards in one pass, as [forwards, experts] tables."""
        experts, forwards = self.placement.num_experts, len(pending)
        rows = [ids.shape[0] for ids, _ in pending]
        forward = torch.arange(forwards, device=self._device)  # of each row, below
        if len(set(rows)) == 1:
            tokens = torch.full_like(forward, rows[0])
            forward = forward.repeat_interleave(rows[0])
        else:  # the device is not waited for
            pinned = self._device.type == "cuda"
            tokens = torch.tensor(rows, pin_memory=pinned).to(self._device, non_blocking=True)
            forward = forward.repeat_interleave(tokens, output_size=sum(rows))
        ids = torch.cat([ids for ids, _ in pending]).to(self._device, torch.int64)
        counted = (ids >= 0) & (ids < experts)
        if any(valid is not None for _, valid in pending):
            valid = torch.cat(
                [
                    torch.ones(n, dtype=torch.bool, device=ids.device) if valid is None else valid
                    for n, (ids, valid) in zip(rows, pending, strict=True)
                ]
            ).to(self._device)
            counted &= valid.unsqueeze(1)
            tokens = torch.zeros_like(tokens).scatter_add(0, forward, valid.long())
        bins = torch.where(counted, ids + (forward * experts).unsqueeze(1), forwards * experts)
        loads = torch.zeros(forwards * experts + 1, dtype=torch.int64, device=self._device)
        loads = loads.scatter_add(0, bins.flatten(), torch.ones_like(bins).flatten())
        loads = loads[:-1].view(forwards, experts)
        counts = self._counts_of(forwards, tokens)
        self._accumulate(loads, loads, tokens, counts, torch.zeros_like(self._mass))

    def _accumulate(
        self, before: Tensor, after: Tensor, tokens: Tensor, counts: Tensor, mass: Tensor
    ) -> None:
        """Add [forwards, experts] loads, [forwards] tokens, the counts and the gate mass."""
        active, busiest = self._active_of(before), self._busiest_of(before)
        if after is before:
            total, active = before.sum(0).expand(2, -1), active.expand(2, -1)
            peaks = torch.stack([busiest[0], busiest[0], busiest[1], busiest[1]])
        else:
            total = torch.stack([before.sum(0), after.sum(0)])
            active = torch.stack([active, self._active_of(after)])
            left = self._busiest_of(after)
            peaks = torch.stack([busiest[0], left[0], busiest[1], left[1]])
        self._loads += total
        self._active += active
        self._counts += counts
        self._busiest += peaks.sum(1)
        self._mass += mass
        ratios = (peaks / self._means(tokens)).nan_to_num(nan=0.0)  # 0 / 0 without tokens
        self._worst = torch.maximum(self._worst, ratios.amax(1))

    def _busiest_of(self, loads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the [forwards] loads of the busiest device and of the busiest expert."""
        return self._per_device(loads).amax(1), loads.amax(1)

    def _means(self, tokens: Tensor) -> Tensor:
        """Return the [peaks, forwards] mean loads before, T * k / units, of [forwards] tokens."""
        devices, experts = self.placement.num_devices, self.placement.num_experts
        by_device, by_expert = ((tokens * self.k).double() / units for units in (devices, experts))
        return torch.stack([by_device, by_device, by_expert, by_expert])

    def _active_of(self, loads: Tensor) -> Tensor:
        """Count experts with any load: [devices + 1], the last entry the most of a device."""
        devices = self._per_device((loads > 0).long())
        return torch.cat([devices.sum(0), devices.amax(1).sum()[None]])

    def _per_device(self, loads: Tensor) -> Tensor:
        """Sum [forwards, experts] loads to [forwards, devices]."""
        shape = (loads.shape[0], self.placement.num_devices)
        empty = torch.zeros(shape, dtype=loads.dtype, device=loads.device)
        return empty.scatter_add(1, self._device_of.expand_as(loads), loads)
