"""A calibration of random stand-ins: an engine doesn't ask where they come from."""

from __future__ import annotations

from typing import Any

import torch

from paceline import attach
from paceline.stand_ins.calibration_file import Calibration, LayerCalibration


def made_up(model: Any, rank: int = 3, seed: int = 0) -> Calibration:
    """Of an untouched model, every stand-in as large as an expert's output."""
    rng = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng) * 0.3

    layers = []
    with attach(model) as pace:
        for layer, block in zip(pace.identity(), pace.layers, strict=True):
            count = layer.num_experts
            hidden = next(iter(model.get_submodule(block).gate.parameters())).shape[-1]
            layers.append(
                LayerCalibration(
                    name=layer.name,
                    k=layer.k,
                    router=layer.router,
                    experts=tuple(layer.experts.values()),
                    ridge=0.1,
                    explained=0.5,
                    explained_by_text=(0.5,),
                    placement=(),
                    bias=random(count, hidden),
                    up=random(count, hidden, rank).bfloat16(),
                    down=random(count, rank, hidden).bfloat16(),
                    mean=random(count, hidden),
                    ranks=torch.full((count,), rank),
                    loads=torch.ones(1, count, dtype=torch.int64),
                    output_norm=random(count).abs() + 0.1,
                    residual_norm=random(count).abs() + 0.1,
                    residual_log=random(count),
                    residual_slope=random(count, hidden).bfloat16(),
                    explained_by_expert=torch.full((count,), 0.5),
                )
            )
    return Calibration(type(model).__name__, ("text",), (1,), "parts", tuple(layers))
