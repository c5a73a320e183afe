"""One MoE layer of a vLLM worker: its router, its forward, and the cap in a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.engines.scoring import RULES, rule_named
from paceline.engines.serving.batch import Batch
from paceline.engines.serving.capped_layer import CappedLayer, Ranks
from paceline.engines.vllm.accelerator import DeviceCap
from paceline.engines.vllm.cpu_experts import ExpertCost
from paceline.engines.vllm.tokens import current_batch, padding_of_forward
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing.layer_stats import LayerStats


class VllmLayer(CappedLayer):
    """The cap behind one of vLLM's routers.

    Args:
        prompt_lengths: (number of requests) -> [requests] int64 prompt tokens of the running
            forward's requests.

    Attributes:
        slots: ids per token after expansion, 0 if nothing can expand.
        on_device: the cap of a layer on an accelerator, None on a CPU.
    """

    def __init__(
        self,
        runner: Any,
        index: int,
        placement: ExpertPlacement | None,
        ranks: Ranks,
        prompt_lengths: Callable[[int], Tensor],
        cost: ExpertCost | None = None,
        computes: bool = False,
    ) -> None:
        router = runner.router
        shape = (runner.layer_name, router.top_k, router.global_num_experts)
        super().__init__(shape, index, placement, ranks, _scoring_rule(router), cost, computes)
        self.slots: int = router.paceline_slots
        self.cost: ExpertCost | None = cost
        self._router, self._lengths = router, prompt_lengths
        names = ("_hash_indices_table", "hash_indices_table")  # experts by token id
        self.repeats = any(getattr(router, name, None) is not None for name in names)
        self.replicated = getattr(router, "eplb_state", None) is not None
        self._weightless = type(router).__name__.endswith("ZeroExpertRouter")
        self.on_device: DeviceCap | None = None

    @property
    def graphed(self) -> bool:  # type: ignore[override]
        """True on an accelerator."""
        return self.on_device is not None

    def check(self, policy: CapacityPolicy) -> None:
        """Refuse a policy that this layer can't run, as `CappedLayer.check` does."""
        super().check(policy)
        if self.on_device is not None:
            self.on_device.check(policy)

    def set_policy(self, policy: CapacityPolicy | None) -> None:
        """Put a checked policy in force; None: nothing is dropped or counted."""
        if self.on_device is None:
            super().set_policy(policy)
            return
        self.policy = policy
        self.on_device.set_policy(policy)

    def cap(self, weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor) -> None:
        """Set ids of dropped slots to -1 and their weights to 0, as `CappedLayer.cap` does."""
        if self.on_device is None:
            super().cap(weights, ids, hidden, logits)
        else:
            self._cap_on_device(self.on_device, weights, ids, logits)

    def _cap_on_device(self, cap: DeviceCap, weights: Tensor, ids: Tensor, logits: Tensor) -> None:
        """Cap in a captured graph, in which no Python runs."""
        scores = None
        if self._scoring is not None:
            chosen = self._logical(ids) if self.replicated else ids
            table = RULES[self._scoring](logits.float())
            scores = table.gather(1, chosen.long().clamp(0, table.shape[1] - 1))
        padding = padding_of_forward()
        valid = None if padding is None else ~padding
        assigned = self._assigned(ids, weights)
        if assigned is ids:
            cap(weights, ids, scores, valid)
            return
        marked = assigned.clone()
        cap(weights, marked, scores, valid)
        ids.copy_(torch.where(assigned < 0, ids, marked))

    def stats(self) -> LayerStats:
        """Return the counts so far; on an accelerator without peaks and gate mass."""
        counted = super().stats()
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
        """Reset the counts: a warm-up's tokens are nobody's."""
        super().reset_stats()
        if self.on_device is not None:
            self.on_device.loads.zero_()
            self.on_device.counts.zero_()

    def _batch(self, rows: int) -> Batch:
        return current_batch(rows)

    def _prompt_lengths(self, requests: int) -> Tensor:
        return self._lengths(requests)

    def _logical(self, ids: Tensor) -> Tensor:
        return self._router.logical_ids if self.replicated else ids

    def _assigned(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Return ids without zero experts, to which vLLM gives id 0 and no weight."""
        return torch.where(weights == 0, -1, ids) if self._weightless else ids


def _scoring_rule(router: Any) -> str | None:
    """Return the name of the rule by which a router scores, None if it is not known.

    A selection bias and groups only decide which experts are chosen; renormalisation and scaling
    come later.
    """
    if getattr(router, "custom_routing_function", None) is not None:
        return None
    return rule_named(getattr(router, "scoring_func", None))
