"""The capped layers of a vLLM worker: found, tried, and checked against vLLM's settings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from paceline.engines.serving.capped_layer import Ranks, slots_for
from paceline.engines.serving.capped_model import CappedModel
from paceline.engines.serving.environment import CALIBRATION, FORM, FORMS, Settings
from paceline.engines.sharing import warn_of_shared_cache
from paceline.engines.vllm.accelerator import DeviceCap
from paceline.engines.vllm.cpu_experts import TrialFailed, patch_experts, try_experts
from paceline.engines.vllm.runners import (
    check_settings,
    cost_of,
    moe_runners,
    placement_of,
)
from paceline.engines.vllm.stand_ins import load_stand_ins
from paceline.engines.vllm.vllm_layer import VllmLayer
from paceline.policy import CapacityPolicy

MUCH = 0.15
"""If more than this share must be dropped to save time, a warning says so."""


class VllmModel(CappedModel):
    """The capped layers of the model that one vLLM worker runs.

    Args:
        rank: of the worker among all of them.

    Raises:
        ValueError: if a layer, a setting or the plan excludes a cap.
    """

    engine = "paceline in vLLM"
    log = logging.getLogger("vllm.paceline")

    def __init__(self, model_runner: Any, config: Any, settings: Settings, rank: int) -> None:
        self._runner, self._config, self.settings = model_runner, config, settings
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
        layers = [self._capped_layer(runner, index) for index, runner in enumerate(runners)]
        super().__init__(layers, settings, rank)
        self.layers: Sequence[VllmLayer] = layers
        self.kernels = self._try_kernels(runners)
        self._load_stand_ins(runners)
        self.layers[0].warns = not self.accepted and rank == 0
        self.set_policies(self.start_policies())
        for runner, layer in zip(runners, self.layers, strict=True):
            runner.router.paceline_layer = layer
            if current_platform.is_cpu():
                kernel = runner.routed_experts.quant_method.moe_kernel.fused_experts
                kernel.paceline_layer = layer
        self.warm_up()
        if rank == 0:
            self.say_what_is_capped()
        if rank == 0 and any(policy.caps for policy in settings.policies):
            self._warn_if_little_is_saved()
            if config.cache_config.enable_prefix_caching and not self.accepted:
                remedy = "give each user a cache_salt, or say --no-enable-prefix-caching"
                warn_of_shared_cache(remedy)

    # -- policies ---------------------------------------------------------------------------------

    def shares_cache(self) -> bool:
        """Return True if vLLM's prefix cache is on."""
        return bool(self._config.cache_config.enable_prefix_caching)

    def check_settings(self, policies: Sequence[CapacityPolicy]) -> None:
        """Refuse settings of vLLM that contradict a policy of a layer."""
        check_settings(self._config, policies, self.accepted)

    def check_policies(
        self, policies: Sequence[CapacityPolicy | None]
    ) -> list[CapacityPolicy | None]:
        """Return the policies as they apply here, as `CappedModel.check_policies` does."""
        checked = super().check_policies(policies)
        for layer, policy in zip(self.layers, checked, strict=True):
            if policy is not None:
                self._check_slots(layer, policy)
        return checked

    def _check_slots(self, layer: VllmLayer, policy: CapacityPolicy) -> None:
        """Check that the compiled model has room for a policy's extras."""
        slots = slots_for(policy, layer.units, layer.k)
        room = layer.slots or layer.k
        if max(slots, layer.k) > room:
            raise ValueError(
                f"expand={policy.expand} needs {slots} slots per token, the running model has "
                f"{room}: start the server with it."
            )

    def request_ids(self) -> list[str] | None:
        """Return vLLM's names of the running forward's requests, None if it has none."""
        names = getattr(getattr(self._runner, "input_batch", None), "req_ids", None)
        return None if names is None else list(names)

    # -- start ------------------------------------------------------------------------------------

    def _capped_layer(self, runner: Any, index: int) -> VllmLayer:
        manager, parallel = runner.expert_map_manager, runner.moe_config.moe_parallel_config
        ranks = Ranks(
            expert_rank=manager.ep_rank,
            expert_ranks=manager.ep_size,
            data_ranks=parallel.dp_size,
            counts=manager.ep_size > 1 or parallel.tp_rank == 0,
        )
        placement = placement_of(runner, index, self.settings)
        computes = self.settings.form == FORMS[1]
        if computes and ranks.expert_ranks > 1:
            raise ValueError(
                f"{FORM}={FORMS[1]} is not allowed under expert parallelism, where the kernel must "
                "leave out experts of other ranks anyway."
            )
        layer = VllmLayer(
            runner, index, placement, ranks, self._prompt_lengths, cost_of(runner), computes
        )
        if not current_platform.is_cpu():
            policies = self.settings.policies
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
                if self.settings.form == FORMS[0]:
                    form = "one row per kept slot"
                    if kind not in tried:
                        _try(kernel, routed, runner.layer_name, layer.k)
                tried.add(kind)
            found[name] = form
        return found

    def _load_stand_ins(self, runners: list[Any]) -> None:
        folder = self.settings.calibration_folder
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

    def _warn_if_little_is_saved(self) -> None:
        """Warn where a cap saves no time on this CPU but still costs quality."""
        costs = [layer.cost for layer in self.layers if layer.cost is not None]
        small = max(costs, key=lambda cost: cost.share_that_pays, default=None)
        if small is not None and small.share_that_pays > MUCH:
            self.log.warning(
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
