"""Statistics of one MoE layer, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class LayerStats:
    """Statistics of one layer since they were last reset.

    Loads are (token, expert) assignments summed over forwards; "before" is the model's own choice,
    "after" what the policy keeps (in shadow mode: would keep). A peak-to-mean is the load of the
    busiest unit over the mean before, T k / E per expert and T k / D per device for T valid tokens,
    E experts and D devices, idle ones included. Over forwards it is the sum of the busiest loads
    over the sum of the means: the time spent over the time of perfect balance.

    Attributes:
        capped_forwards: to which a cap applied.
        narrowed_forwards: those of them to which max_active applied.
        min_expert_load: mean tokens per expert below which nothing is capped, as the policy in
            force resolves it for the layer; None without one.
        tokens_without_expert: tokens all of whose assignments were dropped.
        gate_mass_kept: over forwards routed by a policy, the only ones with known scores.
        worst_device_peak_to_mean_before: highest of any forward; so are the others with `worst_`.
        straggler_loss_before: 1 - 1 / peak-to-mean of the devices; after likewise.
        active_experts_before: [devices] experts with any token, mean over all forwards.
        most_active_experts_before: that of each forward's device with the most: what a device
            reads where reading weights dominates.
        stand_in_distance: mean squared distance of the inputs of dropped assignments from those of
            the calibration, in the directions of their stand-ins and in units of the variance
            there: about 1 on similar text; None where no stand-in was used.
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
        """Return plain values, ready for JSON."""
        return asdict(self)
