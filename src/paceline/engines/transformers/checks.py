"""What `attach` and a new policy are checked for before anything changes."""

from __future__ import annotations

import torch
from torch import nn

from paceline.engines.transformers.config import load_policy
from paceline.engines.transformers.context import TokenSource, modality_tokens, parameter_names
from paceline.engines.transformers.layer import AttachedLayer
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing.route import check_binding


def check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: allowed is a torch module.")
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule) or any(
        m._compiled_call_impl is not None for m in model.modules()
    ):
        raise ValueError(f"{type(model).__name__} is already compiled: attach first, then compile.")
    if model.training:
        raise ValueError(f"{type(model).__name__} is in training mode: call eval() first.")
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if isinstance(getattr(forward, "__self__", None), AttachedLayer):
            raise ValueError(
                f"{type(model).__name__} is already attached (layer {name}): detach it first."
            )


def as_policy(policy: CapacityPolicy | str | None, model: nn.Module) -> CapacityPolicy:
    if policy is None:
        return CapacityPolicy(mode="observe")
    if policy == "config":
        kept = load_policy(model)
        if kept is None:
            raise ValueError('policy="config": the model\'s config has no capacity_policy.')
        return kept
    if isinstance(policy, str):
        return CapacityPolicy.parse(policy)
    if not isinstance(policy, CapacityPolicy):
        raise ValueError(
            f"policy is a {type(policy).__name__}: allowed is a CapacityPolicy or its short form."
        )
    return policy


def placement_of(
    layer: AttachedLayer, placement: ExpertPlacement | int | None
) -> ExpertPlacement | None:
    if placement is None:
        return None
    if isinstance(placement, int):
        return ExpertPlacement.contiguous(layer.num_experts, placement)
    if placement.num_experts != layer.num_experts:
        raise ValueError(
            f"placement has {placement.num_experts} experts, layer {layer.name} has "
            f"{layer.num_experts}: "
            "allowed is the same number, or a number of devices."
        )
    return placement


def check_layer(layer: AttachedLayer, policy: CapacityPolicy, token_source: TokenSource) -> None:
    """Refuse what this layer can't do, before anything changes."""
    if not policy.caps:
        return
    placement = layer.placement or ExpertPlacement.per_expert(layer.num_experts)
    check_binding(policy, placement, layer.k)
    if policy.keep == "score" and layer.scoring.rule is None:
        raise ValueError(
            f'keep="score" is not possible for layer {layer.name}: '
            f"{layer.scoring.reason}; allowed is "
            'keep="weight", "first", "last" or "random".'
        )
    if policy.expand is not None and not layer.scoring.expands:
        raise ValueError(
            f"expand={policy.expand!r} is not possible for layer {layer.name}: "
            f"{layer.scoring.reason}."
        )
    for field, wanted in (("pool", "source"), ("expand", "own_device")):
        if getattr(policy, field) == wanted and token_source is None:
            raise ValueError(
                f'{field}="{wanted}" needs token_source, the device on which each token '
                "lives: allowed is "
                '"sequence", a tensor or a function.'
            )


def check_modalities(policy: CapacityPolicy, model: nn.Module) -> None:
    """A modality that the model can't tell apart is no priority."""
    if not policy.drop_first:
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
