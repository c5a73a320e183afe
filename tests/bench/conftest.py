"""Fixtures of the tests of benchmarks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def unpinned() -> Iterator[None]:
    """Undo the pinning of the process to a core before other tests run."""
    threads = torch.get_num_threads()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    yield
    torch.set_num_threads(threads)
    if cores is not None:
        os.sched_setaffinity(0, cores)
