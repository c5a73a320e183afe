"""Every patch that the plugin applies to vLLM: routers, experts, workers, and its CPU build."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe import layer as moe_layer
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase

from paceline.engines.serving.environment import read_settings
from paceline.engines.serving.metrics import publisher_for
from paceline.engines.serving.recording import recording_for
from paceline.engines.serving.worker import METHODS
from paceline.engines.vllm import stand_ins
from paceline.engines.vllm.routers import capped_class, is_capped
from paceline.engines.vllm.runners import slots_of
from paceline.engines.vllm.vllm_model import VllmModel

logger = logging.getLogger("vllm.paceline")

COMPILE_MARK = "paceline-1"
"""Part of the key of vLLM's compile cache: a graph with the cap's operators is another graph."""


def install() -> bool:
    """Apply all patches; return False if this process has them already."""
    if hasattr(moe_layer.create_fused_moe_router, "paceline"):
        return False
    _patch_routers()
    _patch_workers()
    VllmConfig.compute_hash = _marked(VllmConfig.compute_hash)
    if current_platform.is_cpu():
        _fix_cpu_build()
        stand_ins.keep_fingerprints()
    return True


# -- routers ---------------------------------------------------------------------------------------


def _patch_routers() -> None:
    create, init = moe_layer.create_fused_moe_router, MoERunner.__init__

    @wraps(create)
    def create_fused_moe_router(*args: Any, **kwargs: Any) -> Any:
        return _capped(create(*args, **kwargs))

    @wraps(init)
    def runner_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        router = _capped(self.router)
        if is_capped(router):
            settings = read_settings()
            router.paceline_name = self.layer_name
            router.paceline_slots = 0 if settings is None else slots_of(self, settings)

    create_fused_moe_router.paceline = True  # type: ignore[attr-defined]
    moe_layer.create_fused_moe_router = create_fused_moe_router
    MoERunner.__init__ = runner_init


def _capped(router: Any) -> Any:
    """Give a router the capped class; one that is no BaseRouter stays, and is refused later."""
    if isinstance(router, BaseRouter) and not is_capped(router):
        kind: Any = type(router)
        router.__class__ = capped_class(kind)
    return router


def _marked(compute_hash: Any) -> Any:
    @wraps(compute_hash)
    def marked(self: Any, *args: Any, **kwargs: Any) -> str:
        return f"{compute_hash(self, *args, **kwargs)}-{COMPILE_MARK}"

    return marked


# -- workers ---------------------------------------------------------------------------------------


def _patch_workers() -> None:
    """Cap every model that a worker loads from now on, and add methods for RPC."""
    load, warm_up, shutdown = (
        Worker.load_model, Worker.compile_or_warm_up_model, Worker.shutdown,
    )  # fmt: skip

    @wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        settings = read_settings()
        if settings is None:
            return
        parallel = self.parallel_config
        rank = int(parallel.data_parallel_index * parallel.world_size + self.rank)  # of all workers
        try:
            self.paceline = VllmModel(self.model_runner, self.vllm_config, settings, rank)
            self.paceline_publisher = publisher_for(self.paceline)
            self.paceline_recording = recording_for(
                self.paceline, settings, self.model_config.model, parallel, self.rank
            )
        except ValueError as error:  # vLLM's log doesn't say who raised it
            raise ValueError(f"paceline: {error}") from error

    @wraps(warm_up)
    def compile_or_warm_up_model(self: Any) -> Any:
        took = warm_up(self)
        if getattr(self, "paceline", None) is not None:
            self.paceline.reset_stats()  # an accelerator counts made-up batches too
        return took

    @wraps(shutdown)
    def finish_and_shutdown(self: Any) -> Any:
        if getattr(self, "paceline_recording", None) is not None:
            self.paceline_recording.stop()
        return shutdown(self)

    Worker.load_model = load_model
    Worker.compile_or_warm_up_model = compile_or_warm_up_model
    Worker.shutdown = finish_and_shutdown
    for method in METHODS:
        setattr(WorkerBase, method.__name__, method)


# -- the CPU build ---------------------------------------------------------------------------------


def _fix_cpu_build() -> None:
    """Add the collectives that expert parallelism lacks, and let vLLM start beside numba."""
    for name, method in (("all_gatherv", _all_gatherv), ("reduce_scatterv", _reduce_scatterv)):
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


def _all_gatherv(
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


def _reduce_scatterv(
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
