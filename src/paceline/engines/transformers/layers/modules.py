"""The modules of one MoE layer: where it is, before anything is known of what it computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

ROUTER_NAMES = ("gate", "router")
"""Under which a block keeps the module that chooses its experts."""

EXPERT_PARALLEL = "_paceline_ep"
"""Where an experts module keeps its `ExpertParallel`, if it has one."""


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
        """What chooses the experts now: an adapter may have been put around it."""
        router = self.block._modules[self.router_name]
        assert router is not None  # found with it
        return router

    @property
    def device(self) -> torch.device:
        """Where the experts are."""
        return next(iter(self.experts.parameters())).device


def spread_over_ranks(experts: nn.Module) -> bool:
    """Whether Paceline's expert parallelism brings these experts their tokens."""
    return EXPERT_PARALLEL in experts.__dict__
