"""Small tables of whole numbers on the device: copied there once, so that routing never waits."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def table(rows: tuple[Any, ...], like: Tensor) -> Tensor:
    """The nested tuples `rows` as an int64 tensor on the device of `like`; never write to it.

    A copy from the host makes the host wait for the device, and can't be captured in a CUDA
    graph, so it is made once for each device and then kept.
    """
    if torch.compiler.is_compiling() or type(like) is not Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=like.device)
    return _on_device(rows, like.device)


@lru_cache(maxsize=1024)
def _on_device(rows: tuple[Any, ...], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)
