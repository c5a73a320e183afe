"""Helpers for tensors: attributes computed once, tables kept on a device, NumPy views."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

Value = TypeVar("Value")


class lazy(Generic[Value]):
    """An attribute computed on first access, in a way that a compiler can trace.

    functools.cached_property takes a lock before Python 3.12, and there the tracing would end.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> lazy[Value]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: object | None, owner: type) -> lazy[Value] | Value:
        if instance is None:
            return self
        value = self.compute(instance)
        setattr(instance, self.name, value)  # found before this from now on
        return value


def table(rows: tuple[Any, ...], like: Tensor) -> Tensor:
    """Return nested tuples as an int64 tensor on the device of `like`; never write to it.

    A copy from the host makes the host wait for the device, and can't be captured in a CUDA
    graph, so it is made once per device and then kept.
    """
    if torch.compiler.is_compiling() or type(like) is not Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=like.device)
    return _on_device(rows, like.device)


@lru_cache(maxsize=1024)
def _on_device(rows: tuple[Any, ...], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)


_BITS: dict[int, npt.DTypeLike] = {2: np.int16, 4: np.int32, 8: np.int64}


def bits_of(weights: Tensor) -> Array:
    """Return the memory of weights as integers: they are moved only, and numpy has no bfloat16."""
    size = weights.element_size()
    array: Array = array_of(weights if size > 2 else weights.view(torch.int16)).view(_BITS[size])
    return array


def array_of(tensor: Tensor) -> Array:
    """Return the tensor's own memory, in C order."""
    array: Array = tensor.detach().contiguous().numpy() if tensor.requires_grad else tensor.numpy()
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)
