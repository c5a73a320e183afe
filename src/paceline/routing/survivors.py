"""What fits the capacities: the candidates that survive a cap, as every backend returns them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.routing.candidates import Candidates


class Survivors(NamedTuple):
    """The candidates that stay.

    Attributes:
        ids: [tokens, slots] int64, num_experts where nothing is kept.
        weights: [tokens, slots], 0 where nothing is kept.
        kept: [tokens, slots] bool.
    """

    ids: Tensor
    weights: Tensor
    kept: Tensor

    @classmethod
    def of(cls, candidates: Candidates, kept: Tensor) -> Survivors:
        """The candidates in `kept` [tokens, slots] bool."""
        ids = torch.where(kept, candidates.ids.long(), candidates.num_experts)
        return cls(ids, torch.where(kept, candidates.weights, 0), kept)
