"""Find a model's Mixture-of-Experts layers by what they do, not by a list of architectures.

The seam that nearly all architectures of Transformers share: a block with a child `experts`,
called as `experts(hidden_states, top_k_index, top_k_weights)`, and a sibling `gate` or `router`
whose output holds the logits of all experts. Every layer is run once on random rows, with the
experts replaced by nothing, so that a block that only looks like the seam is refused instead of
silently left alone.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from paceline.engines.transformers.layers.modules import ROUTER_NAMES, LayerModules

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERT_CLASS = re.compile(r"(?<!Shared)Experts?(?!Parallel)")


def find_layers(model: nn.Module) -> list[LayerModules]:
    """The MoE layers of a model, in order.

    Raises:
        ValueError: if there is none (a dense model), or one that doesn't follow the seam.
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
    """Nothing that looks like experts may be left out silently."""
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
    """Experts a config or one of its parts names, 0 for none."""
    parts = [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", ()))]
    counts = [getattr(part, key, None) for part in parts for key in _EXPERT_COUNTS]
    return max((c for c in counts if isinstance(c, int)), default=0)
