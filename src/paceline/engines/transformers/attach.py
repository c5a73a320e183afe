"""`attach` a capacity policy to a Hugging Face model."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from paceline.engines.transformers.handle import Pace, read_model_policies
from paceline.engines.transformers.layers.find import LayerModules, find_layers, spread_over_ranks
from paceline.engines.transformers.layers.layer import AttachedLayer, identities
from paceline.engines.transformers.layers.probe import Probe, count_experts, probe
from paceline.engines.transformers.layers.weights import weights_present
from paceline.engines.transformers.patching import patch_of, remove_dead_patches
from paceline.engines.transformers.state import AttachedState
from paceline.engines.transformers.tokens.labels import TokenLabels, TokenSource, UserLabels
from paceline.plan import Plan
from paceline.settings import (
    PlacementsLike,
    PoliciesLike,
    placement_for,
    read_placement,
)
from paceline.stand_ins.calibration_file import Calibration

CalibrationLike: TypeAlias = "Calibration | str | os.PathLike[str] | None"


def attach(
    model: nn.Module,
    policy: PoliciesLike = None,
    placement: PlacementsLike = None,
    *,
    plan: Plan | None = None,
    calibration: CalibrationLike = None,
    token_source: TokenSource = None,
    token_valid: TokenLabels = None,
    token_request: TokenLabels = None,
    token_decode: TokenLabels = None,
    token_modality: TokenLabels = None,
) -> Pace:
    """Bound the expert load of a Hugging Face Mixture-of-Experts model at inference.

    Args:
        model: in eval mode; any architecture whose MoE blocks call
            `experts(hidden_states, top_k_index, top_k_weights)` beside a gate or router.
        policy: a policy, its short form ("capacity_factor=1.25"), "config" for the one kept in
            the model's config, or a sequence with one per layer; None only counts loads.
        placement: expert -> device of every layer, as an ExpertPlacement, a list, or a number of
            devices over which experts are spread in order; a sequence of these (not of numbers
            alone) gives each layer its own. None: every expert is a device of its own.
        plan: policies, placements and calibration from one file; `policy`, `placement` and
            `calibration` take precedence over it.
        calibration: of this model, or its folder, as `paceline tune` makes it; needed by
            compensate=True.
        token_source: which device a token is on: "sequence" (row i of a batch of B is on
            device i * devices // B), a [batch] or [batch, length] tensor, or a function of
            (batch, length, device) that gives one. Needed by pool="source" and expand="own_device".
        token_valid: likewise, False for rows that are no tokens, in addition to masks and
            `generate`. A layer run outside the model's forward sees one row of `length` tokens.
        token_request: likewise, a label of each token's request, where it isn't the row of the
            batch or the sequence packed into it: beams of one prompt, say.
        token_decode: likewise, True for a token of a sequence that has reached generation. Without
            it `generate` tells, and outside it whatever comes behind cached tokens.
        token_modality: likewise, 0 for a token of text, 1 of an image, 2 of a video, 3 of a sound,
            where a forward is given embeddings alone; otherwise its ids or types tell.

    Returns:
        The handle: policy, statistics, `detach`; a context manager.

    Raises:
        ValueError: if the model is dense, in training mode, compiled or already attached, or a
            layer can't be handled or can't run the policy, or the calibration is of another model;
            the model is untouched then.
    """
    _check_model(model)
    labels = UserLabels(token_source, token_valid, token_request, token_decode, token_modality)
    found_layers = find_layers(model)
    parallel = any(spread_over_ranks(modules.experts) for modules in found_layers)
    if parallel:
        from paceline.engines.transformers.expert_parallel.layer import agreed_labels

        labels = agreed_labels(found_layers, policy, placement, labels)
    policies, placements = _settings(model, found_layers, policy, placement, plan)
    state = AttachedState(labels)
    layers = _layers(model, found_layers, placements, state, parallel)
    if plan is not None:
        plan.check_model([layer.num_experts for layer in layers], [layer.k for layer in layers])
    if calibration is None and plan is not None:
        calibration = plan.calibration_folder()
    if calibration is not None:
        _calibrate(model, layers, calibration)
    with ExitStack() as undo:
        for layer in layers:
            undo.callback(layer.remove)
        pace = Pace(layers, state, undo, model)
        pace.set_policies(policies)
        for layer in layers:
            layer.install()
        for module in _models_in(model, [modules.block for modules in found_layers]):
            for patch in state.patch_module(module):
                undo.callback(patch.undo)
        pace._undo = undo.pop_all()
    return pace


def _check_model(model: Any) -> None:
    """Refuse a model that can't be attached; dead patches of a detached copy are removed first."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch module, got a {type(model).__name__}.")
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule) or any(
        m._compiled_call_impl is not None for m in model.modules()
    ):
        raise ValueError(f"{type(model).__name__} is already compiled: attach first, then compile.")
    if model.training:
        raise ValueError(f"{type(model).__name__} is in training mode: call eval() first.")
    remove_dead_patches(model)
    for name, module in model.named_modules():
        if patch_of(module.__dict__.get("forward")) is not None:
            raise ValueError(
                f"{type(model).__name__} is already attached, or copied from a model that is "
                f"(module {name or 'itself'}): detach that one first."
            )


