"""Settings every test shares: hypothesis profiles, Triton without a GPU, and all cores."""

from __future__ import annotations

import os
from collections.abc import Iterator

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


@pytest.fixture(autouse=True)
def unpinned() -> Iterator[None]:
    """Undo what a benchmark does to the process: other tests would share its one core."""
    threads = torch.get_num_threads()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if cores is not None and os.sched_getaffinity(0) != cores:
        os.sched_setaffinity(0, cores)
