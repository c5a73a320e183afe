"""Weights that are elsewhere between forwards: offloaded by Accelerate, or sharded by FSDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import nn


def missing_weights(module: nn.Module) -> str | None:
    """Return the name of a weight on the meta device that no hook brings back, None without one."""
    for name, part in module.named_modules():
        if _offloading_hooks(part):
            continue
        for own, weight in part.named_parameters(recurse=False):
            if weight.is_meta:
                return f"{name}.{own}" if name else own
    return None


def computing_device(module: nn.Module) -> torch.device:
    """Return the device on which a module computes, be its weights offloaded in between."""
    first = next(iter(module.parameters()))
    if first.is_meta:
        for part in module.modules():
            for hook in _offloading_hooks(part):
                return torch.device(hook.execution_device)
    return first.device


@contextmanager
def weights_present(model: nn.Module, name: str) -> Iterator[None]:
    """Have all weights of the part of a model called `name` in place inside the context."""
    part = model.get_submodule(name)
    with ExitStack() as undo:
        path = ["", *accumulate(name.split("."), "{}.{}".format)] if name else []
        for module in [*map(model.get_submodule, path), *part.modules()]:
            if hasattr(module, "unshard") and hasattr(module, "reshard"):
                sharded: Any = module
                sharded.unshard()
                undo.callback(sharded.reshard)
        for module in part.modules():
            for hook in _offloading_hooks(module):
                hook.pre_forward(module)
                hook.offload = False  # a forward of the module keeps what is there
                undo.callback(_offload, hook, module)
        yield


def _offload(hook: Any, module: nn.Module) -> None:
    hook.offload = True
    hook.post_forward(module, None)


def _offloading_hooks(module: nn.Module) -> list[Any]:
    """Return Accelerate's hooks that load a module's own weights before its forward."""
    hook = module.__dict__.get("_hf_hook")
    hooks = getattr(hook, "hooks", (hook,))
    return [one for one in hooks if getattr(one, "offload", False)]
