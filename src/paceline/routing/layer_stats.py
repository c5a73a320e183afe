"""What statistics say of one MoE layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class LayerStats:
    """What one layer's experts and devices had to do since statistics were last reset.

    Loads are assignments (token, expert) summed over forwards; "before" is the model's own choice,
    "after" what remains with the policy (in shadow mode: would remain). A peak-to-mean is the load
    of the busiest unit over the mean before, T k / E an expert and T k / D a device for T valid
    tokens and D devices, empty ones too: a layer ends when the device with the most rows does,
    however many experts it hosts. Over forwards it is their mean weighted with tokens (which is the
    ratio of the time spent to the time a perfect balance would take); `worst_` is the max over
    forwards. `straggler_loss` is 1 - 1 / peak-to-mean of the devices. `gate_mass_kept` is over the
    forwards that were routed by a policy, the only ones whose scores were looked at.
    `min_expert_load` is the mean load of an expert below which nothing is capped, as the policy in
    force resolves it for the layer; None where none is in force. `stand_in_distance` is how far
    inputs of dropped assignments were from those of the calibration: the mean squared distance in
    the directions that their stand-ins look at, in units of the variance there: about 1 on text
    like the calibration's; None where no stand-in was used.

    `capped_forwards` are those that a cap ruled, of which `narrowed_forwards` are those that
    max_active did. `active_experts` is how many experts of each device got any token, a mean over
    all forwards, and `most_active_experts` that of each forward's device with the most: what a
    device reads where weights dominate. `tokens_without_expert` lost all their assignments.
    """

    name: str
    forwards: int
    capped_forwards: int
    narrowed_forwards: int
    min_expert_load: float | None
    tokens: int
    assignments: int
    dropped: int
    extras: int
    tokens_without_expert: int
    dropped_share: float
    gate_mass_kept: float
    expert_loads_before: list[int]
    expert_loads_after: list[int]
    device_loads_before: list[int]
    device_loads_after: list[int]
    device_peak_to_mean_before: float
    device_peak_to_mean_after: float
    expert_peak_to_mean_before: float
    expert_peak_to_mean_after: float
    worst_device_peak_to_mean_before: float
    worst_device_peak_to_mean_after: float
    worst_expert_peak_to_mean_before: float
    worst_expert_peak_to_mean_after: float
    straggler_loss_before: float
    straggler_loss_after: float
    active_experts_before: list[float]
    active_experts_after: list[float]
    most_active_experts_before: float
    most_active_experts_after: float
    stand_in_distance: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)
