"""What a policy means for one attached layer: what to ask of tokens, and when to stay out."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from paceline.engines.transformers.context import ForwardContext
from paceline.facts import Facts, facts_for
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing.active import Limits, limits_of, rows_spared
from paceline.routing.capacity import tokens_needed


@dataclass(frozen=True, eq=False)
class LayerRule:
    """A policy as it applies to one layer.

    Attributes:
        policy: in force.
        facts: that it asks for.
        min_expert_load: mean tokens an expert below which nothing is capped, as far as this process
            sees tokens, on an accelerator and on a CPU.
        few: rows of this layer below which no capacity applies, likewise.
        spared: rows up to which max_active can't bind either.
        limits: of max_active, None without one.
        together: whether other ranks decide with this one, so that it can't stay out alone.
        routes: whether the policy can drop anything, or count what would be dropped.
    """

    policy: CapacityPolicy
    facts: Facts
    min_expert_load: tuple[float, float]
    few: tuple[int, int]
    spared: int
    limits: Limits | None
    together: bool
    routes: bool

    @property
    def scores(self) -> bool:
        """Whether routing is told gate scores: all caps with a factor are, as what they keep."""
        return self.routes and self.policy.capacity_factor is not None

    def stays_out(self, context: ForwardContext | None, rows: int, on_cpu: bool) -> bool:
        """Whether it is certain on the host that nothing will be capped."""
        if not self.routes:
            return True
        if self.together:
            return False
        if rows < self.few[on_cpu]:
            return rows <= self.spared
        if self.policy.capacity_factor is None:
            # rows that may be padding may still be few tokens
            return context is not None and context.valid is None
        return self.policy.phase == "prefill" and context is not None and context.is_decode

    def reads_all(self, context: ForwardContext, ids: Tensor) -> bool:
        """Whether max_active rules and a look at `ids`, where that is no wait, finds none too many.

        Most steps of a cap that hardly binds are such; routing would find the same, at a cost.
        """
        if self.limits is None or self.together or context.valid is not None:
            return False
        host = ids.is_cpu and ids.dtype is torch.int64 and type(ids) is Tensor
        if not host or torch.compiler.is_compiling():
            return False
        return ids.shape[0] < self.few[True] and self.limits.keep(ids)


def layer_rule(
    policy: CapacityPolicy,
    k: int,
    num_experts: int,
    placement: ExpertPlacement | None = None,
    ranks: int = 1,
    together: bool = False,
) -> LayerRule:
    """The rule of a layer.

    Args:
        policy: in force.
        k: experts a token.
        num_experts: of the layer.
        placement: of the experts; None: every expert is a device of its own.
        ranks: over which an expert's tokens are spread, about as many from each.
        together: whether other ranks decide with this one.
    """
    loads = [policy.resolved_min_expert_load(kind) for kind in ("cuda", "cpu")]
    elsewhere, on_cpu = (load_of_a_rank(load, ranks) for load in loads)
    few = (tokens_needed(elsewhere, k, num_experts), tokens_needed(on_cpu, k, num_experts))
    facts = facts_for(policy)
    spared = rows_spared(policy.max_active, placement, k)
    limits = None
    if policy.caps and policy.max_active is not None and placement is not None:
        limits = limits_of(placement, policy.max_active)
    return LayerRule(policy, facts, (elsewhere, on_cpu), few, spared, limits, together, policy.caps)


@lru_cache(maxsize=64)
def load_of_a_rank(load: float, ranks: int) -> float:
    """A mean load of an expert's tokens from all ranks, as one of them sees it.

    >>> load_of_a_rank(8.0, ranks=4)
    2.0
    """
    return float(Fraction(str(load)) / ranks)
