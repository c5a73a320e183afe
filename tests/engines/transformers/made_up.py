"""Small made-up models: some follow the seam of Transformers, some only look like it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPERTS, TOP_K, HIDDEN = 8, 2, 16


class Router(nn.Module):
    """Scores by a softmax, chooses, and gives (logits, weights, ids)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        logits = F.linear(hidden, self.weight)
        weights, ids = self.score(logits).topk(TOP_K, -1)
        return logits, weights / weights.sum(-1, keepdim=True), ids

    def score(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)


class SigmoidRouter(Router):
    def score(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()


class ScaledRouter(Router):
    """Weights carry a factor of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(EXPERTS) + 0.5)

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        logits, weights, ids = super().forward(hidden)
        return logits, weights * self.scale[ids], ids


class RandomRouter(Router):
    """Weights that follow from nothing."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        logits, _, ids = super().forward(hidden)
        return logits, (hidden[:, :TOP_K] * 37).sin().abs() + 0.1, ids


class NoLogitsRouter(Router):
    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return super().forward(hidden)[1:]


class Experts(nn.Module):
    """A loop that knows no sentinel: an id out of range is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for e in chosen.unique().tolist():
            token, slot = (chosen == e).nonzero(as_tuple=True)
            out.index_add_(
                0, token, F.linear(hidden[token], self.weight[e]) * weights[token, slot, None]
            )
        return out


class ClampingExperts(Experts):
    """Computes a sentinel like any other id, and trusts its weight to be 0."""

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden, chosen.clamp(max=EXPERTS - 1), weights)


class Block(nn.Module):
    """Follows the seam."""

    def __init__(
        self, router: type[nn.Module] = Router, experts: type[nn.Module] = Experts
    ) -> None:
        super().__init__()
        self.gate, self.experts = router(), experts()

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, HIDDEN)
        _, weights, ids = self.gate(flat)
        return self.experts(flat, ids, weights).view_as(hidden)


class KeywordBlock(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, HIDDEN)
        _, weights, ids = self.gate(flat)
        return self.experts(weights=weights, chosen=ids, hidden=flat).view_as(hidden)


class BareBlock(Block):
    """Its router gives no logits."""

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, HIDDEN)
        weights, ids = self.gate(flat)
        return self.experts(flat, ids, weights).view_as(hidden)


class NeverCalls(Block):
    """Its forward computes the experts itself, as a fused kernel would."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.experts.weight[0]


class NeedsMore(Block):
    """A whole decoder layer: can't be tried on hidden states alone, and never calls its experts."""

    def forward(self, hidden: Tensor, position: Tensor | None = None) -> Tensor:
        if position is None:
            raise TypeError("position is needed")
        _, _, ids = self.gate(hidden.reshape(-1, HIDDEN))
        return hidden @ self.experts.weight[int(ids[0, 0])]


class DenseScores(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, HIDDEN)
        logits = self.gate(flat)[0].softmax(-1)
        return self.experts(flat, logits, logits).view_as(hidden)


class Unrouted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


class Model(nn.Module):
    """Two layers of a block between an embedding and nothing."""

    def __init__(self, block: Any = Block, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, HIDDEN)
        self.layers = nn.ModuleList(block() for _ in range(layers))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


class Positioned(Model):
    """A model whose layers take positions."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden, torch.arange(input_ids.shape[1]))
        return hidden


class Dense(Model):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(HIDDEN, HIDDEN))


def tokens(batch: int = 4, length: int = 16) -> Tensor:
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(3))
