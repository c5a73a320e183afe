"""An attached MoE layer whose experts are spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.engines.rules import LayerRule, layer_rule
from paceline.engines.transformers.expert_parallel.implementation import ExpertParallel
from paceline.engines.transformers.expert_parallel.routing import decide, decides
from paceline.engines.transformers.layers.layer import AttachedLayer, Leave, ReplacedExperts
from paceline.engines.transformers.layers.modules import (
    EXPERT_PARALLEL,
    LayerModules,
    spread_over_ranks,
)
from paceline.engines.transformers.layers.probe import Probe
from paceline.engines.transformers.state import Running
from paceline.engines.transformers.tokens.labels import UserLabels
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing import Assignment, RoutingInputs


class ParallelLayer(AttachedLayer):
    """Stands in for the forward of an experts module that is spread over ranks."""

    def __init__(
        self,
        modules: LayerModules,
        found: Probe,
        num_experts: int,
        index: int,
        running: Running,
        placement: ExpertPlacement | None,
    ) -> None:
        self.parallel: ExpertParallel = modules.experts.__dict__[EXPERT_PARALLEL]
        self.parallel.layer = modules.name
        # the experts are where they are
        where = self.parallel.placement
        if placement not in (None, where):
            raise ValueError(
                f"placement is not where the experts of layer {modules.name} are: expert -> rank "
                f"is {list(where.expert_to_device)}; allowed is that, or None."
            )
        super().__init__(modules, found, num_experts, index, running, where)
        self._experts_forward = self.parallel.experts_forward
        if self._execution.wide_ids:
            raise ValueError(
                f"layer {self.name} can't be handled: its router names experts that no rank has."
            )

    @property
    def own_experts(self) -> Sequence[int]:
        """The experts of this rank."""
        return self.parallel.placement.experts_of(self.parallel.link.rank)

    def applicable(self, policy: CapacityPolicy) -> CapacityPolicy:
        """With a batch a rank, a pool not named is "source"."""
        own_batches = not self.parallel.shares_batch
        if policy.caps and own_batches and "pool" not in policy.model_fields_set:
            return policy.replace(pool="source")
        return policy

    def agree(self, name: str, value: Any) -> None:
        """Check that all ranks mean the same.

        Raises:
            ValueError: on every rank, if they don't.
        """
        self.parallel.link.agree(name, value)

    def rule(self, policy: CapacityPolicy) -> LayerRule:
        """What a policy means for this layer, on this rank."""
        who = decides(policy, self.parallel)
        ranks = self.parallel.link.size if who == "a rank, for a share" else 1
        return layer_rule(policy, self.traits(), ranks, shared=who == "all ranks together")

    def _route(self, inputs: RoutingInputs, policy: CapacityPolicy) -> Assignment:
        return decide(inputs, policy, self.parallel)

    def replace_experts(self, replaced: ReplacedExperts | None) -> None:
        """Have this rank's experts computed by something else; None: by the layer itself again."""
        own = self._experts_forward
        self.parallel.experts_forward = (
            own if replaced is None else partial(replaced, self.name, own)
        )

    @property
    def leaving_experts(self) -> Sequence[int] | None:
        """Where all ranks share a batch, this rank's: each stand-in counts once."""
        return self.own_experts if self.parallel.shares_batch else None

    def _run_kept(
        self,
        hidden: Tensor,
        ids: Tensor,
        weights: Tensor,
        assignment: Assignment,
        leave: Leave | None,
    ) -> Tensor:
        # no shortcut where nothing is kept: the other ranks wait for this one's part
        kept_ids, kept_weights = assignment.topk_ids, assignment.topk_weights
        if leave is None:
            return self._original(hidden, kept_ids, kept_weights)
        if not self.parallel.shares_batch:
            return leave(self._original(hidden, kept_ids, kept_weights))
        return self.parallel(hidden, kept_ids, kept_weights, leave).to(hidden.dtype)


def agreed_labels(
    layers: Sequence[LayerModules], policy: Any, placement: Any, labels: UserLabels
) -> UserLabels:
    """What all ranks must ask for alike, and where tokens live if each rank has its own.

    Raises:
        ValueError: if the ranks differ in what they ask for, or only some layers are spread.
    """
    for modules in layers:
        if not spread_over_ranks(modules.experts):
            raise ValueError(f"layer {modules.name} is not spread over ranks, as other layers are.")
    parallel: ExpertParallel = layers[0].experts.__dict__[EXPERT_PARALLEL]
    parallel.link.agree("placement", placement)
    parallel.link.agree("policy", str(policy))
    if parallel.shares_batch:
        return labels
    if labels.source is not None:
        raise ValueError(
            "token_source is not allowed where every rank has a batch of its own: a token lives on "
            "its rank."
        )
    return replace(labels, source=_OnRank(parallel.link.rank))


class _OnRank:
    """Every token lives on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, batch: int, length: int, device: torch.device) -> Tensor:
        return torch.full((batch * length,), self.rank, device=device)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Weights that FSDP has spread over ranks are whole inside, so that layers can be looked at."""
    with ExitStack() as stack:
        for module in model.modules():
            if hasattr(module, "unshard") and hasattr(module, "reshard"):
                sharded: Any = module
                sharded.unshard()
                stack.callback(sharded.reshard)
        yield
