"""Calibrated stand-ins in vLLM: checked against the weights that were loaded."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

from torch import nn
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.model_loader import base_loader

from paceline.engines.serving.environment import CALIBRATION, read_settings
from paceline.engines.serving.stand_ins import StandIns, fingerprints
from paceline.stand_ins.calibration_file import Calibration
from paceline.stand_ins.identity import LayerIdentity


def keep_fingerprints() -> None:
    """Patch vLLM to fingerprint MoE layers while it loads them, before it packs their weights."""
    process = base_loader.process_weights_after_loading

    @wraps(process)
    def fingerprint_and_process(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        settings = read_settings()
        if settings is not None and settings.calibration_folder is not None:
            for runner in model.modules():
                if isinstance(runner, MoERunner):
                    runner.paceline_fingerprints = _fingerprints(model, runner)
        process(model, *args, **kwargs)

    base_loader.process_weights_after_loading = fingerprint_and_process


def _fingerprints(model: nn.Module, runner: Any) -> tuple[str | None, list[str]]:
    """Return those of the router, None if it isn't found, and of each expert of this worker."""
    block = dict(model.named_modules()).get(runner.layer_name.rpartition(".")[0])
    experts = runner.routed_experts
    return fingerprints(block, experts.w13_weight, experts.w2_weight)


def load_stand_ins(folder: Path, runners: list[Any], config: Any) -> list[StandIns]:
    """Load the stand-ins of all layers.

    Args:
        runners: vLLM's MoE runners, in order.

    Raises:
        ValueError: if the calibration is of another model, or the parallel layout excludes
            stand-ins.
    """
    calibration = Calibration.load(folder)
    if config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError(
            f"{CALIBRATION} is not allowed under pipeline parallelism, where a worker has only "
            "some layers."
        )
    if config.parallel_config.data_parallel_size > 1:
        raise ValueError(
            f"{CALIBRATION} is not allowed under data parallelism: experts run on tokens of other "
            "ranks, but a stand-in must be added by the rank of the token."
        )
    if any(r.routed_experts.apply_router_weight_on_input for r in runners):
        raise ValueError(f"{CALIBRATION} is not allowed if weights are applied to inputs.")
    names = [layer.name for layer in calibration.layers] + [r.layer_name for r in runners]
    local = [_local_experts(runner) for runner in runners]
    identities = [
        _identity(name, runner, experts)
        for name, runner, experts in zip(names, runners, local, strict=False)
    ]
    calibration.check_model(config.model_config.architectures[0], identities)
    return [
        StandIns(layer, experts if _tp_rank(runner) == 0 else [], config.model_config.dtype)
        for layer, runner, experts in zip(calibration.layers, runners, local, strict=True)
    ]


def _tp_rank(runner: Any) -> int:
    """Return which part of every expert this rank has, 0 if experts are whole."""
    parallel = runner.moe_config.moe_parallel_config
    return int(parallel.tp_rank) if parallel.tp_size > 1 else 0


def _local_experts(runner: Any) -> list[int]:
    """Return global ids of the experts of this worker, in the order of their weights."""
    expert_map = runner.expert_map
    if expert_map is None:
        return list(range(runner.router.global_num_experts))
    there = (expert_map >= 0).nonzero().flatten()
    order: list[int] = there[expert_map[there].argsort()].tolist()
    return order


def _identity(name: str, runner: Any, experts: list[int]) -> LayerIdentity:
    router, fingerprints = runner.paceline_fingerprints
    if router is None:
        raise ValueError(
            f"{CALIBRATION} is not allowed with this model: the router of {runner.layer_name} was "
            "not found."
        )
    split = (
        runner.moe_config.moe_parallel_config.tp_size > 1
    )  # parts have no fingerprint to compare
    return LayerIdentity(
        name=name,
        k=runner.router.top_k,
        num_experts=runner.router.global_num_experts,
        router=router,
        experts={} if split else dict(zip(experts, fingerprints, strict=True)),
    )
