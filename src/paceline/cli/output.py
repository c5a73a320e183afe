"""Output of the verbs: results as JSON or tables, progress, and expected errors as one sentence."""

from __future__ import annotations

import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import typer

from paceline.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console

BAD_INPUT, INTERRUPTED = 2, 130  # exit codes
_EVERY = 10.0  # seconds between two plain lines of progress

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


# -- errors ----------------------------------------------------------------------------------------


def sentence(error: BaseException) -> str:
    """Return an expected error as one line."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def guarded(verb: Callable[P, R]) -> Callable[P, R]:
    """Turn expected errors of a verb into one sentence on stderr and exit code 2.

    Bad input raises ValueError, OSError or, for a missing optional library, ImportError. Anything
    else is a defect and keeps its traceback; PACELINE_TRACEBACK=1 keeps it for all errors.
    """

    @wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # a verb runs one user's own text: nobody else shares its batches
        warnings.filterwarnings("ignore", message=".*share one budget")
        warnings.filterwarnings("ignore", message=".*never applied")  # the printed verdict says so
        try:
            return verb(*args, **kwargs)
        except KeyboardInterrupt:
            typer.echo("paceline: interrupted.", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader of a pipe has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except (ValueError, OSError, ImportError) as error:
            if os.environ.get("PACELINE_TRACEBACK"):
                raise
            typer.echo(f"paceline: {sentence(error)}", err=True)
            raise typer.Exit(BAD_INPUT) from None

    return run


@contextmanager
def continued_by_same_command(kept: bool = True) -> Iterator[None]:
    """Say at an interruption inside the block that the same command goes on.

    Args:
        kept: False if nothing is kept, so that it begins anew.
    """
    try:
        yield
    except KeyboardInterrupt:
        goes_on = f"the same command goes on: {command_line()}" if kept else "nothing is kept."
        typer.echo(f"paceline: interrupted; {goes_on}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def check_writable(**files: Path | None) -> None:
    """Check before the work that the files of options can be written.

    Raises:
        ValueError: naming the option and the file, and why it can't be written.
        ImportError: if a library is missing that makes the page of --html.
    """
    from paceline.files import try_file

    if files.get("html") is not None:
        check_page_libraries()

    for option, file in files.items():
        if file is not None:
            with _named(option, file):
                try_file(file)


def check_page_libraries() -> None:
    """Check before the work that a page can be made at its end.

    Raises:
        ImportError: naming the library that is missing, and how to install it.
    """
    for name in ("jinja2", "plotly"):
        if find_spec(name) is None:
            raise ImportError(f"a page needs {name}: pip install 'paceline[cli]'")


def check_folder(*, parents: bool = True, **folders: Path | None) -> None:
    """Check before the work that options can be folders to write into.

    Args:
        parents: True if missing folders above are made too.

    Raises:
        ValueError: naming the option and the folder, and why it can't be written.
    """
    from paceline.files import try_file

    for option, folder in folders.items():
        if folder is None:
            continue
        with _named(option, folder):
            there = folder.absolute()
            if there.exists() and not there.is_dir():
                raise _BadOption(f"--{option} must be a folder, got the file {folder}.")
            while parents and not there.exists():
                there = there.parent
            if there.is_file():
                raise ValueError(f"{there} is a file")
            if there.is_dir():
                try_file(there / folder.name[:200])  # a name that the file system takes
            else:
                try_file(there)


def check_new(force: bool, **paths: Path | None) -> None:
    """Check that options replace no earlier result, unless by --force; a folder may be empty.

    Raises:
        ValueError: naming the option and the file that is there.
    """
    for option, path in paths.items():
        if path is None or force or not os.path.lexists(path):
            continue
        if not path.is_dir() or any(path.iterdir()):
            raise ValueError(f"--{option} {path} exists: give another, or --force to replace it.")


def check_trace(out: Path) -> None:
    """Check before the work that --out can be a new trace, whose folder may be there but empty.

    Raises:
        ValueError: if it has files, or can't be written.
    """
    check_folder(parents=False, out=out)
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty: a trace goes into a new folder.")


class _BadOption(ValueError):
    """An error that names its option already."""


@contextmanager
def _named(option: str, path: Path) -> Iterator[None]:
    """Name the option in what is raised because a path can't be written."""
    try:
        yield
    except _BadOption:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"--{option} {path} can't be written: {reason}.") from None


