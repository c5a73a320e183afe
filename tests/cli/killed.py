"""Run a verb again and again, killed each time before another of its changes to the disk.

    python tests/cli/killed.py FOLDER KILLS VERB ARGUMENTS...

FOLDER/before is what is there. FOLDER/done is a copy in which the verb ran to its end; in
FOLDER/at-N SIGKILL came before its N-th change. Changes are what Python's audit hooks tell of:
files opened for writing, made, renamed and removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.truncate"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Changes:
    """Counts what changes in a folder, from when it is told which; kills before the `last`-th."""

    def __init__(self) -> None:
        self.folder, self.count, self.last = "", 0, -1
        sys.addaudithook(self._event)

    def _event(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.folder or not args or not isinstance(args[0], (str, os.PathLike)):
            return
        opened = event == "open" and isinstance(args[2], int) and bool(args[2] & WRITES)
        path = os.path.join(self.folder, os.fspath(args[0]))
        if (opened or event in CHANGES) and path.startswith(self.folder):
            if self.count == self.last:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1


def main() -> None:
    """Kill at so many points, evenly spread, the last two among them."""
    root, kills, arguments = Path(sys.argv[1]).resolve(), int(sys.argv[2]), sys.argv[3:]
    from paceline.cli.app import app

    changes = Changes()

    def run(folder: Path) -> None:
        shutil.copytree(root / "before", folder)
        os.chdir(folder)
        changes.folder = str(folder)
        app(arguments, standalone_mode=False)
        changes.folder = ""

    run(root / "done")  # in this process: what it has imported, those that are killed needn't
    points = changes.count
    assert points > 2, f"{points} changes of the disk are none to be killed at"
    chosen = {round(n * (points - 1) / (kills - 1)) for n in range(kills)} | {points - 2}
    for point in sorted(chosen):
        child = os.fork()
        if not child:
            try:
                changes.count, changes.last = 0, point
                run(root / f"at-{point}")
            finally:
                os._exit(1)  # it came to its end, which it must not
        assert os.waitpid(child, 0)[1] == signal.SIGKILL


if __name__ == "__main__":
    main()
