"""Checks of `checks.py` on several gloo ranks of this machine, in bounded time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CHECKS = str(HERE / "checks.py")
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # where the tiny models and the row counter are
    "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")]),
}


@dataclass(frozen=True)
class Finished:
    """Exit status and output of one rank."""

    code: int
    output: str


def run_ranks(
    *names: str, folder: Path, ranks: int = 2, only: int | None = None, **env: str
) -> list[Finished]:
    """Run the named checks one after the other in every rank; kill what isn't done in time.

    Args:
        names: functions of checks.py.
        folder: where they find the tiny models.
        ranks: processes.
        only: wait for this rank alone, then kill the others.
        env: further environment variables.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, CHECKS, str(folder), *names],
            env=ENVIRONMENT | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    finished = []
    try:
        for process in processes if only is None else [processes[only]]:
            output, _ = process.communicate(timeout=240)
            finished.append(Finished(process.returncode, output))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return finished


def assert_passed(finished: list[Finished]) -> None:
    """Fail unless every rank ran every check to its end."""
    for rank, result in enumerate(finished):
        assert result.code == 0, f"rank {rank} ended with {result.code}:\n{result.output[-6000:]}"
