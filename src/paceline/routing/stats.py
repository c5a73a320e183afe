"""Loads of one MoE layer, accumulated on the device and read when asked for."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.balance import straggler_loss
from paceline.placement import ExpertPlacement
from paceline.routing.assignment import Assignment, count_experts
from paceline.routing.host_tally import Tally, on_host, tally
from paceline.routing.inputs import expert_ids
from paceline.routing.layer_stats import LayerStats

_FLUSH_FORWARDS, _FLUSH_ROWS = 256, 1 << 16
"""Uncapped forwards are counted in bulk: a decode step then costs one list append."""

_COUNTS = (
    "forwards", "capped", "narrowed", "tokens", "dropped", "extras", "tokens_without_expert"
)  # fmt: skip
_PEAKS = ("device_before", "device_after", "expert_before", "expert_after")
_SUMS = ("tokens", *_PEAKS, "mass", "mass_kept")


class LoadAccumulator:
    """Adds up the loads of one layer over forwards, of any number of threads at once.

    Args:
        name: of the layer.
        placement: expert -> device; every expert a device where the user gave none.
        k: experts a token.
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
        # Taken by all that reads or writes a count, but for what a compiler traces.
        self._lock = threading.Lock()
        with torch.inference_mode(False):  # counts go on outside of it
            self._device_of = torch.tensor(placement.expert_to_device, device=device)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        experts, device = self.placement.num_experts, self._device
        with self._lock, torch.inference_mode(False):
            self._loads = torch.zeros((2, experts), dtype=torch.int64, device=device)
            self._counts = torch.zeros(len(_COUNTS), dtype=torch.int64, device=device)
            self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
            self._distance = torch.zeros(2, dtype=torch.float64, device=device)  # sum, of how many
            self._worst = torch.zeros(len(_PEAKS), dtype=torch.float64, device=device)
            devices = self.placement.num_devices  # and the device with the most, in each forward
            self._active = torch.zeros((2, devices + 1), dtype=torch.int64, device=device)
            self._pending: list[tuple[Tensor, Tensor | None]] = []
            self._pending_rows = 0
            self._whole: list[Tensor] = []  # gate mass of those that max_active left whole
            self._tallied: list[Tally] = []  # of routed forwards, on a CPU

    def __getstate__(self) -> dict[str, Any]:
        """What a copy starts with: counts of its own, all of one moment."""
        with self._lock, torch.inference_mode(False):
            state = {name: value for name, value in vars(self).items() if name != "_lock"}
            for name in ("_loads", "_counts", "_sums", "_worst", "_active", "_distance"):
                state[name] = state[name].clone()
            for name in ("_pending", "_whole", "_tallied"):
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
            whole: [tokens, k] gate mass, where max_active ruled and every token counts; on a CPU.
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
            counted = tally(assignment)
            with self._lock:
                self._tallied.append(counted)
                if len(self._tallied) >= _FLUSH_FORWARDS:
                    self._flush()
            return
        before = assignment.expert_loads_before
        after = assignment.expert_loads_after
        whole, kept = assignment.gate_mass
        tokens = assignment.pools.total
        narrowed = assignment.narrowed.any()
        capped = narrowed | (assignment.capacity != torch.iinfo(torch.int64).max).any()
        counts = torch.stack(
            [
                torch.ones_like(tokens),
                capped.long(),
                narrowed.long(),
                tokens,
                assignment.dropped,
                assignment.extras,
                assignment.tokens_without_expert,
            ]
        )
        mass = torch.stack([whole, kept])
        if torch.compiler.is_compiling():
            self._tally(before[None], after[None], tokens[None], counts, mass)
            return
        with self._lock:
            self._tally(before[None], after[None], tokens[None], counts, mass)

    def add_distance(self, distance: Tensor, assignments: Tensor) -> None:
        """Count how far the inputs of stand-ins were from those of the calibration.

        Args:
            distance: 0-d sum of squared distances.
            assignments: 0-d, of how many.
        """
        told = torch.stack([distance.double(), assignments.double()]).to(self._device)
        if torch.compiler.is_compiling():
            self._distance += told
            return
        with self._lock:
            self._distance += told

    def result(self) -> LayerStats:
        """The statistics so far (this waits for the device)."""
        with self._lock:
            self._flush()
            counts = dict(zip(_COUNTS, self._counts.tolist(), strict=True))
            sums = dict(zip(_SUMS, self._sums.tolist(), strict=True))
            worst = dict(zip(_PEAKS, self._worst.tolist(), strict=True))
            before, after = self._loads.clone()
            active = (self._active.double() / max(1, counts["forwards"])).tolist()
            distance, compensated = self._distance.tolist()

        def peak(name: str) -> float:
            """Time-weighted mean over forwards; without tokens nothing waits."""
            return sums[name] / sums["tokens"] if sums["tokens"] else 1.0

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
            dropped_share=counts["dropped"] / assignments if assignments else 0.0,
            gate_mass_kept=sums["mass_kept"] / sums["mass"] if sums["mass"] else 1.0,
            expert_loads_before=before.tolist(),
            expert_loads_after=after.tolist(),
            device_loads_before=self._per_device(before[None])[0].tolist(),
            device_loads_after=self._per_device(after[None])[0].tolist(),
            device_peak_to_mean_before=peak("device_before"),
            device_peak_to_mean_after=peak("device_after"),
            expert_peak_to_mean_before=peak("expert_before"),
            expert_peak_to_mean_after=peak("expert_after"),
            worst_device_peak_to_mean_before=worst["device_before"],
            worst_device_peak_to_mean_after=worst["device_after"],
            worst_expert_peak_to_mean_before=worst["expert_before"],
            worst_expert_peak_to_mean_after=worst["expert_after"],
            straggler_loss_before=straggler_loss(peak("device_before")),
            straggler_loss_after=straggler_loss(peak("device_after")),
            active_experts_before=active[0][:-1],
            active_experts_after=active[1][:-1],
            most_active_experts_before=active[0][-1],
            most_active_experts_after=active[1][-1],
            stand_in_distance=distance / compensated if compensated else None,
        )

    def _flush(self) -> None:
        """Count the forwards that wait."""
        if self._pending:
            pending, self._pending, self._pending_rows = self._pending, [], 0
            self._count(pending)
        if self._whole:
            whole, self._whole = self._whole, []
            for name in ("capped", "narrowed"):
                self._counts[_COUNTS.index(name)] += len(whole)
            self._sums[-2:] += sum(m.float().nan_to_num(nan=0.0).double().sum() for m in whole)
        if self._tallied:
            tallied, self._tallied = self._tallied, []
            before, after, counts, mass = zip(*tallied, strict=True)
            counted = torch.tensor(counts)
            self._tally(
                torch.from_numpy(np.stack(before)),
                torch.from_numpy(np.stack(after)),
                counted[:, _COUNTS.index("tokens")],
                counted.sum(0),
                torch.tensor(mass, dtype=torch.float64).sum(0),
            )

    def _count_one(self, ids: Tensor, valid: Tensor | None) -> None:
        """Count a forward of a number of tokens that a compiler takes as any number."""
        ids = ids.to(self._device)
        counted = None if valid is None else valid.to(self._device).unsqueeze(1)
        loads = count_experts(ids, counted, self.placement.num_experts)[None]
        tokens = torch.ones_like(ids[:, :1]) if counted is None else counted
        tokens = tokens.long().sum().reshape(1)
        self._tally(
            loads, loads, tokens, self._counts_of(1, tokens), torch.zeros_like(self._sums[:2])
        )

    def _counts_of(self, forwards: int, tokens: Tensor) -> Tensor:
        """[counts] of forwards that nothing was done to, with [forwards] tokens."""
        counts = torch.zeros_like(self._counts)
        counts[_COUNTS.index("forwards")] = forwards
        counts[_COUNTS.index("tokens")] = tokens.sum()
        return counts

    def _count(self, pending: list[tuple[Tensor, Tensor | None]]) -> None:
        """Count some forwards, all in one pass of [forwards, experts] tables."""
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
        self._tally(loads, loads, tokens, counts, torch.zeros_like(self._sums[:2]))

    def _tally(
        self, before: Tensor, after: Tensor, tokens: Tensor, counts: Tensor, mass: Tensor
    ) -> None:
        """Add [forwards, experts] loads, [forwards] tokens, the counts and the gate mass."""
        peaks = self._peaks(before)
        active = self._active_of(before)
        if after is before:
            total, active = before.sum(0).expand(2, -1), active.expand(2, -1)
            busiest = [peaks[0], peaks[0], peaks[1], peaks[1]]
        else:
            total = torch.stack([before.sum(0), after.sum(0)])
            remaining = self._peaks(after)
            active = torch.stack([active, self._active_of(after)])
            busiest = [peaks[0], remaining[0], peaks[1], remaining[1]]
        self._loads += total
        self._active += active
        self._counts += counts
        weighted = torch.stack(busiest) / self.k  # [peaks, forwards] peak-to-mean times tokens
        self._sums += torch.cat([tokens.sum().double()[None], weighted.sum(1), mass])
        ratios = weighted / tokens.clamp(min=1)
        self._worst = torch.maximum(self._worst, ratios.amax(1))

    def _peaks(self, loads: Tensor) -> tuple[Tensor, Tensor]:
        """[forwards] of the busiest device and expert: load / mean times T k."""
        device = self._per_device(loads).amax(1).double() * self.placement.num_devices
        return device, loads.amax(1).double() * self.placement.num_experts

    def _active_of(self, loads: Tensor) -> Tensor:
        """[devices + 1] experts with any load, summed over forwards; last, the most of a device."""
        devices = self._per_device((loads > 0).long())
        return torch.cat([devices.sum(0), devices.amax(1).sum()[None]])

    def _per_device(self, loads: Tensor) -> Tensor:
        """[forwards, experts] -> [forwards, devices] loads."""
        shape = (loads.shape[0], self.placement.num_devices)
        empty = torch.zeros(shape, dtype=loads.dtype, device=loads.device)
        return empty.scatter_add(1, self._device_of.expand_as(loads), loads)
