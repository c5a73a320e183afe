"""Calling a module's forward, or standing in for one of its methods, without leaving a trace."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
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


def named_arguments(
    names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """A call's arguments by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs} if args else kwargs


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first argument of a call, by name or not."""
    return args[0] if args else next(iter(kwargs.values()))


# -- standing in -----------------------------------------------------------------------------------


class Switch:
    """Whether stand-ins do anything: one for a model and all its copies, off after `detach`."""

    def __init__(self) -> None:
        self.on = True

    def __deepcopy__(self, memo: Any) -> Switch:
        return self

    def __reduce__(self) -> Any:
        # what is loaded elsewhere could never be detached
        raise TypeError("an attached model can't be pickled: detach it first.")


_MARK = "_paceline_stand_in"


@dataclass(frozen=True, eq=False)
class StandIn:
    """A method that one module instance has instead of its own.

    Attributes:
        module: that has it.
        name: of the method.
        former: what the module's own `__dict__` had under that name: at most one value.
        switch: whether it does anything.
    """

    module: nn.Module
    name: str
    former: tuple[Any, ...]
    switch: Switch

    def undo(self) -> None:
        """Put the former method back; one that somebody has wrapped stays, switched off."""
        if stands_in(self.module.__dict__.get(self.name)) is self:
            _put_back(self.module, self.name, self.former)


def stand_in(
    module: nn.Module, switch: Switch, function: Callable[..., Any], name: str = "forward"
) -> StandIn:
    """Give one module instance another method.

    Not a pair of hooks: of a small model's decode step they cost twice as much. And nothing that
    closes over the module: a copy of the model must run itself.
    """
    double = partial(function)
    update_wrapper(double, getattr(module, name))
    entry = StandIn(module, name, _own(module, name), switch)
    double.__dict__[_MARK] = entry
    module.__dict__[name] = double
    return entry


def _own(module: nn.Module, name: str) -> tuple[Any, ...]:
    return (module.__dict__[name],) if name in module.__dict__ else ()


def _put_back(module: nn.Module, name: str, former: tuple[Any, ...]) -> None:
    if former:
        module.__dict__[name] = former[0]
    else:
        module.__dict__.pop(name, None)


def stands_in(value: Any) -> StandIn | None:
    """The stand-in that a module's method is of, None for any other method.

    What wraps a stand-in may carry its attributes on (`functools.wraps`), but is a function.
    """
    entry = value.__dict__.get(_MARK) if type(value) is partial else None
    return entry if isinstance(entry, StandIn) else None


def free(model: nn.Module) -> None:
    """Take out stand-ins that are switched off: what a copy of a once attached model still has."""
    for module in model.modules():
        for value in list(module.__dict__.values()):
            entry = stands_in(value)
            while entry is not None and not entry.switch.on:
                entry.undo()
                entry = stands_in(module.__dict__.get(entry.name))


# -- probing ---------------------------------------------------------------------------------------


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give one module instance another forward for a while."""
    former = _own(module, "forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        _put_back(module, "forward", former)


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
