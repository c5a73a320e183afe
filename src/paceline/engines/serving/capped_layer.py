"""One MoE layer of a serving worker: counts the model's choice, routes it, marks dropped slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.engines.rules import LayerTraits, check_policy, layer_rule, never_binding
from paceline.engines.scoring import RULES
from paceline.engines.serving.batch import Batch
from paceline.engines.serving.environment import FORM, FORMS
from paceline.engines.serving.stand_ins import StandIns
from paceline.engines.sharing import shares_budget, warn_of_sharing
from paceline.facts import Facts, facts_for
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing import Assignment, RoutingInputs
from paceline.routing.layer_stats import LayerStats
from paceline.routing.limits import Budget
from paceline.routing.ranking import token_priorities
from paceline.routing.route import assign
from paceline.routing.stats import LoadAccumulator

DROPPED = -1
"""Id of a dropped slot."""

OBSERVE = CapacityPolicy(mode="observe")

Watcher = Callable[["CappedLayer", RoutingInputs, Assignment], None]


@dataclass(frozen=True)
class Ranks:
    """Position of a worker among all workers, for one layer.

    Attributes:
        expert_rank: among the ranks that share the experts.
        expert_ranks: number of ranks that share the experts; 1: every worker has all of them.
        data_ranks: number of ranks with tokens of their own.
        counts: True if this worker counts; one does if several see the same tokens and experts.
    """

    expert_rank: int = 0
    expert_ranks: int = 1
    data_ranks: int = 1
    counts: bool = True


class Cost(Protocol):
    """Cost of experts that may compute dropped rows with weight 0."""

    def skipping_pays(self, dropped: int, assignments: int) -> bool:
        """Return True if it is quicker to leave out so many of a forward's assignments."""


