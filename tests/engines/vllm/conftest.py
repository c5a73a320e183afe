"""Settings of the tests inside the real vLLM, which are ignored where it is missing."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest

# tests/engines may be on the path, so that this folder looks like a package without a file
if getattr(find_spec("vllm"), "origin", None) is None:
    collect_ignore_glob = ["test_vllm_*.py"]

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
    """Register the marker: `-m "not long"` is the short set."""
    config.addinivalue_line("markers", "long: starts several engines")


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny OLMoE with the cap in it; an engine that is started after it may end it."""
    from served_models import make
    from vllm_engines import capped_engine

    return capped_engine(make("olmoe", tmp_path_factory.mktemp("olmoe")))
