"""Pipes, devices, links and folders in the place of files: one sentence, at once, in every verb."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import commands_that_read, run

from paceline.files import read_plain

SECONDS = 120  # a slow machine must not turn it red; a pipe nobody writes to is never done


class TooLong(BaseException):
    """No verb catches it."""


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLong

    former = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


NAMES = ("config.json", "trace.json", "calibration.safetensors", "model.safetensors")


def folder_of(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """A folder whose files are all of one kind; config.json is right where another isn't."""

    def fill(path: Path) -> None:
        path.mkdir()
        for name in NAMES:
            make(path / name)

    return fill


def right_config(path: Path) -> None:
    """Weights that are a pipe, beside a config that is read first."""
    folder_of(os.mkfifo)(path)
    (path / "config.json").unlink()
    (path / "config.json").write_text('{"model_type": "olmoe", "architectures": ["OlmoeFor"]}')


KINDS: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
    "empty folder": Path.mkdir,
    "folder of pipes": folder_of(os.mkfifo),
    "folder of endless files": folder_of(lambda path: path.symlink_to("/dev/zero")),
    "folder of folders": folder_of(Path.mkdir),
    "folder of links to themselves": folder_of(lambda path: path.symlink_to(path)),
    "weights that are a pipe": right_config,
}


FIRST = ("pipe", "folder of endless files")  # the others run in `make test-all` alone


@pytest.mark.parametrize(
    "kind", [k if k in FIRST else pytest.param(k, marks=pytest.mark.full) for k in KINDS]
)
def test_what_is_no_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path, text, out = tmp_path / "given", tmp_path / "text.txt", tmp_path / "out"
    KINDS[kind](path)
    text.write_text("Some words to be read.\n" * 40)
    for arguments in commands_that_read(path, text, out):
        result = run(*arguments)
        assert result.exit_code == 2, (arguments, result.output, result.exception)
        assert len(result.output.strip().splitlines()) == 1, (arguments, result.output)
        assert not out.exists(), arguments


@pytest.mark.parametrize("option", ["--text", "--prompts"])
@pytest.mark.parametrize("kind", ["endless", "link to itself", "empty folder"])
def test_texts_end(kind: str, option: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path / "given")
    result = run("record", "demo", option, tmp_path / "given", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1


def test_a_shells_pipe_is_read_where_texts_are(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    if not os.fork():
        path.write_bytes(b"written by another process")
        os._exit(0)
    assert read_plain(path, 100, pipes=True) == b"written by another process"
    os.wait()
    with pytest.raises(ValueError, match="no plain file"):
        read_plain(path, 100)


def test_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 101)
    assert len(read_plain(path, 101)) == 101
    with pytest.raises(ValueError, match="more than 100 bytes"):
        read_plain(path, 100)
    with pytest.raises(ValueError, match="a folder"):
        read_plain(tmp_path, 100)
    with pytest.raises(FileNotFoundError):
        read_plain(tmp_path / "missing", 100)
