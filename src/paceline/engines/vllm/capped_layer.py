"""One MoE layer of a vLLM worker: counts the model's choice, routes it, marks what is dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.engines.sharing import shares_budget, warn_of_sharing
from paceline.engines.vllm import scores
from paceline.engines.vllm.accelerator import DeviceCap
from paceline.engines.vllm.policies import check_policy, never_binding
from paceline.engines.vllm.routers import widened
from paceline.engines.vllm.savings import Experts
from paceline.engines.vllm.stand_ins import StandIns
from paceline.engines.vllm.tokens import Batch, current_batch, padding_of_forward
from paceline.facts import Facts, facts_for
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing import Assignment, RoutingInputs, route
from paceline.routing.active import rows_spared
from paceline.routing.capacity import tokens_needed
from paceline.routing.layer_stats import LayerStats
from paceline.routing.priority import token_priorities
from paceline.routing.stats import LoadAccumulator

DROPPED = -1
"""The id of a dropped slot."""

OBSERVE = CapacityPolicy(mode="observe")

Watcher = Callable[["CappedLayer", RoutingInputs, Assignment], None]


@dataclass(frozen=True)
class Ranks:
    """Where a worker stands.

    Attributes:
        rank: of the worker among all of them.
        expert_rank: among those that share out the experts.
        expert_ranks: how many share out the experts; 1: every worker has all of them.
        data_ranks: how many bring tokens of their own.
        counts: whether this worker counts, where several see the same tokens and experts.
    """

    rank: int = 0
    expert_rank: int = 0
    expert_ranks: int = 1
    data_ranks: int = 1
    counts: bool = True


class CappedLayer:
    """Stands behind one router.

    Args:
        name: of the layer.
        index: among the model's MoE layers.
        router: vLLM's, for its rule of scoring.
        k: experts a token.
        placement: expert -> device; None: every expert is a device of its own.
        num_experts: as the kernel sees them.
        ranks: where this worker stands.
        prompt_lengths: gives [requests] int64 prompt tokens of the running forward's requests.
        experts: where dropped rows may be computed if that is quicker than leaving them out; None:
            they are always left out.

    Attributes:
        stand_ins: what dropped assignments leave, None without a calibration.
        dropped_computed: assignments that were dropped, and computed all the same with weight 0.
    """

    def __init__(
        self,
        name: str,
        index: int,
        router: Any,
        k: int,
        placement: ExpertPlacement | None,
        num_experts: int,
        ranks: Ranks,
        prompt_lengths: Callable[[int], Tensor],
        experts: Experts | None = None,
    ) -> None:
        self.experts, self.dropped_computed = experts, 0
        self.stand_ins: StandIns | None = None
        self.name, self.index, self.k, self.num_experts = name, index, k, num_experts
        self.placement, self.ranks = placement, ranks
        self._router, self._prompt_lengths = router, prompt_lengths
        self.scoring = scores.scoring_of(router)
        self._repeats = _may_repeat(router)
        self.replicated = getattr(router, "eplb_state", None) is not None
        self._weightless = type(router).__name__.endswith("ZeroExpertRouter")
        self.units = placement or ExpertPlacement.per_expert(num_experts)
        self.loads = LoadAccumulator(name, self.units, k, "cpu")
        self.on_device: DeviceCap | None = None  # set where the layer runs on an accelerator
        self.watchers: list[tuple[Watcher, Facts]] = []
        self.policy: CapacityPolicy | None = None
        self.slots = 0
        self.warns = False  # whether this layer says that requests share a budget
        self._step = 0
        self._tokens_needed = self._spared = 0
        self._never_binds: Callable[[int], bool] = lambda tokens: True

    # -- policy -----------------------------------------------------------------------------------

    def check(self, policy: CapacityPolicy) -> None:
        """Refuse a policy that this layer can't follow.

        Raises:
            ValueError: naming the field, the layer and what is allowed.
        """
        check_policy(self, policy)
        if self.on_device is not None:
            self.on_device.check(policy)

    def follow(self, policy: CapacityPolicy | None) -> None:
        """Put a checked policy in force; None: nothing is done and nothing counted."""
        self.policy = policy
        if self.on_device is not None:
            self.on_device.follow(policy)
            return
        self.loads.min_expert_load = None
        if policy is None or not policy.caps:
            return
        load = self.loads.min_expert_load = policy.resolved_min_expert_load("cpu")
        self._tokens_needed = tokens_needed(load, self.k, self.num_experts)
        self._spared = rows_spared(policy.max_active, self.units, self.k)
        self._routed = policy
        if policy.pool == "source":
            # the whole forward was judged on the host, and only one source has tokens here
            self._routed = policy.replace(min_expert_load=0)
            if policy.expand != "own_device":
                self._routed = self._routed.replace(pool="batch")
        self._never_binds = never_binding(policy, self.units, self.k, self._repeats)

    # -- running ----------------------------------------------------------------------------------

    def cap(self, weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor) -> None:
        """Mark dropped slots `DROPPED` and zero their weights, in place.

        Args:
            weights: [tokens, k] float32.
            ids: [tokens, k] int32.
            hidden: [tokens, hidden] states of the tokens.
            logits: [tokens, experts] of the router.
        """
        if self.on_device is not None:
            self._cap_on_device(self.on_device, weights, ids, logits)
            return
        if self.policy is None:
            return
        batch = current_batch(ids.shape[0])
        if not batch.real:
            return
        assignment = self._routed_batch(batch, weights, ids, hidden, logits)
        if assignment is None or self.policy.mode != "enforce":
            return
        kept = assignment.kept
        lost = ~kept & self._offered(ids, weights, batch.valid)
        chosen_weights = weights.clone() if self.policy.renormalize else weights
        if self.policy.renormalize:
            weights.copy_(torch.where(kept, assignment.topk_weights, weights))
        if self.policy.compensate and self.stand_ins is not None:
            self.stand_ins.expect(ids, chosen_weights, lost)
        weights.masked_fill_(lost, 0)
        if self.experts is not None:
            dropped = int(np.count_nonzero(lost.numpy()))
            if not self.experts.skipping_pays(dropped, batch.tokens * self.k):
                self.dropped_computed += dropped if self.ranks.counts else 0
                return
        ids.masked_fill_(lost, DROPPED)

    def _cap_on_device(self, cap: DeviceCap, weights: Tensor, ids: Tensor, logits: Tensor) -> None:
        """The same in a captured graph, where no Python decides."""
        scored = None
        if self.scoring is not None:
            chosen = self._router.logical_ids if self.replicated else ids
            table = scores.RULES[self.scoring](logits)
            scored = table.gather(1, chosen.long().clamp(0, table.shape[1] - 1))
        padding = padding_of_forward()
        assigned = self._assigned(ids, weights)
        if assigned is ids:
            cap(weights, ids, scored, None if padding is None else ~padding)
            return
        marked = assigned.clone()
        cap(weights, marked, scored, None if padding is None else ~padding)
        ids.copy_(torch.where(assigned < 0, ids, marked))

    def stats(self) -> LayerStats:
        """What was counted so far; on an accelerator without peaks and gate mass."""
        counted = self.loads.result()
        if self.on_device is None:
            return counted
        before, after = self.on_device.loads.tolist()
        forwards, capped, tokens = self.on_device.counts.tolist()
        return replace(
            counted,
            forwards=forwards,
            capped_forwards=capped,
            tokens=tokens,
            assignments=sum(before),
            dropped=sum(before) - sum(after),
            expert_loads_before=before,
            expert_loads_after=after,
        )

    def reset_stats(self) -> None:
        """Forget what was counted: a warm-up is nobody's tokens."""
        self.loads.reset()
        self.dropped_computed = 0
        if self.on_device is not None:
            self.on_device.loads.zero_()
            self.on_device.counts.zero_()

    def expand(
        self, weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor, slots: int
    ) -> tuple[Tensor, Tensor]:
        """[tokens, slots] weights and ids of what is kept, extras after the first k."""
        wide_weights, wide_ids = widened(weights, slots, 0), widened(ids, slots, DROPPED)
        if self.policy is None:
            return wide_weights, wide_ids
        batch = current_batch(ids.shape[0])
        if not batch.real:
            return wide_weights, wide_ids
        assignment = self._routed_batch(batch, weights, ids, hidden, logits)
        if assignment is None or self.policy.mode != "enforce":
            return wide_weights, wide_ids
        used = assignment.kept.shape[1]
        alone = ~self._offered(ids, weights, batch.valid)  # no assignments: as they were
        kept = assignment.kept
        new_ids = torch.where(kept, assignment.topk_ids, DROPPED).to(ids.dtype)
        new_weights = torch.where(kept, assignment.topk_weights, 0)
        wide_ids[:, :used] = new_ids
        wide_weights[:, :used] = new_weights
        k = ids.shape[1]
        wide_ids[:, :k] = torch.where(alone, ids, new_ids[:, :k])
        wide_weights[:, :k] = torch.where(alone, weights, new_weights[:, :k])
        return wide_weights, wide_ids

    def _routed_batch(
        self, batch: Batch, weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor
    ) -> Assignment | None:
        """What routing says, counted; None where the choice stays as it is."""
        policy = self.policy
        if policy is None:
            return None
        idle = not policy.caps or self._idle(batch)
        if idle:
            if self.ranks.counts:
                # a copy: vLLM may use the memory again
                self.loads.observe(self._assigned(ids, weights).clone(), batch.valid)
            if self.watchers:
                self._watched(self._inputs(batch, weights, ids, hidden, logits), OBSERVE)
            return None
        if self.warns and shares_budget(policy) and batch.requests > 1:
            self.warns = False
            warn_of_sharing(policy, batch.requests)
        inputs = self._inputs(batch, weights, ids, hidden, logits)
        assignment = self._watched(inputs, self._routed)
        if self.ranks.counts:
            self.loads.add(assignment)
        return assignment

    def _watched(self, inputs: RoutingInputs, policy: CapacityPolicy) -> Assignment:
        assignment = route(inputs, policy, self.units)
        for watcher, _ in list(self.watchers):
            watcher(self, inputs, assignment)
        return assignment

    def _idle(self, batch: Batch) -> bool:
        """Whether it is certain on the host that nothing is capped."""
        policy = self.policy
        assert policy is not None
        tokens = batch.everywhere if policy.pool == "source" else batch.tokens
        if tokens < self._tokens_needed:
            return tokens <= self._spared
        return self._never_binds(batch.tokens)

    def _inputs(
        self, batch: Batch, weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor
    ) -> RoutingInputs:
        policy = self.policy if self.policy is None or not self.policy.caps else self._routed
        assert policy is not None
        facts = Facts.union(facts_for(policy), *(asked for _, asked in self.watchers))
        given: dict[str, Any] = {}
        if facts.scores and self.scoring is not None:
            scored = scores.RULES[self.scoring](logits)
            if self.replicated:
                chosen = self._router.logical_ids
                given["topk_scores"] = scored.gather(1, chosen.long())
            else:
                given["scores"] = scored[:, : self.num_experts]
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

    def _assigned(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Ids where what vLLM gives expert 0 and no weight, a zero expert, is no assignment."""
        return torch.where(weights == 0, -1, ids) if self._weightless else ids

    def _offered(self, ids: Tensor, weights: Tensor, valid: Tensor | None) -> Tensor:
        """[tokens, k] bool: assignments of real tokens."""
        ids = self._assigned(ids, weights)
        offered = (ids >= 0) & (ids < self.num_experts)
        return offered if valid is None else offered & valid.unsqueeze(1)


def _may_repeat(router: Any) -> bool:
    """Whether a token's choice may name one expert twice: a table by token id may."""
    names = ("_hash_indices_table", "hash_indices_table")
    return any(getattr(router, name, None) is not None for name in names)
