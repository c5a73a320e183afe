"""Search for a model's Mixture-of-Experts layers by what they do, not by a list of architectures.

The structure that nearly all architectures of Transformers share: a block with a child `experts`,
called as `experts(hidden_states, top_k_index, top_k_weights)`, and a sibling `gate` or `router`
whose output holds the logits of all experts. `probe` then runs each layer once on random rows, so
that a block that only looks like one is refused instead of silently left alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.engines.transformers.layers.weights import computing_device, missing_weights

ROUTER_NAMES = ("gate", "router")
"""Names under which a block keeps the module that chooses its experts."""

EXPERT_PARALLEL = "_paceline_ep"
"""Attribute of an experts module that holds its `ExpertParallel`, if it has one."""


@dataclass(frozen=True, eq=False)
class LayerModules:
    """The modules of one MoE layer.

    Attributes:
        name: of the block in its model.
        block: whose forward calls router and experts.
        experts: called as experts(hidden_states, top_k_index, top_k_weights).
        router_name: of the router among the block's children.
    """

    name: str
    block: nn.Module
    experts: nn.Module
    router_name: str

    @property
    def router(self) -> nn.Module:
        """The module that chooses the experts now: an adapter may have been put around it."""
        router = self.block._modules[self.router_name]
        assert router is not None  # found with it
        return router

    @property
    def device(self) -> torch.device:
        """Device on which the experts compute."""
        return computing_device(self.experts)


def spread_over_ranks(experts: nn.Module) -> bool:
    """Return True if Paceline's expert parallelism brings these experts their tokens."""
    return EXPERT_PARALLEL in experts.__dict__


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERT_CLASS = re.compile(r"(?<!Shared)Experts?(?!Parallel)")


def find_layers(model: nn.Module) -> list[LayerModules]:
    """Return the MoE layers of a model, in order.

    Raises:
        ValueError: if there is none (a dense model), or one of another structure.
    """
    layers = []
    for name, block in model.named_modules():
        experts = block._modules.get("experts")
        if experts is None:
            continue
        routers = [child for child in ROUTER_NAMES if block._modules.get(child) is not None]
        if not routers:
            raise ValueError(
                f"layer {name} ({type(block).__name__}) can't be handled: it has experts, but no "
                "child named gate or router that chooses them."
            )
        if not any(True for _ in experts.parameters()):
            raise ValueError(
                f"layer {name} ({type(block).__name__}) can't be handled: its experts have no "
                "weights."
            )
        missing = missing_weights(block)
        if missing is not None:
            raise ValueError(
                f"layer {name} can't be handled: its weight {missing} is on the meta device, and "
                "no hook of Accelerate loads it; load the model's weights first."
            )
        layers.append(LayerModules(name, block, experts, routers[0]))
    _refuse_leftovers(model, layers)
    return layers


def _refuse_leftovers(model: nn.Module, layers: list[LayerModules]) -> None:
    """Refuse a model with modules that look like experts outside these layers."""
    covered = {id(m) for layer in layers for m in layer.block.modules()}
    for name, module in model.named_modules():
        if id(module) not in covered and _EXPERT_CLASS.search(type(module).__name__):
            raise ValueError(
                f"layer {name} ({type(module).__name__}) can't be handled: it has experts that are "
                "not called as experts(hidden_states, top_k_index, top_k_weights) beside a gate or "
                "router."
            )
    if layers:
        return
    count = _configured_experts(getattr(model, "config", None))
    if count > 1:
        raise ValueError(
            f"{type(model).__name__} can't be handled: its config names {count} experts, but no "
            "layer has experts called as experts(hidden_states, top_k_index, top_k_weights)."
        )
    raise ValueError(
        f"{type(model).__name__} has no Mixture-of-Experts layer: it is a dense model."
    )


def _configured_experts(config: Any) -> int:
    """Return the number of experts that a config or one of its parts names, 0 for none."""
    parts = [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", ()))]
    counts = [getattr(part, key, None) for part in parts for key in _EXPERT_COUNTS]
    return max((c for c in counts if isinstance(c, int)), default=0)


class Places:
    """Places of MoE blocks and their experts in a model, to notice others that take them."""

    def __init__(self, model: nn.Module, layers: list[LayerModules]) -> None:
        self._model, self._layers = model, layers
        self._children = self._look()

    def check(self) -> None:
        """Check that all blocks and their experts are still there, or removed, or wrapped.

        Raises:
            RuntimeError: naming the layer that was replaced.
        """
        for parent, name, child in self._children:
            if parent.get(name) is not child:
                break
        else:
            return
        here = {id(module) for module in self._model.modules()}
        for layer in self._layers:
            place, held = "", layer.block
            if id(held) in here:
                place, held = " of its experts", layer.experts
            if id(held) not in here and _path(self._model, layer.name):
                raise RuntimeError(
                    f"layer {layer.name} can't be handled: another module has taken the place"
                    f"{place}; detach, and attach again."
                )
        self._children = self._look()

    def _look(self) -> list[tuple[dict[str, nn.Module | None], str, nn.Module]]:
        """Return (children of a module, name, child) on the way to all experts."""
        steps = []
        for layer in self._layers:
            steps += _path(self._model, layer.name)
            children = layer.block._modules
            if (experts := children.get("experts")) is not None:
                steps.append((children, "experts", experts))
        return list({(id(parent), name): (parent, name, m) for parent, name, m in steps}.values())


def _path(model: nn.Module, name: str) -> list[tuple[dict[str, nn.Module | None], str, nn.Module]]:
    """Return the steps from a model down to a module, none if there is no such module."""
    steps: list[tuple[dict[str, nn.Module | None], str, nn.Module]] = []
    module = model
    for part in name.split(".") if name else ():
        children = module._modules
        child = children.get(part)
        if child is None:
            return []
        steps.append((children, part, child))
        module = child
    return steps
