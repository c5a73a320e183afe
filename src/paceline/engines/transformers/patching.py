"""Patches: methods that one module instance has for a while instead of its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn


class Switch:
    """State of all patches of a model and its copies: on until `detach`."""

    def __init__(self) -> None:
        self.on = True

    def __deepcopy__(self, memo: Any) -> Switch:
        return self

    def __reduce__(self) -> Any:
        # what is loaded elsewhere could never be detached
        raise TypeError("an attached model can't be pickled: detach it first.")


_KEY = "_paceline_patch"


@dataclass(frozen=True, eq=False)
class Patch:
    """A method that one module instance has instead of its own.

    Attributes:
        original: the value under that name in the module's own `__dict__`, if there was one.
        switch: on while the patch does anything.
        function: that the new method calls, by which a patch is recognised.
    """

    module: nn.Module
    name: str
    original: tuple[Any, ...]
    switch: Switch
    function: Callable[..., Any]

    def undo(self) -> None:
        """Restore the original method; a patch that somebody has wrapped stays, switched off.

        Under this patch may be another one that came back when its wrapper was removed.
        """
        patch = patch_of(self.module.__dict__.get(self.name))
        while patch is not None and (patch is self or not patch.switch.on):
            _restore(self.module, self.name, patch.original)
            patch = patch_of(self.module.__dict__.get(self.name))


def patch_method(
    module: nn.Module, switch: Switch, function: Callable[..., Any], name: str = "forward"
) -> Patch:
    """Give one module instance another method.

    Not a pair of hooks: these cost a small model's decode step twice as much. The new method must
    not close over the module, because a copy of the model has to run itself.
    """
    method = partial(function)
    update_wrapper(method, getattr(module, name))
    patch = Patch(module, name, _own_value(module, name), switch, method.func)
    method.__dict__[_KEY] = patch
    module.__dict__[name] = method
    return patch


def patch_of(value: Any) -> Patch | None:
    """Return the patch whose method `value` is, None for any other method.

    A wrapper around the method may copy its `__dict__` (`functools.update_wrapper`), but calls
    another function. In a copy of a model both are copies, and equal again.
    """
    patch = value.__dict__.get(_KEY) if type(value) is partial else None
    return patch if isinstance(patch, Patch) and patch.function == value.func else None


def remove_dead_patches(model: nn.Module) -> None:
    """Undo patches that are switched off: a copy of a once attached model still has them."""
    for module in model.modules():
        for value in list(module.__dict__.values()):
            patch = patch_of(value)
            if patch is not None and not patch.switch.on:
                patch.undo()


def _own_value(module: nn.Module, name: str) -> tuple[Any, ...]:
    return (module.__dict__[name],) if name in module.__dict__ else ()


def _restore(module: nn.Module, name: str, original: tuple[Any, ...]) -> None:
    if original:
        module.__dict__[name] = original[0]
    else:
        module.__dict__.pop(name, None)


# -- while a layer is probed -----------------------------------------------------------------------


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give one module instance another forward inside the context."""
    original = _own_value(module, "forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        _restore(module, "forward", original)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@contextmanager
def undisturbed(block: nn.Module) -> Iterator[None]:
    """Disable hooks inside the context; restore random state, attributes and buffers after it."""
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
