"""One clear sentence and exit code 2 for bad input, instead of a traceback."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import typer

BAD_INPUT = 2

P = ParamSpec("P")
R = TypeVar("R")


def sentence(error: BaseException) -> str:
    """An expected error as one line."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def check_writable(*files: Path | None) -> None:
    """Say before a long run, not after it, that its results can't be written.

    Raises:
        ValueError: naming the file, and why.
    """
    for file in files:
        if file is None:
            continue
        if not file.absolute().parent.is_dir():
            raise ValueError(f"{file} can't be written: there is no folder {file.parent}.")
        if file.is_dir():
            raise ValueError(f"{file} can't be written: it is a folder.")
        if not os.access(file.absolute().parent, os.W_OK):
            raise ValueError(f"{file} can't be written: its folder is closed to you.")


def guarded(verb: Callable[P, R]) -> Callable[P, R]:
    """Turn expected errors of a verb into one sentence on stderr.

    ValueError, OSError and a missing optional library are what bad input leads to; anything else
    is a defect and keeps its traceback. PACELINE_TRACEBACK=1 keeps it for all.
    """

    @wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # what a verb runs is one user's own text: nobody else shares its batches
        warnings.filterwarnings("ignore", message=".*share one budget")
        warnings.filterwarnings("ignore", message=".*never applied")  # what a verb prints says so
        try:
            return verb(*args, **kwargs)
        except BrokenPipeError:  # the reader of a pipe went away
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except (ValueError, OSError, ImportError) as error:
            if os.environ.get("PACELINE_TRACEBACK"):
                raise
            typer.echo(f"paceline: {sentence(error)}", err=True)
            raise typer.Exit(BAD_INPUT) from None

    return run
