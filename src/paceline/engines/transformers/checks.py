"""What `attach` and a new policy are checked for before anything changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.engines.rules import ALL_MODALITIES
from paceline.engines.transformers.patching import free, stands_in
from paceline.engines.transformers.tokens.arguments import parameter_names
from paceline.engines.transformers.tokens.labels import UserLabels
from paceline.engines.transformers.tokens.modality import modality_tokens


def check_model(model: Any) -> None:
    """Refuse what can't be attached; a copy of a model that is detached by now is freed first."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: allowed is a torch module.")
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule) or any(
        m._compiled_call_impl is not None for m in model.modules()
    ):
        raise ValueError(f"{type(model).__name__} is already compiled: attach first, then compile.")
    if model.training:
        raise ValueError(f"{type(model).__name__} is in training mode: call eval() first.")
    free(model)
    for name, module in model.named_modules():
        if stands_in(module.__dict__.get("forward")) is not None:
            raise ValueError(
                f"{type(model).__name__} is already attached, or copied from a model that is "
                f"(module {name or 'itself'}): detach that one first."
            )


def known_modalities(model: nn.Module, labels: UserLabels) -> frozenset[str]:
    """Return the modalities that the model or the user can tell apart."""
    if labels.modality is not None:
        return ALL_MODALITIES
    by_type = any("token_type_ids" in name for name in parameter_names(model))
    return ALL_MODALITIES if by_type else frozenset(modality_tokens(getattr(model, "config", None)))
