"""What a plan is to reach, and for which model on which devices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.analysis.cost import LayerShape
from paceline.analysis.hardware import Hardware
from paceline.analysis.placing import Wanted


@dataclass(frozen=True)
class Goal:
    """What a plan is to reach.

    Attributes:
        wanted: devices, replicas to compare with, groups.
        shape: of each layer.
        hardware: of each device.
        max_mass_loss: share of the gate mass that a cap may lose.
        min_gain: share of the step's MoE time below which nothing is worth it.
        pool: of a cap.

    Raises:
        ValueError: if a share is outside [0, 1), or the pool is unknown.

    >>> from paceline.analysis.hardware import PRESETS
    >>> Goal(Wanted(8), LayerShape(2048, 1408, 64, 6), PRESETS["h20"]).min_expert_load
    8
    """

    wanted: Wanted
    shape: LayerShape
    hardware: Hardware
    max_mass_loss: float = 0.01
    min_gain: float = 0.05
    pool: str = "batch"

    def __post_init__(self) -> None:
        if not 0 <= self.max_mass_loss < 1:
            raise ValueError(
                f"max_mass_loss={self.max_mass_loss} is not allowed: it is from 0 to below 1."
            )
        if not 0 <= self.min_gain < 1:
            raise ValueError(f"min_gain={self.min_gain} is not allowed: it is from 0 to below 1.")
        if self.pool not in ("batch", "request", "source"):
            raise ValueError(f"pool={self.pool!r} is not allowed: it is batch, request or source.")

    @property
    def min_expert_load(self) -> int:
        """Mean rows an expert below which a cap is left off: there rows take less than a fifth of
        the experts' time, and the rest is reading weights.

        >>> from paceline.analysis.hardware import PRESETS
        >>> Goal(Wanted(8), LayerShape(2048, 1408, 64, 6), PRESETS["h100"]).min_expert_load
        60
        """
        reading = self.hardware.per_expert + self.shape.expert_bytes / self.hardware.memory
        row = self.shape.row_flops / self.hardware.reachable(self.shape.precision)
        return math.ceil(reading / row / 4)
