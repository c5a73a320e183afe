"""Detection of routing that says nothing about real traffic.

Identical rows, untrained weights and routers without a preference all give loads, and often very
uneven ones. Three signs, each far from what trained models show on text:

* two tokens of a batch choose the very same experts far more often than in any text;
* a token's gate scores are all but equal;
* every normalisation weight is a constant, as a random initialisation leaves it
  (`constant_norms`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.routing import RoutingInputs

FEW_TOKENS = 16  # below, a chance says nothing
SAME_CHOICE, ONE_CHOICE, SETS = 0.1, 0.5, 4.0
"""Highest chance that two tokens of a batch choose alike, plus SETS / number of sets; ONE_CHOICE is
for one expert per token, where a favourite expert is a choice of its own.

Measured: at most 0.013 on nine texts of the demo model and two DeepSeek-V2-Lite traces, 0.022 on
gpt-oss decode; 0.5 and more where a prompt repeats 11 tokens or fewer, 1 where rows are identical.
"""
FLAT = 0.05
"""Standard deviation / mean of a token's gate scores: 1.2 and more in a trained model, below 0.02
with dummy weights; 0.13 to 0.7 where a random initialisation is left as it is."""


class LayerEvidence:
    """Choices of the tokens of one layer, added up over batches; see the module.

    Args:
        num_experts: of the layer, E.
        k: experts per token.
    """

    def __init__(self, num_experts: int, k: int) -> None:
        self.num_experts, self.k = num_experts, k
        self._pairs = self._alike = self._rows = 0
        self._largest = self._scored = 0
        self._spread = 0.0
        self._distinct: set[int] = set()

    def add(self, inputs: RoutingInputs) -> None:
        """Count one batch of this layer."""
        ids, scores, valid = inputs.topk_ids.long(), inputs.scores, inputs.valid
        if scores is None and self.k > 1:
            scores = inputs.topk_weights  # where the router's rule is unknown
        if valid is not None:
            ids = ids[valid]
            scores = None if scores is None else scores[valid]
        rows = len(ids)
        if not rows:
            return
        choice, count = torch.unique(_hash_sets(ids), return_counts=True)
        self._rows += rows
        self._pairs += rows * (rows - 1)
        self._alike += int((count * (count - 1)).sum())
        self._largest += int(count.max())
        self._distinct.update(choice.tolist())
        if scores is not None:
            wide = scores.double()
            relative = wide.std(-1, correction=0) / wide.mean(-1).abs()
            self._spread += float(relative.nan_to_num(nan=0.0, posinf=0.0).sum())
            self._scored += rows

    @property
    def same_choice(self) -> float:
        """Chance that two tokens of a batch choose the same set of experts."""
        return self._alike / self._pairs if self._pairs else 0.0

    @property
    def identical(self) -> bool:
        """True if tokens choose alike more often than those of any text."""
        sets = math.comb(self.num_experts, self.k)
        enough = self._rows >= FEW_TOKENS and sets > 1
        least = ONE_CHOICE if self.k == 1 else SAME_CHOICE
        return enough and self.same_choice > min(0.9, least + SETS / sets)

    @property
    def flat(self) -> bool:
        """True if the router hardly prefers an expert (equal scores are a rule of the model's)."""
        return self._scored >= FEW_TOKENS and 0 < self._spread / self._scored < FLAT

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able figures of the sets of experts chosen, and of the scores."""
        return {
            "distinct_choices": len(self._distinct),
            "largest_choice_share": self._largest / self._rows if self._rows else 0.0,
            "same_choice_chance": self.same_choice,
            "score_spread": self._spread / self._scored if self._scored else None,
        }


def constant_norms(model: nn.Module) -> bool:
    """Return True if every normalisation weight of a model is one constant, so it is untrained.

    False where the model has none. A trained model whose normalisation was folded into its other
    weights has such constants too.

    >>> constant_norms(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    True
    """
    weights = [
        weight.detach()
        for module in model.modules()
        if "norm" in type(module).__name__.lower()
        for weight in [getattr(module, "weight", None)]
        if isinstance(weight, Tensor) and weight.dim() == 1 and weight.numel() > 1
        if not weight.is_meta
    ]
    return bool(weights) and all(bool(weight.min() == weight.max()) for weight in weights)


def reasons(model: nn.Module, layers: Sequence[LayerEvidence]) -> list[str]:
    """List the reasons why the loads of these layers say nothing, as parts of a sentence.

    A sign in fewer than half of the layers is no reason.
    """
    found = []
    if constant_norms(model):
        found.append(
            "the model looks untrained: all its normalisation weights are constants, as a random "
            "initialisation leaves them"
        )
    identical = [layer for layer in layers if layer.identical]
    if identical and 2 * len(identical) >= len(layers):
        chance = sum(layer.same_choice for layer in identical) / len(identical)
        found.append(
            f"in {len(identical)} of {len(layers)} layers two tokens choose the very same experts "
            f"with a chance of {chance:.0%}, as identical rows or dummy weights make them"
        )
    flat = [layer for layer in layers if layer.flat]
    if flat and 2 * len(flat) >= len(layers):
        found.append(
            f"in {len(flat)} of {len(layers)} layers the router prefers no expert: the gate scores "
            "of a token are all but equal"
        )
    return found


def _hash_sets(ids: Tensor) -> Tensor:
    """Hash each set of experts, whatever its order, [tokens] int64."""
    sets = torch.zeros(ids.shape[:1], dtype=torch.int64, device=ids.device)
    for column in ids.sort(1).values.unbind(1):
        # a multiplicative hash that wraps: two of a batch's sets share one with a chance of 2^-40
        sets = (sets + column + 1) * 6364136223846793005
        sets = sets ^ (sets >> 29)
    return sets
