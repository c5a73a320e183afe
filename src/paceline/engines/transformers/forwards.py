"""Calling a module's forward, or standing in for it, without leaving a trace."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def argument_names(forward: Callable[..., Any]) -> list[str]:
    """Names of a forward's parameters, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(forward).parameters.values() if p.kind in kinds]


def bind(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments in order, those given by name included."""
    return (*args, *(kwargs[n] for n in names[len(args) :] if n in kwargs)) if kwargs else args


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first argument of a call, by name or not."""
    return args[0] if args else next(iter(kwargs.values()))


_MISSING = object()


def stand_in(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Give one module instance another forward; returns what puts the former one back."""
    former = module.__dict__.get("forward", _MISSING)
    module.__dict__["forward"] = forward

    def undo() -> None:
        if former is _MISSING:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = former

    return undo


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give one module instance another forward for a while."""
    undo = stand_in(module, forward)
    try:
        yield
    finally:
        undo()


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@contextmanager
def undisturbed(block: nn.Module) -> Iterator[None]:
    """No hook fires inside; random state, attributes and buffers are put back afterwards."""
    modules = list(block.modules())
    device = next(block.parameters()).device
    attributes = [(m, dict(m.__dict__)) for m in modules]  # a router may note the dtype it saw
    experts = {id(b) for b in block.get_submodule("experts").buffers()}
    buffers = [(b, b.clone()) for b in block.buffers() if not b.is_meta and id(b) not in experts]
    on_accelerator = device.type not in ("cpu", "meta")
    with torch.random.fork_rng(
        devices=[device] if on_accelerator else [],
        device_type=device.type if on_accelerator else "cuda",
    ):
        for m in modules:
            m.__dict__.update({name: OrderedDict() for name in _HOOKS})
        try:
            yield
        finally:
            for m, former in attributes:
                m.__dict__.clear()
                m.__dict__.update(former)
            for buffer, content in buffers:
                if not torch.equal(buffer, content):
                    buffer.copy_(content)
