"""The demo model, loaded once for a file of tests."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.demo.assets import load_model


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    """The embedded model and its tokenizer."""
    return load_model()
