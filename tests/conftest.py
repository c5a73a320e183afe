"""Settings every test shares: hypothesis profiles, and Triton without a GPU."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# Without a GPU the CUDA kernels run in Triton's interpreter, which has to be chosen before anything
# (torch.compile, for one) imports triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
# Examples per property: in `make test`, in `make test-all`, and for a night.
for name, examples in (("quick", 20), ("ci", 60), ("deep", 2000)):
    settings.register_profile(
        name,
        derandomize=name != "deep",
        deadline=None,
        max_examples=examples,
        suppress_health_check=_SLOW_IS_FINE,
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark property tests, which `make test-all` runs again with more examples."""
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("property")
