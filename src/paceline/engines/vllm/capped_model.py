"""All capped layers of a worker's model: policies put in force, described and counted."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from paceline.engines.vllm.accelerator import DeviceCap
from paceline.engines.vllm.capped_layer import CappedLayer, Ranks, Watcher
from paceline.engines.vllm.checks import check_settings, moe_layers
from paceline.engines.vllm.environment import CALIBRATION, Wanted
from paceline.engines.vllm.notices import tell_of_shared_cache, tell_what_is_saved
from paceline.engines.vllm.runners import experts_of, placement_for, slots_for
from paceline.engines.vllm.stand_ins import calibration_folder, stand_ins_of
from paceline.facts import NO_FACTS, Facts
from paceline.policy import CapacityPolicy
from paceline.routing import RoutingInputs, route
from paceline.routing.layer_stats import LayerStats

logger = logging.getLogger("vllm.paceline")


class CappedModel:
    """The capped layers of the model that one worker runs.

    Args:
        model_runner: vLLM's, with the loaded model.
        config: vLLM's.
        wanted: what the environment asks for.
        rank: of the worker among all of them.

    Raises:
        ValueError: if a layer, a setting or the plan doesn't allow it.
    """

    def __init__(self, model_runner: Any, config: Any, wanted: Wanted, rank: int) -> None:
        self._runner, self._config, self._wanted = model_runner, config, wanted
        self.accepted = wanted.accept_shared_budget
        runners = moe_layers(model_runner.get_model())
        several = len(wanted.policies) > 1 or (wanted.plan and len(wanted.plan.placements) > 1)
        if several and config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError(
                "one policy or placement a layer is not allowed under pipeline parallelism, where "
                "a worker sees some layers only."
            )
        if wanted.plan is not None and config.parallel_config.pipeline_parallel_size == 1:
            wanted.plan.check_model(
                [r.moe_config.num_logical_experts for r in runners],
                [r.moe_config.experts_per_token for r in runners],
                replicates=True,
            )
        self.layers = [self._layer(runner, index, rank) for index, runner in enumerate(runners)]
        self._take_stand_ins(runners)
        self.layers[0].warns = not self.accepted and rank == 0
        self.rank = rank
        self.set_policies(self._at_start())
        for runner, layer in zip(runners, self.layers, strict=True):
            runner.router.paceline_layer = layer
            if current_platform.is_cpu():
                kernel = runner.routed_experts.quant_method.moe_kernel.fused_experts
                kernel.paceline_layer, kernel.paceline_name = layer, runner.layer_name
        self._warm_up()
        logger.info(
            "paceline caps %d MoE layers of this worker with %s, on %d devices",
            len(self.layers), self.layers[0].policy, self.layers[0].units.num_devices,
        )  # fmt: skip
        capped = any(policy is not None and policy.caps for policy in self._at_start())
        if rank == 0 and capped:
            tell_what_is_saved(layer.experts for layer in self.layers)
            if config.cache_config.enable_prefix_caching and not self.accepted:
                tell_of_shared_cache()

    # -- policies ---------------------------------------------------------------------------------

    def set_policies(self, policies: Sequence[CapacityPolicy | None]) -> None:
        """Put one policy a layer in force, all or none; None: neither cap nor count.

        Raises:
            ValueError: if vLLM's settings or a layer don't allow one.
        """
        for layer, policy in zip(self.layers, self.check_policies(policies), strict=True):
            layer.follow(policy)

    def check_policies(
        self, policies: Sequence[CapacityPolicy | None]
    ) -> list[CapacityPolicy | None]:
        """The policies as they apply here, each of which its layer can follow.

        Raises:
            ValueError: if vLLM's settings or a layer don't allow one.
        """
        if len(policies) != len(self.layers):
            raise ValueError(
                f"{len(policies)} policies are not allowed: it is one, or one for each of the "
                f"{len(self.layers)} MoE layers."
            )
        named = [self._suited(policy) for policy in policies]
        asked = [policy for policy in named if policy is not None]
        check_settings(self._config, asked, self.accepted)
        for layer, policy in zip(self.layers, named, strict=True):
            if policy is not None:
                layer.check(policy)
                self._check_slots(layer, policy)
        return named

    def read(self, text: str | None) -> list[CapacityPolicy | None]:
        """One policy a layer from a short form for all; "start": as the engine began; None: off.

        Raises:
            ValueError: if it is no policy.
        """
        if text is None:
            return [None] * len(self.layers)
        if text == "start":
            return list(self._at_start())
        return [CapacityPolicy.parse(text)] * len(self.layers)

    def _at_start(self) -> list[CapacityPolicy | None]:
        policies = self._wanted.policies
        return list(policies) if len(policies) > 1 else [policies[0]] * len(self.layers)

    def _suited(self, policy: CapacityPolicy | None) -> CapacityPolicy | None:
        """Under data parallelism a pool that nobody named is the source's."""
        several = self.layers[0].ranks.data_ranks > 1
        if policy is None or not several or "pool" in policy.model_fields_set:
            return policy
        return policy.replace(pool="source")

    def _check_slots(self, layer: CappedLayer, policy: CapacityPolicy) -> None:
        """Places for extras are part of the compiled model."""
        slots = slots_for(policy, layer.units, layer.k)
        have = layer.slots or layer.k
        if max(slots, layer.k) > have:
            raise ValueError(
                f"expand={policy.expand} needs {slots} slots a token, the running model has "
                f"{have}: start the server with it."
            )

    # -- what it does -----------------------------------------------------------------------------

    def stats(self) -> list[LayerStats]:
        """Loads and drops of every layer since the server started."""
        return [layer.stats() for layer in self.layers]

    def reset_stats(self) -> None:
        """Forget what was counted."""
        for layer in self.layers:
            layer.reset_stats()

    def policy_text(self) -> str:
        """The policy in force, one a layer where they differ, or "off"."""
        texts = ["off" if p is None else str(p) for p in (la.policy for la in self.layers)]
        return texts[0] if len(set(texts)) == 1 else "; ".join(texts)

    def watch(self, watcher: Watcher, facts: Facts = NO_FACTS) -> Callable[[], None]:
        """Have `watcher(layer, inputs, assignment)` called on every forward with tokens.

        Args:
            watcher: while a policy is in force, be it observe.
            facts: that its inputs are to have beside those the policy asks for.

        Returns:
            What ends it.
        """
        entry = (watcher, facts)
        for layer in self.layers:
            layer.watchers.append(entry)

        def undo() -> None:
            for layer in self.layers:
                layer.watchers.remove(entry)

        return undo

    def describe(self) -> dict[str, Any]:
        """What is in force and what it did, ready for JSON."""
        stats = self.stats()
        ranks = self.layers[0].ranks
        policies = [layer.policy for layer in self.layers]
        one = policies[0] if len(set(policies)) == 1 else None
        return {
            "rank": self.rank,
            "layers": len(self.layers),
            "devices": self.layers[0].units.num_devices,
            "expert_rank": ranks.expert_rank,
            "data_ranks": ranks.data_ranks,
            "off": policies[0] is None,
            "policy": None if one is None else str(one),
            "fields": None if one is None else json.loads(one.to_json()),
            "policies": None if one is not None else [p and str(p) for p in policies],
            "min_expert_load": stats[0].min_expert_load,
            "forwards": max(layer.forwards for layer in stats),
            "capped_forwards": max(layer.capped_forwards for layer in stats),
            "assignments": sum(layer.assignments for layer in stats),
            "dropped": sum(layer.dropped for layer in stats),
            "dropped_computed": sum(layer.dropped_computed for layer in self.layers),
            "enforced": one is not None and one.mode == "enforce",
            "by_layer": [
                {
                    "name": layer.name,
                    "assignments": layer.assignments,
                    "dropped": layer.dropped,
                    "device_peak_to_mean_before": layer.device_peak_to_mean_before,
                    "device_peak_to_mean_after": layer.device_peak_to_mean_after,
                }
                for layer in stats
            ],
        }

    # -- making -----------------------------------------------------------------------------------

    def _layer(self, runner: Any, index: int, rank: int) -> CappedLayer:
        experts = runner.router.global_num_experts
        manager, parallel = runner.expert_map_manager, runner.moe_config.moe_parallel_config
        ranks = Ranks(
            rank=rank,
            expert_rank=manager.ep_rank,
            expert_ranks=manager.ep_size,
            data_ranks=parallel.dp_size,
            counts=manager.ep_size > 1 or parallel.tp_rank == 0,
        )
        layer = CappedLayer(
            name=runner.layer_name,
            index=index,
            router=runner.router,
            k=runner.router.top_k,
            placement=placement_for(runner, index, self._wanted),
            num_experts=experts,
            ranks=ranks,
            prompt_lengths=self._prompt_lengths,
            experts=experts_of(runner),
        )
        layer.slots = runner.router.paceline_slots
        if not current_platform.is_cpu():
            layer.on_device = self._device_cap(layer, index)
        return layer

    def _take_stand_ins(self, runners: list[Any]) -> None:
        folder = calibration_folder(self._wanted)
        if folder is None:
            return
        if not current_platform.is_cpu():
            raise ValueError(f"{CALIBRATION} is not allowed on an accelerator: it was never run.")
        found = stand_ins_of(folder, runners, self._config)
        for layer, stand_ins in zip(self.layers, found, strict=True):
            layer.stand_ins = stand_ins

    def _device_cap(self, layer: CappedLayer, index: int) -> DeviceCap:
        policies = self._wanted.policies
        policy = policies[index] if len(policies) > 1 else policies[0]
        return DeviceCap(
            policy,
            layer.units,
            layer.k,
            self._config.scheduler_config.max_num_batched_tokens,
            self._runner.device,
            Fraction(1, layer.ranks.data_ranks),
        )

    def request_ids(self) -> list[str] | None:
        """vLLM's names of the running forward's requests, None where it doesn't tell."""
        batch = getattr(self._runner, "input_batch", None)
        names = getattr(batch, "req_ids", None)
        return None if names is None else list(names)

    def _prompt_lengths(self, requests: int) -> Tensor:
        batch = getattr(self._runner, "input_batch", None)
        lengths = getattr(batch, "num_prompt_tokens", None)
        if lengths is None:
            raise RuntimeError(
                "paceline: phase=prefill needs vLLM's model runner V1, which knows prompt lengths."
            )
        return torch.as_tensor(lengths[:requests]).long()

    def _warm_up(self) -> None:
        """Route made-up tokens, so that no request waits for the router to be compiled."""
        for layer in {layer.policy: layer for layer in self.layers}.values():
            policy = layer.policy
            if policy is None or not policy.caps or layer.on_device is not None:
                continue
            rows = 64
            scores = torch.rand(rows, layer.num_experts)
            weights, ids = torch.topk(scores, layer.k)
            label = torch.zeros(rows, dtype=torch.int64)
            inputs = RoutingInputs(
                topk_ids=ids.int(), topk_weights=weights, scores=scores, token_request=label,
                token_source=label, token_decode=label.bool(),
                expert_norms=torch.ones(layer.num_experts),
            )  # fmt: skip
            route(inputs, policy.replace(min_expert_load=0), layer.units)
