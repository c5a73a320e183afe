"""Progress of long work: a bar on a terminal, plain lines in a log. Always on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Tell = Callable[[int, int, str], None]

_EVERY = 10.0  # seconds between two plain lines


@contextmanager
def progress(quiet: bool = False) -> Iterator[Tell]:
    """Yield a function to be told steps done, steps in all and what was just done.

    Args:
        quiet: show nothing, as every rank but the first does.
    """
    console = Console(stderr=True, quiet=quiet)
    if not console.is_terminal:
        yield _plain(console)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=what
        )


def _plain(console: Console) -> Tell:
    last = time.monotonic()

    def tell(done: int, total: int, what: str) -> None:
        nonlocal last
        if done == total or time.monotonic() - last >= _EVERY:
            last = time.monotonic()
            console.print(f"{done}/{total} {what}", markup=False, highlight=False, soft_wrap=True)

    return tell
