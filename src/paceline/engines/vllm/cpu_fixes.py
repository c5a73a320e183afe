"""Fixes of vLLM's CPU build: collectives for expert parallelism, and a start beside numba."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.triton_utils import dispatcher


def install() -> None:
    """Add the collectives that are missing, and let vLLM start beside numba."""
    for name, method in (("all_gatherv", all_gatherv), ("reduce_scatterv", reduce_scatterv)):
        if getattr(CpuCommunicator, name) is getattr(DeviceCommunicatorBase, name):
            setattr(CpuCommunicator, name, method)
    search_beside_numba()


def search_beside_numba() -> None:
    """Let vLLM start in a process in which numba has run."""
    # When a worker starts, vLLM searches the attributes of all objects of all modules, and fails on
    # an object of llvmlite whose __dict__ is not a dictionary.
    dispatcher.vars = _vars


def _vars(thing: object) -> dict[str, Any]:
    """Return `vars(thing)`, or an empty dictionary if that is not a dictionary."""
    found: Any = vars(thing)
    return found if isinstance(found, dict) else {}


def all_gatherv(
    self: Any,
    input_: Tensor | list[Tensor],
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> Tensor | list[Tensor]:
    """Gather the rows of all ranks, in their order, of one tensor or of each of a list.

    Args:
        self: the communicator.
        input_: [rows of this rank, ...].
        dim: 0, the rows.
        sizes: [ranks] rows of each rank; None: as many as here.
    """
    if isinstance(input_, list):
        return [_gathered(self, tensor, sizes) for tensor in input_]
    return _gathered(self, input_, sizes)


def reduce_scatterv(
    self: Any, input_: Tensor, dim: int = -1, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return the rows of this rank in the sum over ranks.

    Args:
        self: the communicator.
        input_: [rows of all ranks, ...].
        dim: 0, the rows.
        sizes: [ranks] rows of each rank; None: equally many.
    """
    ranks, own = self.world_size, self.rank_in_group
    sizes = [input_.shape[0] // ranks] * ranks if sizes is None else sizes
    total = input_.contiguous().clone()
    dist.all_reduce(total, group=self.device_group)
    start = sum(sizes[:own])
    return total[start : start + sizes[own]].clone()


def _gathered(self: Any, tensor: Tensor, sizes: Sequence[int] | None) -> Tensor:
    sizes = [tensor.shape[0]] * self.world_size if sizes is None else sizes
    most = max(sizes)
    padded = tensor.new_zeros((most, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