@contextmanager
def writing() -> Iterator[Callable[[str, Path, Callable[[], object]], bool]]:
    """Yield a function that writes a result and returns True, or False if it can't.

    It takes the option, its path and what writes it. The first error is raised when the block ends,
    so that what was computed is printed even when the disk is full.

    Raises:
        ValueError: naming the option and the path.
    """
    failed: list[ValueError | ImportError] = []

    def write(option: str, path: Path, work: Callable[[], object]) -> bool:
        try:
            with _named(option, path):
                work()
        except (ValueError, ImportError) as error:
            failed.append(error)
            return False
        return True

    yield write
    if failed:
        raise failed[0]


def check_at_least(least: int, **options: int | None) -> None:
    """Check options that count something.

    Raises:
        ValueError: naming the first option below `least`.
    """
    for name, value in options.items():
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}.")


# -- results ---------------------------------------------------------------------------------------


def emit(result: T, as_json: bool, show: Callable[[T], None], **more: Any) -> None:
    """Print a result: as JSON (with `more` in it) and nothing else, or by `show`."""
    if as_json:
        from paceline.files import to_json

        values: Any = result.to_dict() if hasattr(result, "to_dict") else result
        typer.echo(to_json({**values, **more}), nl=False)
    else:
        show(result)


def command_line() -> str:
    """Return the command that runs, for results to keep."""
    return shlex.join(["paceline", *sys.argv[1:]])


def run_facts() -> dict[str, Any]:
    """Return when, how and where a result is made; seconds are left to the caller."""
    from paceline.system_info import system_info

    return {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(),
        **system_info(),
        "seconds": None,
    }


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], fold: bool = False
) -> None:
    """Print a table: a first column of names, which may fold, and columns of numbers.

    Long headings of columns fold at spaces, so that a table of eight columns fits in 80.
    """
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    shown.add_column(columns[0], no_wrap=not fold, overflow="fold" if fold else "ellipsis")
    for name in columns[1:]:
        if len(name) > 8:
            name = name.replace(" ", "\n").replace("\n%", " %").replace("±\n", "± ")
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    out = console()
    out.print(title, markup=False)
    out.print(shown)


def console() -> Console:
    """Return the terminal to print tables on."""
    from rich.console import Console

    return Console(highlight=False)


def print_lines(lines: Iterable[str]) -> None:
    """Print sentences, wrapped at the terminal's width."""
    out = console()
    for line in lines:
        out.print(line, markup=False)


def print_verdict(lines: Sequence[str]) -> None:
    """Print a result in a sentence, bold, and what else is to be said of it."""
    if lines:
        console().print(lines[0], style="bold", markup=False)
        print_lines(lines[1:])


def print_end(written: Iterable[Path | str | None], then: Sequence[Sequence[str]] = ()) -> None:
    """Print the files that were written, and commands to run next, by their arguments."""
    for path in written:
        if path is not None:
            typer.echo(f"Written: {path}")
    for command in then:
        typer.echo(f"Next: {shlex.join(['paceline', *command])}")


# -- progress --------------------------------------------------------------------------------------


@contextmanager
def progress(quiet: bool = False) -> Iterator[Progress]:
    """Yield a function that shows steps done, steps in all and the last step, on stderr.

    A terminal shows a bar, a log gets a plain line every ten seconds.

    Args:
        quiet: show nothing, as every rank but the first does.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, quiet=quiet)
    if not console.is_terminal:
        yield _plain(console)
        return
    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=what
        )


def _plain(console: Console) -> Progress:
    first = last = time.monotonic()

    def show(done: int, total: int, what: str) -> None:
        nonlocal last
        now = time.monotonic()
        if done == total or now - last >= _EVERY:
            last = now
            left = (now - first) * (total - done) / max(done, 1)
            ending = f", about {_duration(left)} left" if done < total else ""
            line = f"{done}/{total} {what}{ending}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    return show


def _duration(seconds: float) -> str:
    """Write a time roughly.

    >>> _duration(42), _duration(170)
    ('42 s', '3 min')
    """
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
