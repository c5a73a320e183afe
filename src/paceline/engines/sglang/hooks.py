"""Every hook that the plugin registers with SGLang: its routers, experts and workers."""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from paceline.engines.serving.environment import read_settings
from paceline.engines.serving.metrics import publisher_for
from paceline.engines.sglang.tokens import running

_MOE = "sglang.srt.layers.moe"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"

_models: list[Any] = []
"""The `SglangModel` of this process, once its weights are loaded."""


def install() -> None:
    """Register all hooks; SGLang applies them after all plugins are loaded."""
    for target, (hook, kind) in HOOKS.items():
        HookRegistry.register(target, hook, kind)


def _loaded(_result: Any, runner: Any, *_args: Any, **_kwargs: Any) -> None:
    """Cap a model after its weights were loaded, once every hook is seen to be in place."""
    settings = read_settings()
    if runner.is_draft_worker or settings is None:
        return
    for target in HOOKS:
        if target not in HookRegistry._patched:
            raise RuntimeError(f"paceline: SGLang did not apply the hook on {target}.")
    from paceline.engines.sglang.sglang_model import SglangModel

    try:
        model = SglangModel(runner, settings, get_parallel().tp_rank)
        runner.paceline = model
        runner.paceline_publisher = publisher_for(model)
    except ValueError as error:  # SGLang's log doesn't say who raised it
        raise ValueError(f"paceline: {error}") from error
    _models[:] = [model]


def _forward(forward: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    if runner.is_draft_worker:
        return forward(runner, forward_batch, *args, **kwargs)
    with running(forward_batch):
        return forward(runner, forward_batch, *args, **kwargs)


def _select_experts(
    result: Any, hidden_states: Tensor, router_logits: Tensor, topk_config: Any, **kwargs: Any
) -> Any:
    """Mark the slots that the cap drops."""
    if not _models or not topk_config.allow_routed_experts_capture:  # a draft model's
        return None
    number = kwargs.get("layer_id")
    layer = _models[0].by_id.get(topk_config.layer_id if number is None else number)
    return None if layer is None else layer.choose(result, hidden_states, router_logits)


def _native_experts(
    native: Any, layer: Any, x: Tensor, topk_output: Any, moe_runner_config: Any
) -> Tensor:
    from paceline.engines.sglang.sglang_model import run_kept

    return run_kept(native, layer, x, topk_output, moe_runner_config)


def _device_of_dispatch(get_device: Any, *args: Any) -> str:
    """Return the CPU where SGLang finds no accelerator: it fails to spread experts without."""
    try:
        return get_device(*args)  # type: ignore[no-any-return]
    except RuntimeError:
        return "cpu"


HOOKS = {
    f"{_MOE}.topk.select_experts": (_select_experts, HookType.AFTER),
    f"{_MOE}.fused_moe_native.moe_forward_native": (_native_experts, HookType.AROUND),
    f"{_MOE}.token_dispatcher.standard.get_device": (_device_of_dispatch, HookType.AROUND),
    f"{_RUNNER}.load_model": (_loaded, HookType.AFTER),
    f"{_RUNNER}.forward": (_forward, HookType.AROUND),
}
"""Part of SGLang -> hook and its kind."""
