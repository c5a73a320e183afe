"""Backends: which assignments each unit keeps, computed in several ways with one answer.

The order within a unit is total, so that all ranks and backends decide alike: genuine before
extra (where extras only fill), priority class, ranking key, token, slot. Every backend gives the
same answer to the bit; `plain` is the reference.

| backend | for | how |
|---|---|---|
| plain | any device | one sort of packed integers, in torch |
| native | CPU tensors, with numba installed | counts, then a bisection per overfull unit |
| cuda | CUDA tensors, with Triton installed | the same in three launches, nothing read back |
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

from paceline.routing.assignment import Candidates, Survivors
from paceline.routing.inputs import RoutingInputs
from paceline.routing.limits import Budget

BACKENDS = {"plain": None, "native": "numba", "cuda": "triton"}
"""Name -> the library that it needs beyond torch."""

BACKEND_VARIABLE = "PACELINE_BACKEND"
"""Environment variable that forces a backend: for tests, measurements and bug reports."""


class Backend(Protocol):
    """A module of `paceline.routing.backends`."""

    on_host: bool
    """True if it reads the number of tokens, and so knows which of the two caps applies."""

    def expanded(self, budget: Budget) -> Candidates:
        """Return the model's own choice and the extras that the policy allows."""

    def limit_active(self, budget: Budget, candidates: Candidates) -> Survivors | None:
        """Keep the candidates whose experts max_active lets their devices read, in each pool.

        All of them if it does not apply; None if the host knows that it doesn't.
        """

    def keep_best(self, budget: Budget, candidates: Candidates, fill: bool = False) -> Survivors:
        """Keep the first of each unit, as many as its capacity allows.

        With `fill`, extras rank after all genuine ones of the unit, and the unit takes them only up
        to the policy's `fill_factor`.
        """


def backend_for(inputs: RoutingInputs) -> Backend:
    """Return the fastest backend for these tensors, or the forced one."""
    if _forced is not None:
        return _module(_forced)
    ids, weights = inputs.topk_ids, inputs.topk_weights
    # a subclass (fake, traced, distributed) has no memory to work on; nor do kernels have gradients
    real = type(ids) is Tensor and type(weights) is Tensor
    if real and not (weights.requires_grad and torch.is_grad_enabled()):
        return _fastest(ids.device.type)
    return _module("plain")


@lru_cache
def _fastest(device_type: str) -> Backend:
    name = {"cpu": "native", "cuda": "cuda"}.get(device_type, "plain")
    return _module(name if _installed(name) else "plain")


@contextmanager
def using_backend(name: str | None) -> Iterator[None]:
    """Force a backend while the context lasts; None: the usual choice. Not thread-safe.

    Raises:
        ValueError: if there is no such backend or the library it needs is not installed.
    """
    global _forced
    before, _forced = _forced, _checked(name)
    try:
        yield
    finally:
        _forced = before


def _checked(name: str | None) -> str | None:
    if name is None or name == "":
        return None
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    if not _installed(name):
        raise ValueError(f"backend={name!r} needs {BACKENDS[name]}, which is not installed.")
    return name


@lru_cache
def _installed(name: str) -> bool:
    library = BACKENDS[name]
    return library is None or find_spec(library) is not None


@lru_cache
def _module(name: str) -> Backend:
    return cast(Backend, importlib.import_module(f"paceline.routing.backends.{name}"))


_forced = _checked(os.environ.get(BACKEND_VARIABLE))
