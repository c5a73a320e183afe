"""Settings of the tests inside the real SGLang, which are ignored where it is missing."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

# tests/engines may be on the path, so that this folder looks like a package without a file
if getattr(find_spec("sglang"), "origin", None) is None:
    collect_ignore_glob = ["test_sglang_*.py"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
for name in [name for name in os.environ if name.startswith("PACELINE_")]:
    os.environ.pop(name)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker: `-m "not long"` is the short set."""
    config.addinivalue_line("markers", "long: starts several engines")


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE: 2 layers of 8 experts, 2 per token."""
    from served_models import make

    # as wide as SGLang needs it for two ranks: it pads the experts of others
    return Path(make("qwen3_moe", tmp_path_factory.mktemp("qwen"), moe_intermediate_size=64))
