"""What a capped layer needs to know of one of vLLM's MoE runners: placement, places, experts."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform

from paceline.engines.vllm.environment import DEVICES, Wanted
from paceline.engines.vllm.savings import Experts
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing import RoutingInputs
from paceline.routing.budget import Budget
from paceline.settings import read_placement


def experts_of(runner: Any) -> Experts | None:
    """The experts of a layer whose dropped rows may be computed; None: they never are.

    They must not be where the kernel would look up another rank's expert, where weights are applied
    to inputs (a bias would remain), or off the CPU, where kernels skip them.
    """
    config, routed = runner.moe_config, runner.routed_experts
    if not current_platform.is_cpu() or config.ep_size > 1 or routed.apply_router_weight_on_input:
        return None
    kernel = routed.quant_method.moe_kernel.fused_experts
    return Experts(config.hidden_dim, config.intermediate_size_per_partition, kernel.isa)


def placement_for(runner: Any, index: int, wanted: Wanted) -> ExpertPlacement | None:
    """Where the experts of a layer live: on their ranks, else as the user says.

    Raises:
        ValueError: if the user names another number of devices than there are ranks.
    """
    experts, manager = runner.router.global_num_experts, runner.expert_map_manager
    named: ExpertPlacement | int | None = wanted.devices
    if named is None and wanted.plan is not None:
        named = wanted.plan.placement_of(index)
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
            f"expert parallelism on {manager.ep_size} ranks: leave it out."
        )
    return real


def slots_for(policy: CapacityPolicy, units: ExpertPlacement, k: int) -> int:
    """Ids a token that a policy may need, 0 where it doesn't expand."""
    if policy.expand is None or not policy.caps:
        return 0
    ids = torch.zeros((1, k), dtype=torch.int64)
    inputs = RoutingInputs(topk_ids=ids, topk_weights=ids.float(), num_experts=units.num_experts)
    return Budget(inputs, policy, units).slots


def slots_of(runner: Any, wanted: Wanted) -> int:
    """Ids a token that a layer needs room for, over all policies; 0 where none expands."""
    slots = 0
    for index in range(max(1, len(wanted.policies))):
        placement = placement_for(runner, 0 if wanted.plan is None else index, wanted)
        units = placement or ExpertPlacement.per_expert(runner.router.global_num_experts)
        slots = max(slots, slots_for(wanted.policies[index], units, runner.router.top_k))
    return slots
