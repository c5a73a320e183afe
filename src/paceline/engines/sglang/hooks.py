"""Every hook that the plugin registers with SGLang: its routers, experts and workers."""

from __future__ import annotations

import sys
from multiprocessing import parent_process
from types import SimpleNamespace
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from paceline.engines.serving.environment import read_settings
from paceline.engines.serving.metrics import publisher_for
from paceline.engines.serving.recording import recording_for
from paceline.engines.sglang import control
from paceline.engines.sglang.tokens import running

_MOE = "sglang.srt.layers.moe"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"

HTTP = "sglang.srt.entrypoints.http_server"

_models: list[Any] = []
"""The `SglangModel` of this process, once its weights are loaded."""


def install() -> None:
    """Register all hooks; SGLang applies them after all plugins are loaded."""
    for target, (hook, kind) in HOOKS.items():
        HookRegistry.register(target, hook, kind)
    if parent_process() is None:  # it may serve; workers need none of it
        control.make_folder()
        HookRegistry.register(f"{HTTP}._setup_and_run_http_server", _serve, HookType.BEFORE)


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
        layout = SimpleNamespace(
            tensor_parallel_size=runner.server_args.tp_size,
            pipeline_parallel_size=1,
            data_parallel_size=1,
        )
        path = runner.server_args.model_path
        runner.paceline_recording = recording_for(model, settings, path, layout, model.rank)
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

    capped = _models[0].by_id.get(layer.layer_id) if _models and not layer.is_draft else None
    return run_kept(native, layer, x, topk_output, moe_runner_config, capped)


def _set_internal_state(stock: Any, scheduler: Any, request: Any) -> Any:
    """Answer what the routes ask of this worker; SGLang sends the request to all of them."""
    number = request.server_args.get(control.KEY)
    if number is None:
        return stock(scheduler, request)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    runner = scheduler.tp_worker.model_runner
    return SetInternalStateReqOutput(updated=control.answer(runner, number))


def _serve(*_args: Any, **_kwargs: Any) -> None:
    """Add the routes to SGLang's app before it serves."""
    control.add_routes(sys.modules[HTTP])


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
    "sglang.srt.managers.scheduler.Scheduler.set_internal_state": (
        _set_internal_state,
        HookType.AROUND,
    ),
}
"""Part of SGLang -> hook and its kind."""
