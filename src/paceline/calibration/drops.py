"""Which assignments caps would drop: the rows that a stand-in is for count more than the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing import RoutingInputs, route

CAPS = (
    CapacityPolicy(capacity_factor=1, min_expert_load=0),
    CapacityPolicy(capacity_factor=1, unit="expert", min_expert_load=0),
)
"""That stand-ins are fitted for, unless others are named."""

KEPT = 0.05
"""Weight of a row that no cap drops; 1 + KEPT that of a row which all drop. Kept rows are many, and
say what an expert does at large, where the few that are dropped don't."""


def drop_weights(
    ids: Tensor,
    metric: Tensor,
    sizes: Sequence[int],
    caps: Sequence[CapacityPolicy],
    placements: Sequence[ExpertPlacement],
) -> Tensor:
    """How much each assignment counts.

    Args:
        ids: [rows, k] the model's choice.
        metric: [rows, k] float32, by which a cap ranks.
        sizes: rows of each batch.
        caps: per device with each of the placements, per expert once.
        placements: of the experts; at least one.

    Returns:
        [rows, k] float32, `KEPT` plus the share of the caps that drop it.

    >>> ids = torch.tensor([[0], [0], [1], [0]])
    >>> pair, metric = ExpertPlacement.per_expert(2), torch.tensor([[0.9], [0.8], [0.7], [0.6]])
    >>> (100 * drop_weights(ids, metric, [4], CAPS[:1], [pair])).round().flatten().tolist()
    [5.0, 5.0, 5.0, 105.0]
    """
    ways = [
        (cap.replace(mode="enforce", compensate=False, keep="score", min_expert_load=0), placement)
        for cap in caps
        for placement in (placements if cap.unit == "device" else placements[:1])
    ]
    dropped = torch.zeros(ids.shape, dtype=torch.float32)
    start = 0
    for size in sizes:
        rows = slice(start, start + size)
        inputs = RoutingInputs(ids[rows], metric[rows], topk_scores=metric[rows])
        for policy, placement in ways:
            dropped[rows] += route(inputs, policy, placement).dropped_slots
        start += size
    return KEPT + dropped / len(ways)
