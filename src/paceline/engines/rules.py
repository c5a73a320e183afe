"""Rules for all engines: which policies a layer can run, and in which forwards it stays out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from paceline.facts import Facts, facts_for
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing.active import Limits, limits_of, rows_spared
from paceline.routing.limits import capacity, capacity_ratio, tokens_needed
from paceline.routing.route import check_binding

ALL_MODALITIES = frozenset(("text", "image", "video", "audio"))


@dataclass(frozen=True)
class LayerTraits:
    """Properties of one MoE layer in its engine on which the choice of a policy depends.

    Attributes:
        placement: expert -> device.
        repeats: whether a token's choice may name one expert twice.
        chosen_scores: whether the gate scores of the chosen experts are known.
        all_scores: whether those of all experts are known, and so the weight of an extra.
        scores_reason: why not.
        calibrated: whether the layer has stand-ins from a calibration.
        calibration_option: how a user of this engine supplies a calibration.
        compensates_extras: whether compensate works together with expand.
        expand_refusal: why no expand is possible; empty where it is.
        knows_source: whether the device on which each token lives is known.
        source_option: how a user of this engine makes it known.
        sees_all_ranks: whether decisions can cover the tokens of all ranks that share the experts.
        modalities: those that the engine can tell apart.
        modalities_reason: why there are none.
    """

    name: str
    k: int
    placement: ExpertPlacement
    repeats: bool = False
    chosen_scores: bool = True
    all_scores: bool = True
    scores_reason: str = ""
    calibrated: bool = False
    calibration_option: str = ""
    compensates_extras: bool = True
    expand_refusal: str = ""
    knows_source: bool = True
    source_option: str = ""
    sees_all_ranks: bool = True
    modalities: Collection[str] = ALL_MODALITIES
    modalities_reason: str = ""


def with_default_pool(
    policy: CapacityPolicy, own_batches: bool, shared_cache: bool = False
) -> CapacityPolicy:
    """Return a policy whose pool, unless it is named, suits the ranks.

    Args:
        policy: as the user wrote it.
        own_batches: True if each rank has a batch of its own: then the source is the default.
        shared_cache: True if requests read each other's cached prefixes: then each request gets a
            budget of its own, so that a batch changes nothing that others read. max_active, which
            caps a batch, keeps its pool.

    >>> with_default_pool(CapacityPolicy(capacity_factor=1.5), own_batches=True).pool
    'source'
    """
    if not policy.caps or "pool" in policy.model_fields_set:
        return policy
    if shared_cache and policy.mode == "enforce" and policy.max_active is None:
        return policy.replace(pool="request")
    return policy.replace(pool="source") if own_batches else policy


def check_policy(policy: CapacityPolicy, layer: LayerTraits) -> None:
    """Refuse a policy that a layer can't run; to be called when a policy is set.

    Raises:
        ValueError: naming the field, the layer where it matters, and what is allowed.
    """
    for field in _calibrated_fields(policy):
        if not layer.calibrated:
            raise ValueError(
                f"{field} needs a calibration of this model, as `paceline tune` makes it: "
                f"{layer.calibration_option}."
            )
    if not policy.caps:
        return
    check_binding(policy, layer.placement, layer.k)
    facts = facts_for(policy)
    if policy.keep == "score" and facts.scores and not layer.chosen_scores:
        raise ValueError(
            f"keep=score is not possible for layer {layer.name}: {layer.scores_reason}; keep must "
            "be weight, first, last or random."
        )
    if facts.all_scores and not layer.all_scores:
        raise ValueError(
            f"expand={policy.expand} is not possible for layer {layer.name}: {layer.scores_reason}."
        )
    if policy.expand is not None and layer.expand_refusal:
        raise ValueError(f"expand={policy.expand} is not possible: {layer.expand_refusal}.")
    if policy.expand is not None and policy.compensate and not layer.compensates_extras:
        raise ValueError(
            f"compensate=true and expand={policy.expand} are not possible together in this engine."
        )
    if facts.source and not layer.knows_source:
        field = "pool=source" if policy.pool == "source" else f"expand={policy.expand}"
        raise ValueError(
            f"{field} needs to know the device on which each token lives: {layer.source_option}."
        )
    if not layer.sees_all_ranks:
        _check_own_tokens(policy)
    _check_modalities(policy, layer)


def _calibrated_fields(policy: CapacityPolicy) -> list[str]:
    fields = ["compensate=true"] if policy.compensate else []
    return [*fields, "keep=contribution"] if policy.keep == "contribution" else fields


def _check_own_tokens(policy: CapacityPolicy) -> None:
    """Refuse what a rank that sees its own tokens alone can't decide."""
    if policy.max_active is not None:
        raise ValueError(
            f"max_active={policy.max_active} is not possible under data parallelism: a device "
            "reads experts for the tokens of all ranks, and each rank sees its own."
        )
    if policy.pool == "batch":
        raise ValueError(
            "pool must be source or request under data parallelism, where each rank sees its own "
            "tokens, got pool=batch."
        )


def _check_modalities(policy: CapacityPolicy, layer: LayerTraits) -> None:
    known = {*layer.modalities, "text"} if layer.modalities else set()
    unknown = [modality for modality in policy.drop_first if modality not in known]
    if not unknown:
        return
    field = f"drop_first={'+'.join(policy.drop_first)}"
    if not known:
        raise ValueError(f"{field} is not possible: {layer.modalities_reason}.")
    raise ValueError(
        f"{field} names {unknown[0]}: modalities of this model are {', '.join(sorted(known))}."
    )


