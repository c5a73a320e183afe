"""Attached MoE layer whose experts are spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.engines.rules import LayerRule, layer_rule, with_default_pool
from paceline.engines.transformers.expert_parallel.implementation import ExpertParallel
from paceline.engines.transformers.expert_parallel.routing import (
    decision_of,
    route_on_rank,
)
from paceline.engines.transformers.layers.find import (
    EXPERT_PARALLEL,
    LayerModules,
    spread_over_ranks,
)
from paceline.engines.transformers.layers.layer import (
    AddStandIns,
    AttachedLayer,
    ReplacedExperts,
)
from paceline.engines.transformers.layers.probe import Probe
from paceline.engines.transformers.state import AttachedState
from paceline.engines.transformers.tokens.labels import UserLabels
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing import Assignment, RoutingInputs


class ParallelLayer(AttachedLayer):
    """A MoE layer whose experts are spread over ranks."""

    def __init__(
        self,
        modules: LayerModules,
        found: Probe,
        num_experts: int,
        index: int,
        state: AttachedState,
        placement: ExpertPlacement | None,
    ) -> None:
        self.parallel: ExpertParallel = modules.experts.__dict__[EXPERT_PARALLEL]
        self.parallel.layer = modules.name
        # the experts are where they are
        where = self.parallel.placement
        if placement is not None and placement != where:
            raise ValueError(
                f"placement of layer {modules.name} must be None or where its experts are, expert "
                f"-> rank {list(where.expert_to_device)}, got {list(placement.expert_to_device)}."
            )
        super().__init__(modules, found, num_experts, index, state, where)
        self._experts_forward = self.parallel.experts_forward
        if self.runner.wide_ids:
            raise ValueError(
                f"layer {self.name} can't be handled: its router names experts that no rank has."
            )

    @property
    def own_experts(self) -> Sequence[int]:
        """The experts of this rank."""
        return self.parallel.placement.experts_of(self.parallel.group.rank)

    def applicable(self, policy: CapacityPolicy) -> CapacityPolicy:
        """Return the policy, by default with pool="source" where each rank has its own batch."""
        return with_default_pool(policy, own_batches=not self.parallel.shares_batch)

    def agree(self, name: str, value: Any) -> None:
        """Check that a value is the same on all ranks.

        Raises:
            ValueError: on every rank, if it isn't.
        """
        self.parallel.group.agree(name, value)

    def rule(self, policy: CapacityPolicy) -> LayerRule:
        """Return the policy's rule for this layer, on this rank."""
        decision = decision_of(policy, self.parallel)
        ranks = self.parallel.group.size if decision == "for its share" else 1
        return layer_rule(policy, self.traits(), ranks, shared=decision == "together")

    def _route(self, inputs: RoutingInputs, policy: CapacityPolicy) -> Assignment:
        return route_on_rank(inputs, policy, self.parallel)

    def replace_experts(self, replaced: ReplacedExperts | None) -> None:
        """Replace the way to run this rank's experts; None: the layer's own again."""
        own = self._experts_forward
        self.parallel.experts_forward = (
            own if replaced is None else partial(replaced, self.name, own)
        )

    @property
    def stand_in_experts(self) -> Sequence[int] | None:
        """Where all ranks share a batch, the experts of this rank: each stand-in counts once."""
        return self.own_experts if self.parallel.shares_batch else None

    def _run_kept(
        self,
        hidden: Tensor,
        ids: Tensor,
        weights: Tensor,
        assignment: Assignment,
        compensation: AddStandIns | None,
    ) -> Tensor:
        # no shortcut where nothing is kept: the other ranks wait for this one's part
        kept_ids, kept_weights = assignment.topk_ids, assignment.topk_weights
        if compensation is None:
            return self._original(hidden, kept_ids, kept_weights)

        def add_stand_ins(out: Tensor) -> Tensor:
            return compensation(out, hidden, ids, weights, assignment.dropped_slots)

        if not self.parallel.shares_batch:
            return add_stand_ins(self._original(hidden, kept_ids, kept_weights))
        return self.parallel(hidden, kept_ids, kept_weights, add_stand_ins).to(hidden.dtype)


def agreed_labels(
    layers: Sequence[LayerModules], policy: Any, placement: Any, labels: UserLabels
) -> UserLabels:
    """Check that ranks agree; return labels that hold the rank of each token if batches differ.

    Raises:
        ValueError: if the ranks differ in policy or placement, or only some layers are spread.
    """
    for modules in layers:
        if not spread_over_ranks(modules.experts):
            raise ValueError(f"layer {modules.name} is not spread over ranks, as other layers are.")
    parallel: ExpertParallel = layers[0].experts.__dict__[EXPERT_PARALLEL]
    parallel.group.agree("placement", placement)
    parallel.group.agree("policy", str(policy))
    if parallel.shares_batch:
        return labels
    if labels.source is not None:
        raise ValueError(
            "token_source must be None where every rank has a batch of its own: a token is on "
            "its rank."
        )
    return replace(labels, source=_OnRank(parallel.group.rank))


class _OnRank:
    """A token source: every token is on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, batch: int, length: int, device: torch.device) -> Tensor:
        return torch.full((batch * length,), self.rank, device=device)
