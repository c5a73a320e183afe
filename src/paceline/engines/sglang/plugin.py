"""Entry point of the group `sglang.srt.plugins`; idle without a policy in the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version

RUN_WITH = ("0.5.23",)
"""Versions that the plugin's tests have run with."""

UNTESTED = "PACELINE_UNTESTED_SGLANG"
"""Environment variable that allows a version that the tests have never run with."""

_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"

NEEDED: dict[str, Sequence[str]] = {
    "sglang.srt.plugins.hook_registry:HookRegistry.register": ("target", "hook", "hook_type"),
    "sglang.srt.layers.moe.topk:select_experts": (
        "hidden_states",
        "router_logits",
        "topk_config",
        "layer_id",
        "num_token_non_padded",
    ),
    "sglang.srt.layers.moe.fused_moe_native:moe_forward_native": (
        "layer",
        "x",
        "topk_output",
        "moe_runner_config",
    ),
    "sglang.srt.layers.moe.token_dispatcher.standard:get_device": (),
    f"{_RUNNER}.load_model": ("self",),
    f"{_RUNNER}.forward": ("self", "forward_batch"),
    "sglang.srt.managers.scheduler:Scheduler.set_internal_state": ("self", "recv_req"),
    "sglang.srt.managers.io_struct:SetInternalStateReq": (),
}
"""Part of SGLang, as `module:attribute` -> parameters that it must have."""


class UnsupportedSglang(RuntimeError):
    """An SGLang version in which a part that the plugin depends on is missing or untested."""


def register() -> None:
    """Install the plugin in this process of SGLang. Idempotent.

    Raises:
        SystemExit: if a setting or the version is not supported. SGLang logs any other exception of
            a plugin, and serves without it.
    """
    if not any(name.startswith("PACELINE_") for name in os.environ):
        return
    try:
        from paceline.engines.serving.environment import read_settings

        if read_settings() is None:
            return
        check_version()
        from paceline.engines.sglang import hooks

        hooks.install()
    except Exception as error:
        raise SystemExit(f"paceline: {error}") from error


def check_version(needed: dict[str, Sequence[str]] = NEEDED) -> str:
    """Return the version of SGLang if the plugin supports it.

    Raises:
        UnsupportedSglang: naming the version and what is missing.
    """
    from paceline.engines.serving.versions import missing_part

    found = version("sglang")
    missing = missing_part(needed)
    if missing:
        raise UnsupportedSglang(
            f"sglang {found} is not supported because it has no {missing}: paceline supports "
            f"{', '.join(RUN_WITH)}."
        )
    if found not in RUN_WITH and os.environ.get(UNTESTED, "") != "1":
        raise UnsupportedSglang(
            f"sglang {found} is not supported, although it has all that paceline needs: the tests "
            f"have run with {', '.join(RUN_WITH)}; set {UNTESTED}=1 to use it."
        )
    return found
