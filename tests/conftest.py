"""Settings every test shares: hypothesis profiles, and Triton without a GPU."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

# Without a GPU the CUDA kernels run in Triton's interpreter, which has to be chosen before anything
# (torch.compile, for one) imports triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=60, suppress_health_check=_SLOW_IS_FINE
)
settings.register_profile(
    "deep", deadline=None, max_examples=2000, suppress_health_check=_SLOW_IS_FINE
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
