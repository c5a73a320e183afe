"""Calibrated stand-ins in vLLM: checked against the loaded weights, added where experts are run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.model_loader import base_loader

from paceline.engines.vllm.environment import CALIBRATION, Wanted, wanted
from paceline.stand_ins.calibration_file import Calibration, LayerCalibration
from paceline.stand_ins.compensation import Compensation
from paceline.stand_ins.identity import LayerIdentity, of_experts, of_router


class StandIns:
    """What a layer's dropped assignments leave, from the cap to where the experts have run.

    Args:
        layer: what a calibration found of it.
        experts: global ids of those whose stand-ins are added by this worker.
        dtype: that the layer computes in.
    """

    def __init__(self, layer: LayerCalibration, experts: list[int], dtype: torch.dtype) -> None:
        self._stand_ins = Compensation(layer, experts, torch.empty(0, dtype=dtype))
        self._lost: tuple[Tensor, Tensor, Tensor] | None = None

    def expect(self, ids: Tensor, weights: Tensor, dropped: Tensor) -> None:
        """Say what the experts of this forward won't compute.

        Args:
            ids: [tokens, k] the model's own choice.
            weights: [tokens, k] its combine weights.
            dropped: [tokens, k] bool.
        """
        self._lost = ids.clone(), weights.clone(), dropped

    def add(self, output: Tensor, hidden: Tensor) -> None:
        """Add what the stand-ins give to [tokens, hidden] `output`, in place, once a forward."""
        lost, self._lost = self._lost, None
        if lost is None:
            return
        output.copy_(self._stand_ins(output, hidden, *lost))

    def norms(self, hidden: Tensor, compensate: bool) -> Tensor:
        """How much dropping leaves out, as `Compensation.norms` says it."""
        return self._stand_ins.norms(hidden, compensate)


def keep_fingerprints() -> None:
    """Have MoE layers fingerprinted while they are loaded: their weights are packed afterwards."""
    process = base_loader.process_weights_after_loading

    @wraps(process)
    def fingerprinted(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        asked = wanted()
        if asked is not None and calibration_folder(asked) is not None:
            for runner in model.modules():
                if isinstance(runner, MoERunner):
                    runner.paceline_fingerprints = _fingerprints(model, runner)
        process(model, *args, **kwargs)

    base_loader.process_weights_after_loading = fingerprinted


def _fingerprints(model: nn.Module, runner: Any) -> tuple[str | None, list[str]]:
    """Of the router, None where it wasn't found, and of each expert that this worker has."""
    weights = nn.Module()  # named as in Transformers
    for name, own in (("gate_up_proj", "w13_weight"), ("down_proj", "w2_weight")):
        weight = getattr(runner.routed_experts, own).data
        setattr(weights, name, nn.Parameter(weight, requires_grad=False))
    router = _router_of(model, runner.layer_name)
    experts = of_experts(weights, len(runner.routed_experts.w13_weight))
    return None if router is None else of_router(router), experts


def calibration_folder(asked: Wanted) -> Path | None:
    """The folder that the environment or the plan names, None where there is none."""
    if asked.calibration is not None:
        return asked.calibration
    return None if asked.plan is None else asked.plan.calibration_folder()


def stand_ins_of(folder: Path, runners: list[Any], config: Any) -> list[StandIns]:
    """One a layer.

    Args:
        folder: of the calibration.
        runners: vLLM's MoE runners, in order.
        config: vLLM's.

    Raises:
        ValueError: if the calibration is of another model, or the layout can't have stand-ins.
    """
    found = Calibration.load(folder)
    if config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError(
            f"{CALIBRATION} is not allowed under pipeline parallelism, where a worker sees some "
            "layers only."
        )
    if config.parallel_config.data_parallel_size > 1:
        raise ValueError(
            f"{CALIBRATION} is not allowed under data parallelism: experts run on other ranks' "
            "tokens there, and stand-ins belong to the rank that a token lives on."
        )
    if any(r.routed_experts.apply_router_weight_on_input for r in runners):
        raise ValueError(f"{CALIBRATION} is not allowed where weights are applied to inputs.")
    names = [layer.name for layer in found.layers] + [r.layer_name for r in runners]
    own = [_own_experts(runner) for runner in runners]
    identity = [
        LayerIdentity(
            name=name,
            k=runner.router.top_k,
            num_experts=runner.router.global_num_experts,
            router=_known_router(runner),
            experts=_known(runner, experts),
        )
        for name, runner, experts in zip(names, runners, own, strict=False)
    ]
    found.check_model(config.model_config.architectures[0], identity)
    return [
        StandIns(layer, experts if _adds(runner) else [], config.model_config.dtype)
        for layer, runner, experts in zip(found.layers, runners, own, strict=True)
    ]


def _own_experts(runner: Any) -> list[int]:
    """Global ids of the experts that this worker has, in the order of their weights."""
    expert_map = runner.expert_map
    if expert_map is None:
        return list(range(runner.router.global_num_experts))
    there = (expert_map >= 0).nonzero().flatten()
    order: list[int] = there[expert_map[there].argsort()].tolist()
    return order


def _known(runner: Any, experts: list[int]) -> Mapping[int, str]:
    """Expert -> fingerprint; none where ranks split every expert."""
    if runner.moe_config.moe_parallel_config.tp_size > 1:
        return {}
    return dict(zip(experts, runner.paceline_fingerprints[1], strict=True))


def _adds(runner: Any) -> bool:
    """Whether this worker adds stand-ins: where ranks split every expert, the first one alone."""
    parallel = runner.moe_config.moe_parallel_config
    return bool(parallel.tp_size == 1 or parallel.tp_rank == 0)


def _router_of(model: nn.Module, layer: str) -> nn.Module | None:
    """The module with the weights of a layer's router, None where it isn't where models have it."""
    block = dict(model.named_modules()).get(layer.rpartition(".")[0])
    found = (getattr(block, name, None) for name in ("gate", "router"))
    return next((router for router in found if isinstance(router, nn.Module)), None)


def _known_router(runner: Any) -> str:
    router: str | None = runner.paceline_fingerprints[0]
    if router is None:
        raise ValueError(
            f"{CALIBRATION} is not allowed with this model: the router of {runner.layer_name} was "
            "not found."
        )
    return router
