"""Runs of tiny models that tests share: built once, forwards, an untouched model's routes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from math import ceil
from typing import Any

import pytest
import tiny_models
import torch
from row_counter import RowCounter
from torch import Tensor, nn

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


@functools.lru_cache(maxsize=16)
def model_of(name: str) -> Any:
    """A tiny model, shared: a test must leave it as it found it."""
    return tiny_models.build(name)


def first_tier(names: Iterable[str], chosen: Iterable[str]) -> list[Any]:
    """Return parameters of which all but those chosen run in `make test-all` alone."""
    return [pytest.param(n, marks=() if n in chosen else pytest.mark.full) for n in names]


@contextmanager
def implementation(model: nn.Module, name: str) -> Iterator[bool]:
    """Run experts by this implementation; False where the architecture has only its own."""
    try:
        former = model.get_experts_implementation()
        model.set_experts_implementation(name)
    except (ValueError, AttributeError):
        yield name == "eager"
        return
    try:
        yield True
    finally:
        model.set_experts_implementation(former)


@torch.no_grad()
def output(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """The first tensor of a forward's output: logits or hidden states."""
    return model(**given)[0]


def choices(model: nn.Module, given: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Experts module -> (ids, weights) [tokens, k] that an untouched model gives it."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = []
    for name, module in model.named_modules():
        if name.split(".")[-1] == "experts":

            def keep(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
                seen[name] = (*args, *kwargs.values())[1:3]

            hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    output(model, given)
    for hook in hooks:
        hook.remove()
    return seen


def counted(model: nn.Module, given: dict[str, Tensor]) -> tuple[RowCounter, Tensor]:
    """A forward, and the rows each expert really computed in it."""
    counter = RowCounter(model)
    with counter:
        out = output(model, given)
    return counter, out


def loads(ids: Tensor, valid: Tensor, experts: int) -> Tensor:
    """[experts] assignments of real tokens."""
    chosen = ids[valid].flatten()
    return torch.bincount(chosen[chosen < experts], minlength=experts)


def capacity(factor: str, tokens: int, k: int, hosted: int, experts: int) -> int:
    return ceil(Fraction(factor) * tokens * k * hosted / experts)


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Everything an attach might leave behind."""
    found: dict[str, Any] = {"config": copy.deepcopy(model.config.to_dict())}
    for name, m in model.named_modules():
        plain = {
            k: "tensor" if isinstance(v, Tensor) else id(v)
            for k, v in m.__dict__.items()
            if not k.startswith("_")
        }
        hooks = {k: len(v) for k, v in m.__dict__.items() if k.endswith("_hooks") and v}
        flags = {"_is_expert_parallel": m.__dict__.get("_is_expert_parallel")}
        forward = getattr(m.forward, "__func__", m.forward)
        found[name] = (forward, sorted(m.__dict__), plain, hooks, flags, m.training)
    return found


def kept_slots(pace: Any) -> list[Tensor]:
    """A list that gets the [tokens, slots] bool kept by the first layer of each capped forward."""
    first, seen = pace.layers[0], []

    def watcher(layer: str, inputs: Any, assignment: Any) -> None:
        if layer == first and not bool(assignment.kept.all()):
            seen.append(assignment.kept)

    pace.watch(watcher)
    return seen
