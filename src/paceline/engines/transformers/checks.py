"""What `attach` and a new policy are checked for before anything changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.engines.transformers.arguments import parameter_names
from paceline.engines.transformers.forwards import free, stands_in
from paceline.engines.transformers.labels import UserLabels
from paceline.engines.transformers.layer import AttachedLayer
from paceline.engines.transformers.modality import modality_tokens
from paceline.facts import facts_for
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing.route import check_binding


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


def check_layer(layer: AttachedLayer, policy: CapacityPolicy, labels: UserLabels) -> None:
    """Refuse what this layer can't do, before anything changes."""
    if policy.compensate and layer.compensation is None:
        raise ValueError(
            "compensate=True needs a calibration of this model: give attach calibration=FOLDER, as "
            "`paceline calibrate` makes it."
        )
    if policy.keep == "contribution" and layer.compensation is None:
        raise ValueError(
            'keep="contribution" needs a calibration of this model: give attach '
            "calibration=FOLDER, as `paceline calibrate` makes it."
        )
    if not policy.caps:
        return
    placement = layer.placement or ExpertPlacement.per_expert(layer.num_experts)
    check_binding(policy, placement, layer.k)
    facts = facts_for(policy)
    if facts.scores and policy.keep == "score" and layer.scoring.rule is None:
        raise ValueError(
            f'keep="score" is not possible for layer {layer.name}: {layer.scoring.reason}; allowed '
            'is keep="weight", "first", "last" or "random".'
        )
    if facts.all_scores and not layer.scoring.expands:
        raise ValueError(
            f"expand={policy.expand!r} is not possible for layer {layer.name}: "
            f"{layer.scoring.reason}."
        )
    for field, wanted in (("pool", "source"), ("expand", "own_device")):
        if getattr(policy, field) == wanted and labels.source is None:
            raise ValueError(
                f'{field}="{wanted}" needs token_source, the device on which each token lives: '
                'allowed is "sequence", a tensor or a function.'
            )


def check_modalities(policy: CapacityPolicy, model: nn.Module, labels: UserLabels) -> None:
    """A modality that neither the model nor the user can tell apart is no priority."""
    if not policy.drop_first or labels.modality is not None:
        return
    by_type = any("token_type_ids" in name for name in parameter_names(model))
    known = {
        *modality_tokens(getattr(model, "config", None)),
        *(("image", "video", "audio") if by_type else ()),
    }
    unknown = [m for m in policy.drop_first if m not in known and (m != "text" or not known)]
    if unknown:
        allowed = ", ".join(sorted({*known, "text"})) if known else "nothing: it reads text alone"
        raise ValueError(
            f"drop_first={policy.drop_first} names {unknown[0]}: this model knows {allowed}."
        )
