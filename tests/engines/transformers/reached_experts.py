"""What reaches a model's experts, row by row, seen from below everything that Paceline does.

Stands where an experts' own forward was before anything is attached. Each row is computed alone, so
that what one token gets isn't rounded otherwise because of who else chose the same expert: two runs
of one shape that differ in some rows agree to the bit in all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Reached:
    """Forwards in the order in which they ran.

    Attributes:
        calls: of each call of experts, layer after layer: ids and weights [rows, slots]; an id
            equal to the number of experts is no expert.
        tokens: of each forward: token ids as the model embeds them, flat.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor]] = []
        self.tokens: list[Tensor] = []

    def clear(self) -> None:
        """Forget what was seen."""
        self.calls, self.tokens = [], []

    def of_rows(self, call: int, rows: Any, experts: int) -> list[list[tuple[int, float]]]:
        """Experts that these rows of a call reached, with their weights, sorted."""
        ids, weights = (part[rows].tolist() for part in self.calls[call])
        return [
            sorted((e, w) for e, w in zip(*row, strict=True) if e < experts)
            for row in zip(ids, weights, strict=True)
        ]


@contextmanager
def reached_experts(model: Any) -> Iterator[Reached]:
    """Follow a model's experts, which run one row at a time meanwhile; attach inside of it."""
    reached, changed = Reached(), []
    former = model.get_experts_implementation()
    model.set_experts_implementation("eager")

    def follow(experts: nn.Module) -> None:
        run = experts.forward

        def forward(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            flat = hidden.reshape(-1, hidden.shape[-1])
            assert ids.shape[0] == flat.shape[0], "another way to run experts"
            reached.calls.append((ids.clone(), weights.clone()))
            rows = zip(flat.split(1), ids.split(1), weights.split(1), strict=True)
            return torch.cat([run(*row).reshape(1, -1) for row in rows]).view_as(hidden)

        experts.__dict__["forward"] = forward
        changed.append(experts)

    for name, module in model.named_modules():
        if name.split(".")[-1] == "experts":
            follow(module)
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: reached.tokens.append(args[0].flatten().clone())
    )
    try:
        yield reached
    finally:
        hook.remove()
        for module in changed:
            del module.__dict__["forward"]
        model.set_experts_implementation(former)
