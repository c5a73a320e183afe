"""Rows of a MoE layer by expert (inputs, outputs, text, fold), and their weights in a fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing import RoutingInputs, route
from paceline.stand_ins.identity import LayerIdentity

CAPS = (
    CapacityPolicy(capacity_factor=1, min_expert_load=0),
    CapacityPolicy(capacity_factor=1, unit="expert", min_expert_load=0),
)
"""Default caps that stand-ins are fitted for."""

KEPT = 0.05
"""Weight of a row that no cap drops; a row that all drop has 1 + KEPT. Kept rows are many, and show
an expert's general behaviour, which the few dropped ones don't."""


@dataclass(eq=False)
class Seen:
    """Inputs of one layer's experts in a pass over the texts.

    Attributes:
        run: the layer's experts, as `Pace.replace_experts` passes them.
        hidden: [rows, hidden] on the host, in parts.
        ids: [rows, k], likewise.
        metric: [rows, k] float32 by which a cap ranks them, likewise: gate scores, or combine
            weights where the router's rule is unknown.
        combine: [rows, k] combine weights, likewise.
        device: of the layer.
    """

    run: Any
    hidden: list[Tensor]
    ids: list[Tensor]
    metric: list[Tensor]
    combine: list[Tensor]
    device: torch.device


class ExpertRows(NamedTuple):
    """Rows of one expert: x and y [rows, hidden]; text, part and weight [rows]."""

    x: Tensor
    y: Tensor
    text: Tensor
    part: Tensor
    weight: Tensor


class Rows:
    """The rows of a layer.

    Args:
        seen: inputs of its experts, which this takes over.
        layer: its identity.
        text: [rows] text of each row, -1 for padding.
        part: [rows] part with which it is left out.
        batch: [rows] number of the batch of each row, ascending.

    Attributes:
        ids: [rows, k] the model's choice, padding left out as everywhere.
        metric: [rows, k] by which a cap ranks.
        combine: [rows, k] combine weights.
        sizes: rows of each batch.
        weight: [rows, k] weight of each assignment in a fit; 1 until set.

    Raises:
        ValueError: if the rows are not the tokens of the texts.
    """

    def __init__(
        self, seen: Seen, layer: LayerIdentity, text: Tensor, part: Tensor, batch: Tensor
    ) -> None:
        parts = (seen.hidden, seen.ids, seen.metric, seen.combine)
        hidden, ids, metric, combine = map(torch.cat, parts)
        seen.hidden, seen.ids, seen.metric, seen.combine = [], [], [], []
        if len(hidden) != len(text):
            raise ValueError(
                f"layer {layer.name} must have one row per token, {len(text)}, got {len(hidden)}"
            )
        real = text >= 0
        if not bool(real.all()):
            hidden, ids, metric, combine = hidden[real], ids[real], metric[real], combine[real]
            text, part, batch = text[real], part[real], batch[real]
        self.metric, self.combine = metric, combine
        self.sizes = torch.bincount(batch).tolist()
        self.weight = torch.ones(ids.shape)
        self._seen, self._hidden, self.ids = seen, hidden, ids
        self.layer, self.text, self._part = layer, text, part
        self.hidden = hidden.shape[1]
        self._zero_experts = bool((ids >= layer.num_experts).any())

    def inputs(self, expert: int) -> Tensor:
        """Return the inputs of the rows that were routed to an expert."""
        return self._hidden[(self.ids == expert).any(1)]

    def of(self, expert: int, most: int | None = None) -> ExpertRows:
        """Return the rows that were routed to an expert, at most so many, evenly spread."""
        chosen = self.ids == expert
        rows = chosen.any(1)
        if most is not None and (count := int(rows.sum())) > most:
            some = rows.nonzero().flatten()[torch.arange(most) * count // most]
            rows = torch.zeros_like(rows).index_fill(0, some, True)
        x = self._hidden[rows]
        weight = torch.where(chosen[rows], self.weight[rows], 0).amax(1)
        return ExpertRows(x, self._outputs(x, expert), self.text[rows], self._part[rows], weight)

    def _outputs(self, x: Tensor, expert: int) -> Tensor:
        if len(x) == 0:
            return x
        seen = self._seen
        with torch.no_grad():
            ids = torch.full((len(x), 1), expert, dtype=torch.int64, device=seen.device)
            weights = torch.ones((len(x), 1), dtype=self.combine.dtype, device=seen.device)
            if self._zero_experts:  # LongCat's loop needs two slots: a zero expert takes one
                ids = nn.functional.pad(ids, (0, 1), value=self.layer.num_experts)
                weights = nn.functional.pad(weights, (0, 1))
            out: Tensor = seen.run(x.to(seen.device), ids, weights)
        return out.reshape(x.shape).cpu()


def drop_weights(
    ids: Tensor,
    metric: Tensor,
    sizes: Sequence[int],
    caps: Sequence[CapacityPolicy],
    placements: Sequence[ExpertPlacement],
) -> Tensor:
    """Weigh assignments by how many caps drop them.

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
