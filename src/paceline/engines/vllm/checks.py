"""What stops the engine: layers that the cap can't reach, and settings that contradict it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from vllm import envs
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform

from paceline.engines.sharing import shares_budget
from paceline.engines.vllm.environment import ACCEPT_SHARED_BUDGET
from paceline.engines.vllm.patches import is_capped
from paceline.policy import CapacityPolicy

SKIPS_NEGATIVE_IDS = ("TritonExperts", "MarlinExperts")
"""Experts off the CPU of which was read that they skip id -1 where they get an expert map."""


def moe_layers(model: nn.Module) -> list[MoERunner]:
    """The MoE layers of a model, in order; those of a draft model belong to another one.

    Raises:
        ValueError: if there is none, or one is out of the cap's reach.
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
    """Why a layer can't be capped; None where it can."""
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
        return "data parallelism without expert parallelism was never run"
    if runner.expert_map_manager.num_fused_shared_experts:
        return "its shared experts are fused with the routed ones"
    experts = runner.routed_experts.quant_method.moe_kernel
    experts = None if experts is None else experts.fused_experts
    if current_platform.is_cpu():
        if not isinstance(experts, CPUUnquantizedExperts) or experts._use_zentorch:
            return f"{type(experts).__name__} knows no dropped slots"
        return None
    return _computes_dropped_slots(experts, runner.moe_config)


def _computes_dropped_slots(experts: Any, config: Any) -> str | None:
    """Why experts of an accelerator would compute, or misread, id -1; None where they skip it."""
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


def check_settings(config: Any, policies: Sequence[CapacityPolicy], accepted: bool) -> None:
    """Refuse settings of vLLM's that contradict a policy.

    Args:
        config: vLLM's.
        policies: of the layers.
        accepted: whether the user accepts that a batch's users affect each other.

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
            "enable_return_routed_experts tells the experts before the cap: allowed is a server "
            "without one of the two."
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
                f"policy {policy} needs to know the requests, which --enable-dbo splits: allowed "
                "is one of the two."
            )