# -- in a forward ----------------------------------------------------------------------------------


class ForwardTokens(Protocol):
    """The tokens of one forward, as far as the host knows them."""

    @property
    def valid(self) -> Tensor | None:
        """[rows] bool, False for padding; None: every row is a token."""

    @property
    def is_decode(self) -> bool:
        """True if the host knows that every sequence has reached generation."""


@dataclass(frozen=True, eq=False)
class LayerRule:
    """A policy as it applies to one layer.

    Attributes:
        facts: that `route` needs for it.
        routes: whether the policy can drop anything, or count what would be dropped.
        needs_scores: whether `route` needs gate scores: for any capacity factor, to rank by them
            or to report the gate mass kept.
        min_expert_load: mean tokens per expert below which nothing is capped, as far as this
            process sees tokens, on an accelerator and on a CPU.
        min_rows: rows of this layer below which no capacity applies, likewise.
        unbound_rows: rows up to which max_active can't bind either.
        limits: of max_active, None without one.
        shared: whether other ranks decide with this one, so that it can't stay out alone.
    """

    policy: CapacityPolicy
    facts: Facts
    routes: bool
    needs_scores: bool
    min_expert_load: tuple[float, float]
    min_rows: tuple[int, int]
    unbound_rows: int
    limits: Limits | None
    shared: bool

    def stays_out(
        self, tokens: ForwardTokens | None, rows: int, on_cpu: bool, exact: bool = False
    ) -> bool:
        """Return True if the host is certain that nothing will be capped.

        Args:
            tokens: of the forward, None where the engine knows nothing of them.
            on_cpu: whether it runs on a CPU.
            exact: whether all rows are known to be tokens.
        """
        if not self.routes:
            return True
        if self.shared:
            return False
        if rows < self.min_rows[on_cpu]:
            return rows <= self.unbound_rows
        if self.policy.capacity_factor is None:
            # rows that may be padding may still be few tokens
            return exact or (tokens is not None and tokens.valid is None)
        return self.policy.phase == "prefill" and tokens is not None and tokens.is_decode

    def is_within_limits(self, tokens: ForwardTokens, ids: Tensor) -> bool:
        """Return True if max_active applies to `ids` [tokens, k] and no device exceeds it.

        Most decode steps of a cap that hardly binds are such; `route` would find the same, at a
        cost. Looks only where that is no wait for a device.
        """
        if self.limits is None or self.shared or tokens.valid is not None:
            return False
        on_host = ids.is_cpu and ids.dtype is torch.int64 and type(ids) is Tensor
        if not on_host or torch.compiler.is_compiling():
            return False
        return ids.shape[0] < self.min_rows[True] and self.limits.keep(ids)


def layer_rule(
    policy: CapacityPolicy, layer: LayerTraits, ranks: int = 1, shared: bool = False
) -> LayerRule:
    """Return the rule of a layer under a policy that passed `check_policy`.

    Args:
        layer: that it applies to.
        ranks: over which an expert's tokens are spread, about as many from each.
        shared: whether other ranks decide with this one.
    """
    k, placement = layer.k, layer.placement
    loads = [policy.resolved_min_expert_load(kind) for kind in ("cuda", "cpu")]
    accelerator, cpu = (load_per_rank(load, ranks) for load in loads)
    limits = None
    if policy.caps and policy.max_active is not None:
        limits = limits_of(placement, policy.max_active)
    return LayerRule(
        policy=policy,
        facts=facts_for(policy),
        routes=policy.caps,
        needs_scores=policy.caps and policy.capacity_factor is not None,
        min_expert_load=(accelerator, cpu),
        min_rows=(
            tokens_needed(accelerator, k, placement.num_experts),
            tokens_needed(cpu, k, placement.num_experts),
        ),
        unbound_rows=rows_spared(policy.max_active, placement, k),
        limits=limits,
        shared=shared,
    )


@lru_cache(maxsize=64)
def load_per_rank(load: float, ranks: int) -> float:
    """Return the share that one of `ranks` ranks sees of an expert's mean load.

    >>> load_per_rank(8.0, ranks=4)
    2.0
    """
    return float(Fraction(str(load)) / ranks)


def never_binding(policy: CapacityPolicy, layer: LayerTraits) -> Callable[[int], bool]:
    """Return a function that is True for numbers of tokens which can't exceed any capacity.

    Of the capacity factor alone: max_active applies to smaller forwards than these.

    >>> layer = LayerTraits("layer", 1, ExpertPlacement.per_expert(8))
    >>> never_binding(CapacityPolicy(capacity_factor=8), layer)(1000)
    True
    """
    factor, k, experts = policy.factor, layer.k, layer.placement.num_experts
    if factor is None:
        return lambda tokens: True
    if policy.expand is not None:
        return lambda tokens: False
    sizes = {1} if policy.unit == "expert" else set(layer.placement.sizes) - {0}
    # the most assignments that a token can have on a unit of each size
    most = {size: k if layer.repeats else min(k, size) for size in sizes}
    ratios = {size: capacity_ratio(factor, k, size, experts) for size in sizes}
    always = all(ratios[n] >= m for n, m in most.items())
    if always or policy.pool == "request":
        return lambda tokens: always

    @lru_cache(maxsize=4096)
    def never(tokens: int) -> bool:
        return all(capacity(ratios[n], tokens) >= tokens * m for n, m in most.items())

    return never
