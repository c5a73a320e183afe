"""Calibrated stand-ins of one layer, added after its experts have run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.stand_ins.calibration_file import LayerCalibration
from paceline.stand_ins.compensation import Compensation
from paceline.stand_ins.identity import expert_fingerprints, router_fingerprint


def fingerprints(block: nn.Module | None, w13: Tensor, w2: Tensor) -> tuple[str | None, list[str]]:
    """Return those of a layer's router, None if it isn't found, and of each expert of this worker.

    Args:
        block: MoE block of the model, with its router as `gate` or `router`.
        w13: [experts, 2 x width, hidden], as it was loaded.
        w2: [experts, hidden, width].
    """
    weights = nn.Module()  # with the names that Transformers uses
    for name, weight in (("gate_up_proj", w13), ("down_proj", w2)):
        setattr(weights, name, nn.Parameter(weight.data, requires_grad=False))
    found = (getattr(block, name, None) for name in ("gate", "router"))
    router = next((module for module in found if isinstance(module, nn.Module)), None)
    experts = expert_fingerprints(weights, len(w13))
    return None if router is None else router_fingerprint(router), experts


class StandIns:
    """Stand-ins of one layer, and the dropped assignments from the cap until the experts have run.

    Args:
        layer: calibration of the layer.
        experts: global ids of the experts whose stand-ins this worker adds.
    """

    def __init__(self, layer: LayerCalibration, experts: list[int], dtype: torch.dtype) -> None:
        self._stand_ins = Compensation(layer, experts, torch.empty(0, dtype=dtype))
        self._dropped: tuple[Tensor, Tensor, Tensor] | None = None

    def expect(self, ids: Tensor, weights: Tensor, dropped: Tensor) -> None:
        """Note what the experts of this forward won't compute.

        Args:
            ids: [tokens, k] the model's own choice.
            weights: [tokens, k] its combine weights.
            dropped: [tokens, k] bool.
        """
        self._dropped = ids.clone(), weights.clone(), dropped

    def add(self, output: Tensor, hidden: Tensor) -> None:
        """Add the stand-ins of dropped assignments to [tokens, hidden] `output`, in place."""
        dropped, self._dropped = self._dropped, None
        if dropped is not None:
            output.copy_(self._stand_ins(output, hidden, *dropped))

    def norms(self, hidden: Tensor, compensate: bool) -> Tensor:
        """Return the norms of what drops leave out, as `Compensation.norms` does."""
        return self._stand_ins.norms(hidden, compensate)
