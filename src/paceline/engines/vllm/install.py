"""Everything that the plugin changes in a process, in one place."""

from __future__ import annotations

from vllm.platforms import current_platform

from paceline.engines.vllm import cpu_fixes, stand_ins, worker
from paceline.engines.vllm import patches as seam

_done: list[bool] = []


def install() -> bool:
    """Put the seam and the workers' methods in; whether it was the first time."""
    if _done:
        return False
    _done.append(True)
    seam.install(worker.slots_of)
    worker.install()
    if current_platform.is_cpu():
        cpu_fixes.install()
        stand_ins.keep_fingerprints()
    return True
