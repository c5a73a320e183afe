"""Everything that the plugin changes in a process, in one place."""

from __future__ import annotations

from functools import partial

from vllm.platforms import current_platform

from paceline.engines.vllm import expert_parallel, seam, worker
from paceline.engines.vllm.environment import Wanted
from paceline.engines.vllm.model import slots_of

_installed: list[Wanted] = []


def install(wanted: Wanted) -> bool:
    """Put the seam and the workers' methods in; whether it was the first time."""
    if _installed:
        return False
    _installed.append(wanted)
    seam.install(partial(slots_of, wanted=wanted))
    worker.install(wanted)
    if current_platform.is_cpu():
        expert_parallel.install()
    return True
