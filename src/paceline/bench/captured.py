"""Inputs and routing of every MoE layer of a model on real tokens, without a cap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.engines.transformers import attach
from paceline.engines.transformers.layers.find import find_layers
from paceline.facts import Facts
from paceline.routing import Assignment, RoutingInputs


@dataclass(frozen=True)
class Captured:
    """One layer in one forward.

    Attributes:
        hidden: input of the experts, [tokens, hidden].
        inputs: the model's choice, with all scores where the router's rule is known, the request
            of each token (its row of the batch) and the device that it lives on.
    """

    name: str
    router: nn.Module
    experts: nn.Module
    hidden: Tensor
    inputs: RoutingInputs


def capture(model: Any, ids: Tensor, devices: int = 1) -> list[Captured]:
    """Run a model on [batch, length] token ids; row i of B lives on device i * devices // B.

    Raises:
        ValueError: if the model has no MoE layer, or one that can't be handled.
    """
    chosen: dict[str, RoutingInputs] = {}
    hidden_of: dict[str, Tensor] = {}

    def note(name: str, inputs: RoutingInputs, assignment: Assignment) -> None:
        chosen[name] = inputs

    def keep(
        name: str, run: Callable[..., Tensor], hidden: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        hidden_of[name] = hidden.reshape(-1, hidden.shape[-1]).clone()
        return run(hidden, ids, weights)

    with attach(model, None, devices, token_source="sequence") as pace:
        pace.watch(note, Facts(scores=True, all_scores=True, request=True, source=True))
        pace.replace_experts(keep)
        with torch.no_grad():
            model(input_ids=ids.to(model.device), use_cache=False)
    return [
        Captured(m.name, m.router, m.experts, hidden_of[m.name], chosen[m.name])
        for m in find_layers(model)
    ]
