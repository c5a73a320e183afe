"""Collectives of expert parallelism, bounded in time, with errors that name their cause."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.text import shortened

TIMEOUT_VARIABLE = "PACELINE_EP_TIMEOUT"
"""Environment variable: seconds to wait for the other ranks (gloo); NCCL keeps its group's own."""
_DEFAULT_TIMEOUT = 300.0


class ExpertParallelError(RuntimeError):
    """Another rank is lost, silent for too long, or runs something else: this rank can't go on."""


def join(timeout: float = _DEFAULT_TIMEOUT) -> None:
    """Start torch.distributed under torchrun, with all waits bounded.

    Transformers starts it itself while loading, but then waits two hours for a silent rank.

    Args:
        timeout: seconds to wait for other ranks.

    Raises:
        RuntimeError: if this process was not started by torchrun.
    """
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        raise RuntimeError("RANK is not set: start this program with torchrun --nproc-per-node N.")
    os.environ.setdefault(TIMEOUT_VARIABLE, str(timeout))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout))


class RankGroup:
    """A group of ranks, as one of them sees it.

    Args:
        group: the ranks; None: all.
        timeout: seconds to wait for them; None: $PACELINE_EP_TIMEOUT, else 300.

    Raises:
        RuntimeError: if torch.distributed has not been started.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout: float | None = None
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not started: call expert_parallel.join() first."
            )
        self.processes = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(self.processes)
        self.size = dist.get_world_size(self.processes)
        if timeout is None:
            timeout = float(os.environ.get(TIMEOUT_VARIABLE, _DEFAULT_TIMEOUT))
        self.timeout = timeout

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int], where: str) -> Tensor:
        """Send rows to every rank, and return those from every rank, in rank order.

        Args:
            rows: [sum(sent), ...].
            sent: rows for each rank.
            received: rows from each rank.

        Returns:
            [sum(received), ...].
        """
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        with self._errors_of(f"the all-to-all of {where}"):
            work = dist.all_to_all_single(
                out, rows.contiguous(), received, sent, group=self.processes, async_op=True
            )
            self._wait(work, out)
        return out

    def all_reduce(self, tensor: Tensor, where: str) -> None:
        """Sum over the ranks, in place."""
        with self._errors_of(f"the all-reduce of {where}"):
            self._wait(dist.all_reduce(tensor, group=self.processes, async_op=True), tensor)

    def all_gather(self, rows: Tensor, where: str) -> tuple[Tensor, list[int]]:
        """Return the rows of all ranks in rank order, and how many each rank has.

        Args:
            rows: [rows, ...], the rest of the shape alike on all ranks.
        """
        count = torch.tensor([rows.shape[0]], device=rows.device)
        counts = [torch.empty_like(count) for _ in range(self.size)]
        with self._errors_of(f"the all-gather of {where}"):
            work = dist.all_gather(counts, count, group=self.processes, async_op=True)
            self._wait(work, count)
            sizes = torch.cat(counts).tolist()
            padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
            padded[: rows.shape[0]] = rows
            parts = [torch.empty_like(padded) for _ in range(self.size)]
            if max(sizes):
                work = dist.all_gather(parts, padded, group=self.processes, async_op=True)
                self._wait(work, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]), sizes

    def agree(self, name: str, value: Any) -> None:
        """Check that a value is the same on all ranks.

        Raises:
            ValueError: on every rank, naming the ranks that differ from rank 0.
        """
        mine = torch.tensor(list(repr(value).encode()), dtype=torch.uint8, device=self._device)
        joined, sizes = self.all_gather(mine, f"the agreement on {name}")
        values = [bytes(part.tolist()).decode() for part in torch.split(joined.cpu(), sizes)]
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ValueError(
                    f"{name} is not the same on all ranks: rank 0 has {shortened(values[0], 120)}, "
                    f"rank {rank} has {shortened(other, 120)}."
                )

    @property
    def _device(self) -> torch.device:
        on_cpu = "gloo" in str(dist.get_backend(self.processes))
        return torch.device("cpu" if on_cpu else torch.cuda.current_device())

    def _wait(self, work: Any, tensor: Tensor) -> None:
        if tensor.is_cuda:
            work.wait()  # with a time-out it would block the host; NCCL's watchdog bounds the time
        else:
            work.wait(timedelta(seconds=self.timeout))

    @contextmanager
    def _errors_of(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
            late = "timed out" in cause.lower() or "timeout" in cause.lower()
            why = (
                f"another rank has not joined within {self.timeout:g} s (it is stuck, or runs "
                "other forwards than this one)"
                if late
                else "another rank is gone"
            )
            raise ExpertParallelError(
                f"rank {self.rank} of {self.size} gives up in {what}: {why}: {cause}"
            ) from error
