"""SGLang's server as `paceline serve --engine sglang` starts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from paceline.engines.serving.demo_model import is_demo, own_folder, untied_demo
from paceline.engines.serving.environment import read_settings
from paceline.engines.sharing import shares_budget
from paceline.shipped import DEMO

NO_CACHE = "--disable-radix-cache"
DEMO_FLAGS = {
    "--device": "cpu", "--attention-backend": "torch_native", "--sampling-backend": "pytorch",
    "--disable-cuda-graph": None, "--dtype": "float32", "--context-length": "512",
    "--max-total-tokens": "8192", "--mem-fraction-static": "0.2", "--served-model-name": DEMO,
}  # fmt: skip
"""Flags with which SGLang serves the embedded model on a CPU without kernels of its own."""


def serve(model: str, extra: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run SGLang's server in this process, with Paceline's plugin.

    Args:
        model: folder, hub name or demo.
        environ: from `plugin_environment`.

    Raises:
        ValueError: if SGLang is not installed.
    """
    if find_spec("sglang") is None:
        raise ValueError("--engine sglang needs SGLang: pip install sglang.")
    flags = sglang_flags(model, extra, environ)
    if is_demo(model):
        flags[1] = untied_demo(own_folder("paceline-demo-"))
    if NO_CACHE in flags and NO_CACHE not in extra:
        print(
            "paceline: the radix cache is off, since under this policy users who share a batch "
            "affect each other: use pool=request, or accept it with --accept-shared-budget",
            file=sys.stderr,
        )
    os.environ.update(environ)
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(flags))


def sglang_flags(model: str, extra: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return SGLang's command line: the user's flags, and those that the cap needs.

    >>> sglang_flags("m", ["--port", "1"], {"PACELINE_POLICY": "capacity_factor=1,pool=batch"})
    ['--model-path', 'm', '--port', '1', '--enable-metrics', '--disable-radix-cache']
    """
    settings = read_settings({**os.environ, **environ})
    flags = ["--model-path", model, *extra]
    for name, value in DEMO_FLAGS.items() if is_demo(model) else ():
        if not any(flag.partition("=")[0] == name for flag in extra):
            flags += [name] if value is None else [name, value]
    if "--enable-metrics" not in extra:
        flags.append("--enable-metrics")
    if settings is None or settings.accept_shared_budget or NO_CACHE in extra:
        return flags
    # a policy that names no pool gets one per request where the cache is shared
    named = [p for p in settings.policies if "pool" in p.model_fields_set or p.max_active]
    return [*flags, NO_CACHE] if any(map(shares_budget, named)) else flags
