"""vLLM's MoE layers ("runners"): which can be capped, where experts live, what settings forbid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from vllm import envs
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsModular
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform

from paceline.engines.serving.capped_layer import slots_for
from paceline.engines.serving.environment import ACCEPT_SHARED_BUDGET, DEVICES, Settings
from paceline.engines.sharing import shares_budget
from paceline.engines.vllm.cpu_experts import ExpertCost
from paceline.engines.vllm.routers import is_capped
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.settings import read_placement

SKIPS_NEGATIVE_IDS = ("TritonExperts", "MarlinExperts")
"""Accelerator experts whose code skips id -1 if they have an expert map."""


def moe_runners(model: nn.Module) -> list[MoERunner]:
    """Return the MoE layers of a model, in order, without those of a draft model.

    Raises:
        ValueError: if there is none, or one can't be capped.
    """
    runners = [module for module in model.modules() if isinstance(module, MoERunner)]
    reached = {id(runner.routed_experts) for runner in runners}
    for name, module in model.named_modules():
        if hasattr(module, "w13_weight") and id(module) not in reached:
            raise ValueError(
                f"layer {name} is out of the cap's reach: {type(module).__name__} routes and runs "
                "its experts by itself."
            )
    if not runners:
        raise ValueError(
            f"{type(model).__name__} has no MoE layer that could be capped: serve it without a "
            "policy."
        )
    for runner in runners:
        reason = out_of_reach(runner)
        if reason:
            raise ValueError(f"layer {runner.layer_name} is out of the cap's reach: {reason}.")
    return runners


def out_of_reach(runner: Any) -> str | None:
    """Return the reason why a layer can't be capped; None if it can."""
    if runner.is_monolithic:
        return "its kernel routes by itself (a monolithic one)"
    if not is_capped(runner.router):
        return f"its router, {type(runner.router).__name__}, is none of vLLM's"
    if runner.do_naive_dispatch_combine:
        return "it gathers all ranks' tokens before it routes (naive dispatch)"
    if runner.moe_config.is_sequence_parallel:
        return "its rows are shards of sequences (sequence-parallel MoE)"
    if runner.moe_config.pcp_size > 1:
        return "prompts are split over ranks (prefill context parallelism)"
    if runner.moe_config.dp_size > 1 and runner.moe_config.ep_size == 1:
        return "data parallelism without expert parallelism is not tested"
    if runner.expert_map_manager.num_fused_shared_experts:
        return "its shared experts are fused with the routed ones"
    kernel = runner.routed_experts.quant_method.moe_kernel
    experts = None if kernel is None else kernel.fused_experts
    if not current_platform.is_cpu():
        return _dropped_slots_cost(experts, runner.moe_config)
    if not isinstance(experts, FusedMoEExpertsModular):
        return f"its experts, {type(experts).__name__}, are no modular kernel of vLLM's"
    return None  # `try_experts` decides


def _dropped_slots_cost(experts: Any, config: Any) -> str | None:
    """Return why experts of an accelerator would compute or misread id -1; None if they skip it."""
    name = type(experts).__name__
    if name not in SKIPS_NEGATIVE_IDS:
        return f"{name} isn't known to skip a dropped slot"
    if config.ep_size == 1:
        return f"{name} skips dropped slots under expert parallelism only"
    if config.is_lora_enabled:
        return f"{name} skips no dropped slots with LoRA"
    one_scale = experts.quant_dtype is not None and not experts.per_act_token_quant
    if name == "TritonExperts" and one_scale and experts.block_shape is None:
        return f"{name} skips no dropped slots where one scale serves all activations"
    return None


def cost_of(runner: Any) -> ExpertCost | None:
    """Return the cost of experts that may compute dropped rows; None if they never may.

    They must not if the kernel would look up another rank's expert, if weights are applied to
    inputs (a bias would remain), or off the CPU, where kernels skip dropped rows.
    """
    config, routed = runner.moe_config, runner.routed_experts
    if not current_platform.is_cpu() or config.ep_size > 1 or routed.apply_router_weight_on_input:
        return None
    kernel = routed.quant_method.moe_kernel.fused_experts
    isa = getattr(kernel, "isa", "vec")
    return ExpertCost(config.hidden_dim, config.intermediate_size_per_partition, isa)


def placement_of(runner: Any, index: int, settings: Settings) -> ExpertPlacement | None:
    """Return where the experts of a layer live: on their ranks, else as the settings place them.

    Raises:
        ValueError: if the settings contradict the ranks.
    """
    experts, manager = runner.router.global_num_experts, runner.expert_map_manager
    named: ExpertPlacement | int | None = settings.devices
    if named is None and settings.plan is not None:
        named = settings.plan.placement_of(index)
    given = read_placement(named, experts, runner.layer_name)
    if manager.ep_size == 1:
        return given
    if manager.placement_strategy == "round_robin":
        real = ExpertPlacement.explicit([e % manager.ep_size for e in range(experts)])
    else:
        real = ExpertPlacement.contiguous(experts, manager.ep_size)
    if given is not None and given != real:
        raise ValueError(
            f"{DEVICES} or the plan places {experts} experts on {given.num_devices} devices, "
            f"expert parallelism on {manager.ep_size} ranks: remove that setting."
        )
    return real


def slots_of(runner: Any, settings: Settings) -> int:
    """Return the ids per token that a layer needs under any policy of the settings, 0 for none."""
    slots = 0
    for index, policy in enumerate(settings.policies):
        placement = placement_of(runner, 0 if settings.plan is None else index, settings)
        units = placement or ExpertPlacement.per_expert(runner.router.global_num_experts)
        slots = max(slots, slots_for(policy, units, runner.router.top_k))
    return slots


def check_settings(config: Any, policies: Sequence[CapacityPolicy], accepted: bool) -> None:
    """Refuse settings of vLLM that contradict a policy of a layer.

    Args:
        accepted: True if users of a batch may affect each other.

    Raises:
        ValueError: naming the setting and what is allowed.
    """
    if not any(policy.caps for policy in policies):
        return
    if envs.VLLM_BATCH_INVARIANT:
        raise ValueError(
            "VLLM_BATCH_INVARIANT=1 contradicts a cap, which depends on the batch: unset one."
        )
    if config.aux_output_config.enable_return_routed_experts:
        raise ValueError(
            "enable_return_routed_experts returns the experts before the cap: use one of the two."
        )
    shared = next((policy for policy in policies if shares_budget(policy)), None)
    if shared is not None and config.cache_config.enable_prefix_caching and not accepted:
        raise ValueError(
            f"pool={shared.pool} with prefix caching lets one user's batch change what another "
            "reads from the cache: say pool=request, --no-enable-prefix-caching, or accept it "
            f"with --accept-shared-budget ({ACCEPT_SHARED_BUDGET}=1)."
        )
    for policy in policies:
        if config.parallel_config.enable_dbo and (
            policy.pool == "request" or policy.phase == "prefill" or policy.protect_first
        ):
            raise ValueError(
                f"policy {policy} needs to know the requests, which --enable-dbo splits: use one "
                "of the two."
            )
