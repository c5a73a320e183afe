"""`attach` a capacity policy to a Hugging Face model, and the handle that it returns."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from paceline.engines.transformers.checks import (
    as_policy,
    check_layer,
    check_modalities,
    check_model,
    placement_of,
)
from paceline.engines.transformers.context import TokenSource, forward_models
from paceline.engines.transformers.discovery import find_sites, spread_over_ranks
from paceline.engines.transformers.layer import AttachedLayer
from paceline.engines.transformers.probe import observe
from paceline.engines.transformers.running import Running
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing.stats import LayerStats


@dataclass(frozen=True)
class LayerSupport:
    """What works for one layer.

    Attributes:
        name: of the layer.
        scoring: the router's scoring rule, None where it is unknown.
        level: "full", or "drop only": no expansion, and without `scoring` no keep="score".
        reason: why not full, else empty.
    """

    name: str
    scoring: str | None
    level: Literal["full", "drop only"]
    reason: str


@dataclass(frozen=True)
class ModelStats:
    """Load statistics of all attached layers, and the policy they were counted under last."""

    policy: str
    layers: list[LayerStats]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {"policy": self.policy, "layers": [layer.to_dict() for layer in self.layers]}


class Pace:
    """A policy attached to a model. Use it as a context manager, or `detach` it."""

    def __init__(
        self, layers: list[AttachedLayer], running: Running, undo: ExitStack, model: nn.Module
    ):
        self._layers, self._running, self._undo, self._model = layers, running, undo, model
        self._attached = True

    @property
    def policy(self) -> CapacityPolicy:
        """The policy in force; set another one between forwards.

        Raises:
            ValueError: if a layer can't follow the new policy; the old one stays then.
        """
        return self._running.policy

    @policy.setter
    def policy(self, policy: CapacityPolicy | str | None) -> None:
        self._set_policy(policy)

    def _set_policy(self, policy: CapacityPolicy | str | None) -> None:
        if not self._attached:
            raise ValueError("the policy can't be set: it is detached from its model.")
        policy = self._layers[0].applicable(as_policy(policy, self._model))
        for layer in self._layers:
            check_layer(layer, policy, self._running.token_source)
        check_modalities(policy, self._model)
        for layer in self._layers:
            layer.follow(policy)
        self._running.follow(policy)

    @property
    def placement(self) -> ExpertPlacement | None:
        """The experts' devices, of the first layer; None: every expert is a device of its own."""
        return self._layers[0].placement

    @property
    def layers(self) -> list[str]:
        """Names of the MoE layers, in order."""
        return [layer.name for layer in self._layers]

    @property
    def support(self) -> list[LayerSupport]:
        """What works for each layer, and why not more."""
        return [
            LayerSupport(
                layer.name,
                layer.scoring.rule,
                "full" if layer.scoring.expands else "drop only",
                layer.scoring.reason,
            )
            for layer in self._layers
        ]

    def stats(self) -> ModelStats:
        """Loads before and after, dropped assignments and straggler loss of each layer so far."""
        return ModelStats(str(self.policy), [layer.loads.result() for layer in self._layers])

    def reset_stats(self) -> None:
        """Start the statistics anew."""
        with torch.inference_mode(False):
            for layer in self._layers:
                layer.loads.reset()

    def detach(self) -> None:
        """Put the model back exactly as it was; statistics can still be read. Twice is once."""
        if self._attached:
            self._attached = False
            self._undo.close()

    def __enter__(self) -> Pace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()


def attach(
    model: nn.Module,
    policy: CapacityPolicy | str | None = None,
    placement: ExpertPlacement | int | None = None,
    *,
    token_source: TokenSource = None,
) -> Pace:
    """Bound the expert load of a Hugging Face Mixture-of-Experts model at inference.

    Args:
        model: in eval mode; any architecture whose MoE blocks call
            `experts(hidden_states, top_k_index, top_k_weights)` beside a gate or router.
        policy: a policy, its short form ("capacity_factor=1.25"), or "config" for the one kept in
            the model's config; None only counts loads.
        placement: expert -> device of every layer, or a number of devices over which experts are
            spread in order; None: every expert is a device of its own.
        token_source: which device a token lives on: "sequence" (row i of a batch of B lives on
            device i * devices // B), a [batch] or [batch, length] tensor, or a function of
            (batch, length, device) that gives one. Needed by pool="source" and expand="own_device".

    Returns:
        The handle: policy, statistics, `detach`; a context manager.

    Raises:
        ValueError: if the model is dense, in training mode, compiled or already attached, or a
            layer can't be handled or can't follow the policy; the model is untouched then.
    """
    check_model(model)
    if isinstance(token_source, str) and token_source != "sequence":
        raise ValueError(
            f'token_source={token_source!r} is not allowed: it is None, "sequence", a '
            "tensor or a function."
        )
    running = Running(token_source)
    sites = find_sites(model)
    if any(spread_over_ranks(site.experts) for site in sites):
        from paceline.engines.transformers.expert_parallel_layer import parallel_layers

        layers = parallel_layers(model, sites, running, policy, placement, token_source)
    else:
        layers = [AttachedLayer(site, observe(site), i, running) for i, site in enumerate(sites)]
    for layer in layers:
        layer.set_placement(placement_of(layer, placement))
    with ExitStack() as undo:
        for layer in layers:
            undo.callback(layer.remove)
        pace = Pace(layers, running, undo, model)
        pace._set_policy(policy)
        running.unproven = [layer for layer in layers if layer.unproven]
        for layer in layers:
            layer.install()
        for module in forward_models(model, [site.block for site in sites]):
            undo.callback(running.watch(module))
        pace._undo = undo.pop_all()
    return pace
