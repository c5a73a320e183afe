"""Find a model's Mixture-of-Experts layers by what they do, not by a list of architectures.

The seam that nearly all architectures of Transformers share: a block with a child `experts`,
called as `experts(hidden_states, top_k_index, top_k_weights)`, and a sibling `gate` or `router`
whose output holds the logits of all experts. Every layer is run once on random rows, with the
experts replaced by nothing, so that a block that only looks like the seam is refused instead of
silently left alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from paceline.engines.transformers.probe import Sighting

_ROUTER_NAMES = ("gate", "router")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERT_CLASS = re.compile(r"(?<!Shared)Experts?(?!Parallel)")


EXPERT_PARALLEL = "_paceline_ep"
"""Where an experts module keeps its `ExpertParallel`, if it has one."""


def spread_over_ranks(experts: nn.Module) -> bool:
    """Whether Paceline's expert parallelism brings these experts their tokens."""
    return EXPERT_PARALLEL in experts.__dict__


@dataclass(frozen=True, eq=False)
class Site:
    """One MoE layer as found: where it is, before anything is known of what it computes."""

    name: str
    block: nn.Module
    experts: nn.Module
    router: nn.Module

    @property
    def device(self) -> torch.device:
        """Where the experts are."""
        return next(iter(self.experts.parameters())).device


def find_sites(model: nn.Module) -> list[Site]:
    """The MoE layers of a model, in order.

    Raises:
        ValueError: if there is none (a dense model), or one that doesn't follow the seam.
    """
    sites = []
    for name, block in model.named_modules():
        experts = block._modules.get("experts")
        if experts is None:
            continue
        routers = [block._modules[n] for n in _ROUTER_NAMES if block._modules.get(n) is not None]
        if not routers:
            raise ValueError(
                f"layer {name} ({type(block).__name__}) can't be handled: it has experts, but no "
                "child named gate or router that chooses them."
            )
        if not any(True for _ in experts.parameters()):
            raise ValueError(
                f"layer {name} ({type(block).__name__}) can't be handled: its experts "
                "have no weights."
            )
        if any(p.is_meta for m in (experts, routers[0]) for p in m.parameters()):
            raise ValueError(
                f"layer {name} can't be handled: weights are on the meta device (offloaded, or not "
                "loaded yet)."
            )
        sites.append(Site(name, block, experts, routers[0]))
    _refuse_leftovers(model, sites)
    return sites


def _refuse_leftovers(model: nn.Module, sites: list[Site]) -> None:
    """Nothing that looks like experts may be left out silently."""
    covered = {id(m) for site in sites for m in site.block.modules()}
    for name, module in model.named_modules():
        if id(module) not in covered and _EXPERT_CLASS.search(type(module).__name__):
            raise ValueError(
                f"layer {name} ({type(module).__name__}) can't be handled: it has experts "
                "that are not "
                "called as experts(hidden_states, top_k_index, top_k_weights) beside a "
                "gate or router."
            )
    if sites:
        return
    count = _configured_experts(getattr(model, "config", None))
    if count > 1:
        raise ValueError(
            f"{type(model).__name__} can't be handled: its config names {count} experts, "
            "but no layer "
            "has experts called as experts(hidden_states, top_k_index, top_k_weights)."
        )
    raise ValueError(
        f"{type(model).__name__} has no Mixture-of-Experts layer: it is a dense model."
    )


def _configured_experts(config: Any) -> int:
    """Experts a config or one of its parts names, 0 for none."""
    parts = [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", ()))]
    counts = [getattr(part, key, None) for part in parts for key in _EXPERT_COUNTS]
    return max((c for c in counts if isinstance(c, int)), default=0)


def count_experts(site: Site, sighting: Sighting) -> int:
    """Experts of a layer that compute something: what its module says, else its weights.

    Raises:
        ValueError: if that is unknown.
    """
    if spread_over_ranks(site.experts):
        return int(site.experts.__dict__[EXPERT_PARALLEL].num_experts)
    stated = getattr(site.experts, "num_experts", None)
    stacked = [p.shape[0] for p in site.experts.parameters() if p.dim() == 3]
    if isinstance(stated, int):
        count = stated
    elif stacked:
        count = min(stacked)
    elif isinstance(site.experts, (nn.ModuleList, nn.ModuleDict)):
        count = len(site.experts)
    elif sighting.logits is not None:
        count = sighting.logits.shape[1]
    else:
        raise ValueError(f"layer {site.name} can't be handled: how many experts it has is unknown.")
    if getattr(site.experts, "_is_expert_parallel", False):
        raise ValueError(
            f"layer {site.name} can't be handled: its experts are spread over ranks "
            "(expert parallelism) by "
            "an implementation that doesn't skip dropped slots; load the model with "
            "DistributedConfig(..., "
            'ep_implementation="paceline").'
        )
    if sighting.logits is not None and sighting.logits.shape[1] < count:
        raise ValueError(
            f"layer {site.name} can't be handled: its router scores {sighting.logits.shape[1]} of "
            f"{count} experts."
        )
    return count