class CappedLayer:
    """The cap behind one router; an engine's subclass reads its forwards.

    Args:
        shape: name, experts per token and number of experts.
        index: among the model's MoE layers.
        placement: expert -> device; None: every expert is a device of its own.
        scoring: key of `RULES` by which the router scores, None if it isn't known.
        cost: of experts that may compute dropped rows if that is quicker; None: they never may.
        computes: True if experts compute every dropped row with weight 0.

    Attributes:
        stand_ins: of dropped assignments, None without a calibration.
        dropped_computed: number of dropped assignments that were computed with weight 0.
        graphed: True where a captured graph caps, in which no Python runs.
        warns: True until the layer has warned that requests share a budget.
    """

    repeats = False  # whether a token's choice may name one expert twice
    replicated = False  # whether an expert has several ids
    graphed = False

    def __init__(
        self,
        shape: tuple[str, int, int],
        index: int,
        placement: ExpertPlacement | None,
        ranks: Ranks,
        scoring: str | None,
        cost: Cost | None = None,
        computes: bool = False,
    ) -> None:
        self.name, self.k, self.num_experts = shape
        self.index = index
        self.ranks, self.cost, self.dropped_computed = ranks, cost, 0
        self._computes, self._scoring = computes, scoring
        self.units = placement or ExpertPlacement.per_expert(self.num_experts)
        self.loads = LoadAccumulator(self.name, self.units, self.k, "cpu")
        self.stand_ins: StandIns | None = None
        self.watchers: list[tuple[Watcher, Facts]] = []
        self.policy: CapacityPolicy | None = None
        self.warns = False
        self._step = 0

    # -- of an engine -----------------------------------------------------------------------------

    def _batch(self, rows: int) -> Batch:
        """Return the tokens of the running forward, in which this layer has so many rows."""
        raise NotImplementedError

    def _prompt_lengths(self, requests: int) -> Tensor:
        """Return [requests] int64 prompt tokens of the running forward's requests."""
        raise NotImplementedError

    def _logical(self, ids: Tensor) -> Tensor:
        """Return [tokens, k] ids of the model's own experts, for ids that may be of replicas."""
        return ids

    def _assigned(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Return ids in which a slot that is no assignment is -1."""
        return ids

    # -- policy -----------------------------------------------------------------------------------

    def traits(self) -> LayerTraits:
        """Return the properties on which it depends what policies the layer can run."""
        known, ranks = self._scoring is not None, self.ranks
        same_tokens = ranks.expert_ranks > 1 and ranks.data_ranks == 1
        return LayerTraits(
            name=self.name,
            k=self.k,
            placement=self.units,
            repeats=self.repeats,
            chosen_scores=known,
            all_scores=known and not self.replicated,
            scores_reason="under EPLB a replica has no score" if known
            else "how it scores its experts is not known",
            calibrated=self.stand_ins is not None,
            calibration_option="start the server with --calibration FOLDER (PACELINE_CALIBRATION)",
            compensates_extras=False,
            expand_refusal="all ranks see the same tokens, which are on no device" if same_tokens
            else "",
            knows_source=ranks.data_ranks > 1,
            source_option="that takes data and expert parallelism",
            sees_all_ranks=ranks.data_ranks == 1,
            modalities=(),
            modalities_reason="MoE layers of a serving engine can't tell image tokens from text",
        )  # fmt: skip

    def check(self, policy: CapacityPolicy) -> None:
        """Refuse a policy that this layer can't run.

        Raises:
            ValueError: naming the field, the layer and what is allowed.
        """
        check_policy(policy, self.traits())
        if self._computes and policy.expand is not None:
            raise ValueError(
                f"expand={policy.expand} is not allowed with {FORM}={FORMS[1]}: an extra takes the "
                "place of a dropped slot, which is computed."
            )

    def set_policy(self, policy: CapacityPolicy | None) -> None:
        """Put a checked policy in force; None: nothing is dropped or counted."""
        self.policy = policy
        self.loads.min_expert_load = None
        if policy is None:
            return
        traits = self.traits()
        self._rule, self._never_binds = layer_rule(policy, traits), never_binding(policy, traits)
        self._routed = policy
        if policy.caps:
            self.loads.min_expert_load = policy.resolved_min_expert_load("cpu")
        if policy.caps and policy.pool == "source":
            # the load was compared on the host, and here all tokens have one source
            self._routed = policy.replace(min_expert_load=0)
            if policy.expand != "own_device":
                self._routed = self._routed.replace(pool="batch")
        self._facts = facts_for(self._routed)

    # -- a forward --------------------------------------------------------------------------------

    def cap(self, weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor) -> None:
        """Set ids of dropped slots to `DROPPED` and their weights to 0, in place.

        Args:
            weights: [tokens, k] float32.
            ids: [tokens, k] int32.
            hidden: [tokens, hidden] states of the tokens.
            logits: [tokens, experts] of the router.
        """
        routed = self._route(weights, ids, hidden, logits)
        if routed is None:
            return
        batch, kept, policy = routed[0], routed[1].kept, self._routed
        dropped = ~kept & self._offered(ids, weights, batch.valid)
        chosen_weights = weights.clone() if policy.renormalize else weights
        if policy.renormalize:
            weights.copy_(torch.where(kept, routed[1].topk_weights, weights))
        if policy.compensate and self.stand_ins is not None:
            self.stand_ins.expect(ids, chosen_weights, dropped)
        weights.masked_fill_(dropped, 0)
        if self._computes or self.cost is not None:
            count = int(np.count_nonzero(dropped.numpy()))
            pays = self.cost is not None and self.cost.skipping_pays(count, batch.tokens * self.k)
            if self._computes or not pays:
                self.dropped_computed += count if self.ranks.counts else 0
                return
        ids.masked_fill_(dropped, DROPPED)

    def expand(
        self, weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor, slots: int
    ) -> tuple[Tensor, Tensor]:
        """Return [tokens, slots] weights and ids of what is kept, extras after the first k."""
        wide_weights, wide_ids = widen(weights, slots, 0), widen(ids, slots, DROPPED)
        routed = self._route(weights, ids, hidden, logits)
        if routed is None:
            return wide_weights, wide_ids
        batch, assignment = routed
        kept, k = assignment.kept, ids.shape[1]
        untouched = ~self._offered(ids, weights, batch.valid)  # no assignments: they stay
        new_ids = torch.where(kept, assignment.topk_ids, DROPPED).to(ids.dtype)
        new_weights = torch.where(kept, assignment.topk_weights, 0)
        wide_ids[:, : kept.shape[1]] = new_ids
        wide_weights[:, : kept.shape[1]] = new_weights
        wide_ids[:, :k] = torch.where(untouched, ids, new_ids[:, :k])
        wide_weights[:, :k] = torch.where(untouched, weights, new_weights[:, :k])
        return wide_weights, wide_ids

    def _route(
        self, weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor
    ) -> tuple[Batch, Assignment] | None:
        """Route and count; return None if the model's choice stays as it is."""
        policy = self.policy
        if policy is None:
            return None
        batch = self._batch(ids.shape[0])
        if not batch.real:
            return None
        # the host knows the number of tokens, so it may be certain that nothing is capped
        rule, pooled = self._rule, batch.tokens
        if policy.pool == "source":
            pooled = batch.everywhere
        stays_out = rule.stays_out(None, pooled, on_cpu=True, exact=True)
        if stays_out or (pooled >= rule.min_rows[True] and self._never_binds(batch.tokens)):
            if self.ranks.counts:
                # a copy, because the engine may use the memory again
                self.loads.observe(self._assigned(ids, weights).clone(), batch.valid)
            if self.watchers:
                self._assign(self._inputs(batch, weights, ids, hidden, logits), OBSERVE)
            return None
        if self.warns and shares_budget(policy) and batch.requests > 1:
            self.warns = False
            warn_of_sharing(policy, batch.requests)
        assignment = self._assign(self._inputs(batch, weights, ids, hidden, logits), self._routed)
        if self.ranks.counts:
            self.loads.add(assignment)
        return (batch, assignment) if policy.mode == "enforce" else None

    def _assign(self, inputs: RoutingInputs, policy: CapacityPolicy) -> Assignment:
        assignment = assign(inputs, policy, self.units)
        for watcher, _ in list(self.watchers):
            watcher(self, inputs, assignment)
        return assignment

    def _inputs(
        self, batch: Batch, weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor
    ) -> RoutingInputs:
        policy = self._routed
        facts = self._facts
        if self.watchers:
            facts = Facts.union(facts, *(needed for _, needed in self.watchers))
        given: dict[str, Any] = {}
        if facts.scores and self._scoring is not None:
            scores = RULES[self._scoring](logits.float())
            if self.replicated:
                given["topk_scores"] = scores.gather(1, self._logical(ids).long())
            else:
                given["scores"] = scores[:, : self.num_experts]
        if policy.keep == "contribution" and self.stand_ins is not None:
            given["expert_norms"] = self.stand_ins.norms(hidden, policy.compensate)
        if facts.request:
            given["token_request"] = batch.request
        if facts.decode:
            given["token_decode"] = batch.decode(self._prompt_lengths(batch.requests))
        if facts.position:
            given["token_priority"] = token_priorities(policy, position=batch.position)
        if facts.source and self.ranks.data_ranks > 1:
            source = torch.full((batch.rows,), self.ranks.expert_rank, dtype=torch.int64)
            given["token_source"] = source
        if facts.step:
            self._step += 1
        return RoutingInputs(
            topk_ids=self._assigned(ids, weights),
            topk_weights=weights,
            valid=batch.valid,
            num_experts=self.num_experts,
            layer=self.index,
            step=self._step,
            **given,
        )

    def _offered(self, ids: Tensor, weights: Tensor, valid: Tensor | None) -> Tensor:
        """Return [tokens, k] bool, True for assignments of real tokens."""
        ids = self._assigned(ids, weights)
        offered = (ids >= 0) & (ids < self.num_experts)
        return offered if valid is None else offered & valid.unsqueeze(1)

    # -- statistics -------------------------------------------------------------------------------

    def stats(self) -> LayerStats:
        """Return the counts so far."""
        return self.loads.result()

    def reset_stats(self) -> None:
        """Reset the counts: a warm-up's tokens are nobody's."""
        self.loads.reset()
        self.dropped_computed = 0


def slots_for(policy: CapacityPolicy, units: ExpertPlacement, k: int) -> int:
    """Return the ids per token that a policy may need, 0 if it doesn't expand."""
    if policy.expand is None or not policy.caps:
        return 0
    ids = torch.zeros((1, k), dtype=torch.int64)
    inputs = RoutingInputs(topk_ids=ids, topk_weights=ids.float(), num_experts=units.num_experts)
    return Budget(inputs, policy, units).slots


def widen(tensor: Tensor, slots: int, fill: float) -> Tensor:
    """Return a copy [tokens, slots] of a tensor [tokens, k], with `fill` in the further slots."""
    wide = tensor.new_full((tensor.shape[0], slots), fill)
    wide[:, : tensor.shape[1]] = tensor
    return wide
