"""The rows that a MoE layer saw, by expert: inputs, outputs, text, and part to be left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.stand_ins.identity import LayerIdentity


@dataclass(eq=False)
class Seen:
    """What one layer was given in a pass over the texts.

    Attributes:
        run: the layer's experts, as `Pace.replace_experts` hands them.
        hidden: [rows, hidden] on the host, in parts.
        ids: [rows, k], likewise.
        metric: [rows, k] float32 by which a cap ranks them, likewise: gate scores, or combine
            weights where the router's rule is not known.
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
    """Of one expert: x and y [rows, hidden]; text, part and how much it counts [rows]."""

    x: Tensor
    y: Tensor
    text: Tensor
    part: Tensor
    weight: Tensor


class Rows:
    """The rows that a layer saw.

    Args:
        seen: what it was given; its parts are taken over.
        layer: which it is.
        text: [rows] text of each row, -1 for padding.
        part: [rows] part with which it is left out.
        batch: [rows] number of the batch of each row, ascending.

    Attributes:
        ids: [rows, k] the model's choice, padding left out as everywhere.
        metric: [rows, k] by which a cap ranks.
        combine: [rows, k] combine weights.
        sizes: rows of each batch.
        weight: [rows, k] how much each assignment counts; 1, to be set.

    Raises:
        ValueError: if the layer saw other rows than the tokens of the texts.
    """

    def __init__(
        self, seen: Seen, layer: LayerIdentity, text: Tensor, part: Tensor, batch: Tensor
    ) -> None:
        given = (seen.hidden, seen.ids, seen.metric, seen.combine)
        hidden, ids, metric, combine = map(torch.cat, given)
        seen.hidden, seen.ids, seen.metric, seen.combine = [], [], [], []
        if len(hidden) != len(text):
            raise ValueError(
                f"layer {layer.name} saw {len(hidden)} rows of {len(text)} tokens: allowed is one "
                "a token."
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

    def of(self, expert: int) -> ExpertRows:
        """Those that were routed to an expert."""
        chosen = self.ids == expert
        rows = chosen.any(1)
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