def _settings(
    model: nn.Module,
    found_layers: list[LayerModules],
    policy: PoliciesLike,
    placement: PlacementsLike,
    plan: Plan | None,
) -> tuple[Any, list[Any]]:
    """Return policies and placements, one per layer; called before any layer is run."""
    count = len(found_layers)
    placements = [placement_for(placement, index, count) for index in range(count)]
    if plan is not None:
        if not isinstance(plan, Plan):
            raise ValueError(f"plan must be a Plan (Plan.load), got a {type(plan).__name__}.")
        plan.check_layers(count)
        if policy is None:
            policy = [plan.policy_of(index) for index in range(count)]
        if placement is None:
            placements = [plan.placement_of(index) for index in range(count)]
    return read_model_policies(policy, model, count), placements


def _layers(
    model: nn.Module,
    found_layers: list[LayerModules],
    placements: list[Any],
    state: AttachedState,
    parallel: bool,
) -> list[AttachedLayer]:
    """Probe every layer on random rows, and build its attached layer."""
    kind = AttachedLayer
    if parallel:
        from paceline.engines.transformers.expert_parallel.layer import ParallelLayer

        kind = ParallelLayer
    layers = []
    for index, (modules, where) in enumerate(zip(found_layers, placements, strict=True)):
        with weights_present(model, modules.name):
            found: Probe = probe(modules)
            experts = count_experts(modules, found)
            placement = read_placement(where, experts, modules.name)
            layers.append(kind(modules, found, experts, index, state, placement))
    return layers


def _calibrate(model: nn.Module, layers: list[AttachedLayer], calibration: CalibrationLike) -> None:
    """Give layers their stand-ins.

    Raises:
        ValueError: if it is no calibration, or one of another model.
    """
    if isinstance(calibration, (str, os.PathLike)):
        calibration = Calibration.load(calibration)
    if not isinstance(calibration, Calibration):
        raise ValueError(
            f"calibration must be a Calibration or its folder, got a {type(calibration).__name__}."
        )
    calibration.check_model(_class_name(model), identities(model, layers))
    for layer, found in zip(layers, calibration.layers, strict=True):
        layer.compensate(found)


def _class_name(model: nn.Module) -> str:
    """Return the name of a model's class without what adapters, DDP or FSDP make of it."""
    own = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), model)
    classes = (c for c in type(own).__mro__ if not c.__module__.startswith("torch.distributed"))
    return next(classes).__name__


def _models_in(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the model and those of its parts that are models themselves and hold MoE layers."""
    routed = {id(block) for block in blocks}
    found = [model]
    for module in model.modules():
        if module is model or not isinstance(module, PreTrainedModel):
            continue
        if any(id(m) in routed for m in module.modules() if m is not module):
            found.append(module)
    return found
