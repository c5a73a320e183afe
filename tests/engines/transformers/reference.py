"""An untouched model under a cap made by hand: a NumPy oracle weighs what is dropped with zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Decide = Callable[[int], tuple[np.ndarray, np.ndarray] | None]
"""Rows of a forward -> (valid [rows] bool, pool [rows] int), None where nothing is capped."""


def kept_by_hand(
    ids: np.ndarray, scores: np.ndarray, factor: str, experts: int, valid: Any, pool: Any
) -> np.ndarray:
    """[tokens, k] bool: Token Drop per expert, by score, ties to the smaller token, then slot."""
    tokens, k = ids.shape
    kept = np.zeros((tokens, k), bool)
    for p in set(pool[valid].tolist()):
        mine = valid & (pool == p)
        places = ceil(Fraction(factor) * int(mine.sum()) * k / experts)
        for expert in range(experts):
            found = [
                (t, j) for t in range(tokens) for j in range(k) if mine[t] and ids[t, j] == expert
            ]
            found.sort(key=lambda at: (-scores[at], at))
            for at in found[:places]:
                kept[at] = True
    return kept


@contextmanager
def capped_by_hand(model: nn.Module, factor: str, decide: Decide) -> Iterator[list[int]]:
    """Softmax routers beside experts; yields the assignments dropped in each layer's forward."""
    dropped: list[int] = []
    changed = []
    for block in model.modules():
        experts = block._modules.get("experts")
        router = block._modules.get("gate")
        if experts is None or router is None:
            continue
        said: dict[str, Tensor] = {}

        def route(*args: Any, run: Any = router.forward, said: Any = said, **kwargs: Any) -> Any:
            out = run(*args, **kwargs)
            said["logits"] = out[0]
            return out

        def compute(
            hidden: Tensor,
            ids: Tensor,
            weights: Tensor,
            run: Any = experts.forward,
            said: Any = said,
        ) -> Tensor:
            told = decide(ids.shape[0])
            if told is None:
                return run(hidden, ids, weights)
            scores = said["logits"].float().softmax(-1)
            kept = kept_by_hand(
                ids.numpy(), scores.gather(1, ids).detach().numpy(), factor, scores.shape[1], *told
            )
            dropped.append(int((told[0][:, None] & ~kept).sum()))
            return run(hidden, ids, torch.where(torch.tensor(kept), weights, 0.0))

        router.__dict__["forward"], experts.__dict__["forward"] = route, compute
        changed += [router, experts]
    try:
        yield dropped
    finally:
        for module in changed:
            del module.__dict__["forward"]
