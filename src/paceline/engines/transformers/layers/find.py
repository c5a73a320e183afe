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
        """Device of the experts."""
        return next(iter(self.experts.parameters())).device


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
        if any(p.is_meta for m in (experts, block._modules[routers[0]]) for p in m.parameters()):
            raise ValueError(
                f"layer {name} can't be handled: weights are on the meta device (offloaded, or not "
                "loaded yet)."
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
