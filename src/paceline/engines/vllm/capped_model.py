"""All capped layers of a worker's model: their policies are checked, put in force and described."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from paceline.engines.rules import with_default_pool
from paceline.engines.sharing import warn_of_shared_cache
from paceline.engines.vllm.accelerator import DeviceCap
from paceline.engines.vllm.capped_layer import CappedLayer, Ranks, Watcher
from paceline.engines.vllm.cpu_experts import TrialFailed, patch_experts, try_experts
from paceline.engines.vllm.environment import (
    CALIBRATION,
    FORM,
    FORMS,
    Settings,
)
from paceline.engines.vllm.runners import (
    check_settings,
    cost_of,
    moe_runners,
    placement_of,
    slots_for,
)
from paceline.engines.vllm.stand_ins import load_stand_ins
from paceline.facts import NO_FACTS, Facts
from paceline.policy import CapacityPolicy
from paceline.routing import RoutingInputs, route
from paceline.routing.layer_stats import LayerStats

logger = logging.getLogger("vllm.paceline")

RUNG = "rung "
OWN_BUDGETS = (
    "pool=request: with prefix caching on, every request has a budget of its own, so that no batch "
    "changes what others read from the cache"
)

MUCH = 0.15
"""If more than this share must be dropped to save time, a warning says so."""


class CappedModel:
    """The capped layers of the model that one worker runs.

    Args:
        rank: of the worker among all of them.

    Raises:
        ValueError: if a layer, a setting or the plan excludes a cap.
    """

    def __init__(self, model_runner: Any, config: Any, settings: Settings, rank: int) -> None:
        self._runner, self._config, self._settings = model_runner, config, settings
        self.rank, self.accepted = rank, settings.accept_shared_budget
        runners, plan = moe_runners(model_runner.get_model()), settings.plan
        several = len(settings.policies) > 1 or (plan and len(plan.placements) > 1)
        pipeline = config.parallel_config.pipeline_parallel_size > 1
        if several and pipeline:
            raise ValueError(
                "one policy or placement per layer is not allowed under pipeline parallelism, "
                "where a worker has only some layers."
            )
        if plan is not None and not pipeline:
            plan.check_model(
                [r.moe_config.num_logical_experts for r in runners],
                [r.moe_config.experts_per_token for r in runners],
                replicates=True,
            )
        self.layers = [self._capped_layer(runner, index) for index, runner in enumerate(runners)]
        self.kernels = self._try_kernels(runners)
        self.note: str | None = None
        self._load_stand_ins(runners)
        self.layers[0].warns = not self.accepted and rank == 0
        self.set_policies(self._start_policies())
        for runner, layer in zip(runners, self.layers, strict=True):
            runner.router.paceline_layer = layer
            if current_platform.is_cpu():
                kernel = runner.routed_experts.quant_method.moe_kernel.fused_experts
                kernel.paceline_layer = layer
        self._warm_up()
        if rank == 0:
            self._say_what_is_capped()
        if rank == 0 and any(policy.caps for policy in settings.policies):
            self._warn_if_little_is_saved()
            if config.cache_config.enable_prefix_caching and not self.accepted:
                remedy = "give each user a cache_salt, or say --no-enable-prefix-caching"
                warn_of_shared_cache(remedy)

    # -- policies ---------------------------------------------------------------------------------

    def set_policies(
        self, policies: Sequence[CapacityPolicy | None], text: str | None = None
    ) -> None:
        """Put one policy per layer in force, all or none; None: neither cap nor count.

        Args:
            text: that they come from, as for `parse`.

        Raises:
            ValueError: as `check_policies` does.
        """
        checked = self.check_policies(policies)
        for layer, policy in zip(self.layers, checked, strict=True):
            layer.set_policy(policy)
        pools = [(a.pool, b.pool) for a, b in zip(policies, checked, strict=True) if a and b]
        notes = [OWN_BUDGETS] if any(new == "request" != old for old, new in pools) else []
        if text is not None and text.startswith(RUNG):
            notes.append(self._settings.rung(text.removeprefix(RUNG))[1])
        self.note = "; ".join(notes) or None
        if self.note is not None and self.rank == 0:
            logger.info("paceline: %s", self.note)

    def check_policies(
        self, policies: Sequence[CapacityPolicy | None]
    ) -> list[CapacityPolicy | None]:
        """Return the policies as they apply here.

        Raises:
            ValueError: if vLLM's settings or a layer exclude one.
        """
        if len(policies) != len(self.layers):
            raise ValueError(
                f"policies must be one, or one for each of the {len(self.layers)} MoE layers, got "
                f"{len(policies)}."
            )
        several = self.layers[0].ranks.data_ranks > 1
        # on an accelerator a captured graph knows no requests
        shared = self._config.cache_config.enable_prefix_caching and not self.accepted
        shared = shared and self.layers[0].on_device is None
        checked = [p and with_default_pool(p, several, shared) for p in policies]
        check_settings(self._config, [p for p in checked if p is not None], self.accepted)
        for layer, policy in zip(self.layers, checked, strict=True):
            if policy is not None:
                layer.check(policy)
                self._check_slots(layer, policy)
        return checked

    def parse(self, text: str | None) -> list[CapacityPolicy | None]:
        """Return one policy per layer for a short form.

        Args:
            text: short form; "start": as the engine began; "rung NAME": of the ladder beside the
                plan; None: off.

        Raises:
            ValueError: if it is no policy.
        """
        if text is None:
            return [None] * len(self.layers)
        if text == "start":
            return list(self._start_policies())
        if text.startswith(RUNG):
            own, _ = self._settings.rung(text.removeprefix(RUNG))
            return [*own] if len(own) > 1 else [own[0]] * len(self.layers)
        return [CapacityPolicy.parse(text)] * len(self.layers)

    def _start_policies(self) -> list[CapacityPolicy | None]:
        policies = self._settings.policies
        return list(policies) if len(policies) > 1 else [policies[0]] * len(self.layers)

    def _check_slots(self, layer: CappedLayer, policy: CapacityPolicy) -> None:
        """Check that the compiled model has room for a policy's extras."""
        slots = slots_for(policy, layer.units, layer.k)
        room = layer.slots or layer.k
        if max(slots, layer.k) > room:
            raise ValueError(
                f"expand={policy.expand} needs {slots} slots per token, the running model has "
                f"{room}: start the server with it."
            )

    # -- state ------------------------------------------------------------------------------------

    def stats(self) -> list[LayerStats]:
        """Return the loads and drops of every layer since the server started."""
        return [layer.stats() for layer in self.layers]

    def reset_stats(self) -> None:
        """Reset the counts of all layers."""
        for layer in self.layers:
            layer.reset_stats()

    def policy_text(self) -> str:
        """Return the policy in force, one per layer if they differ, or "off"."""
        texts = ["off" if p is None else str(p) for p in (la.policy for la in self.layers)]
        return texts[0] if len(set(texts)) == 1 else "; ".join(texts)

    def watch(self, watcher: Watcher, facts: Facts = NO_FACTS) -> Callable[[], None]:
        """Call `watcher(layer, inputs, assignment)` on every forward, until the result is called.

        Args:
            watcher: called while a policy is in force, be it observe.
            facts: that its inputs must have, in addition to those that the policy needs.
        """
        entry = (watcher, facts)
        for layer in self.layers:
            layer.watchers.append(entry)

        def undo() -> None:
            for layer in self.layers:
                layer.watchers.remove(entry)

        return undo

    def request_ids(self) -> list[str] | None:
        """Return vLLM's names of the running forward's requests, None if it has none."""
        names = getattr(getattr(self._runner, "input_batch", None), "req_ids", None)
        return None if names is None else list(names)

    def describe(self) -> dict[str, Any]:
        """Return the policy in force and all counts, as `control.WorkerState`."""
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
            "note": self.note,
            "kernels": self.kernels,
            "forwards": max(layer.forwards for layer in stats),
            "capped_forwards": max(layer.capped_forwards for layer in stats),
            "assignments": sum(layer.assignments for layer in stats),
            "dropped": sum(layer.dropped for layer in stats),
            "dropped_computed": sum(layer.dropped_computed for layer in self.layers),
            "enforced": any(p is not None and p.mode == "enforce" for p in policies),
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

    # -- start ------------------------------------------------------------------------------------

    def _capped_layer(self, runner: Any, index: int) -> CappedLayer:
        manager, parallel = runner.expert_map_manager, runner.moe_config.moe_parallel_config
        ranks = Ranks(
            expert_rank=manager.ep_rank,
            expert_ranks=manager.ep_size,
            data_ranks=parallel.dp_size,
            counts=manager.ep_size > 1 or parallel.tp_rank == 0,
        )
        placement = placement_of(runner, index, self._settings)
        computes = self._settings.form == FORMS[1]
        if computes and ranks.expert_ranks > 1:
            raise ValueError(
                f"{FORM}={FORMS[1]} is not allowed under expert parallelism, where the kernel must "
                "leave out experts of other ranks anyway."
            )
        layer = CappedLayer(
            runner, index, placement, ranks, self._prompt_lengths, cost_of(runner), computes
        )
        if not current_platform.is_cpu():
            policies = self._settings.policies
            layer.on_device = DeviceCap(
                policies[index] if len(policies) > 1 else policies[0],
                layer.units,
                layer.k,
                self._config.scheduler_config.max_num_batched_tokens,
                self._runner.device,
                Fraction(1, ranks.data_ranks),
            )
        return layer

    def _try_kernels(self, runners: list[Any]) -> dict[str, str]:
        """Return how each kind of experts leaves dropped slots out, tried on a CPU.

        Raises:
            ValueError: naming a layer whose experts can't.
        """
        found: dict[str, str] = {}
        tried = set()
        for runner, layer in zip(runners, self.layers, strict=True):
            routed = runner.routed_experts
            kernel = routed.quant_method.moe_kernel.fused_experts
            name, form = type(kernel).__name__, "dropped slots are marked -1, which it skips"
            if current_platform.is_cpu():
                patch_experts(kernel, routed, None, runner.layer_name)
                kind = (type(kernel), routed.w13_weight.dtype, routed.w13_weight.shape)
                form = "dropped slots are computed with weight 0"
                if self._settings.form == FORMS[0]:
                    form = "one row per kept slot"
                    if kind not in tried:
                        _try(kernel, routed, runner.layer_name, layer.k)
                tried.add(kind)
            found[name] = form
        return found

    def _say_what_is_capped(self) -> None:
        devices, text = self.layers[0].units.num_devices, self.policy_text()
        logger.info("paceline: %d MoE layers on %d devices: %s", len(self.layers), devices, text)
        kernels = "; ".join(f"{name}: {form}" for name, form in self.kernels.items())
        logger.info("paceline: %s", kernels)
        logger.info("paceline: change it at /paceline/policy (GET, POST, DELETE); see /metrics")

    def _load_stand_ins(self, runners: list[Any]) -> None:
        folder = self._settings.calibration_folder
        if folder is None:
            return
        if not current_platform.is_cpu():
            raise ValueError(f"{CALIBRATION} is not allowed on an accelerator: it is not tested.")
        for layer, found in zip(
            self.layers, load_stand_ins(folder, runners, self._config), strict=True
        ):
            layer.stand_ins = found

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

    def _warn_if_little_is_saved(self) -> None:
        """Warn where a cap saves no time on this CPU but still costs quality."""
        costs = [layer.cost for layer in self.layers if layer.cost is not None]
        small = max(costs, key=lambda cost: cost.share_that_pays, default=None)
        if small is not None and small.share_that_pays > MUCH:
            logger.warning(
                "paceline: experts of %d x %d are so small that to skip dropped rows saves time on "
                "this CPU only if more than %.0f%% are dropped. Below that they are computed with "
                "weight 0: such a cap saves nothing here, and it changes the model's answers; "
                "mode=shadow or observe counts without changing them.",
                small.hidden, small.width, 100 * small.share_that_pays,
            )  # fmt: skip


def _try(kernel: Any, routed: Any, name: str, k: int) -> None:
    try:
        try_experts(kernel, routed, k)
    except TrialFailed as error:
        raise ValueError(
            f"layer {name} is out of the cap's reach: tried with one row per kept slot, "
            f"{type(kernel).__name__} failed ({error}). {FORM}={FORMS[1]} computes dropped slots "
            "with weight 0, which saves nothing."
        ) from error
