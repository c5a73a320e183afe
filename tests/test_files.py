"""Files that verbs write are the old one or the new one, whenever a process is killed."""

from __future__ import annotations

import ast
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline import ExpertPlacement, Plan
from paceline.cli.app import app
from paceline.files import atomic_file

SOURCE = Path(__file__).resolve().parents[1] / "src" / "paceline"

# writes files of one letter, of changing sizes, over and over
WRITER = """
import sys
from pathlib import Path
from paceline.files import atomic_file
path = Path(sys.argv[1])
for number in range(10**9):
    with atomic_file(path) as file, file.open("w") as handle:
        for _ in range(1 + number % 7):
            handle.write("abcdefg"[number % 7] * 200_000)
            handle.flush()
    if not number:
        print("first", flush=True)
"""


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for round_ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.003 * round_)
            os.kill(process.pid, signal.SIGKILL)
        text = path.read_text()
        letters = set(text)
        assert len(letters) == 1
        assert len(text) == 200_000 * (1 + "abcdefg".index(letters.pop()))
    assert path.stat().st_mode & 0o777 == 0o600
    assert all(each == path or each.suffix == ".part" for each in tmp_path.iterdir())


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError), atomic_file(path) as file:
        file.write_text("half" + 9000 * "x" + chr(0xD800), encoding="utf-8")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes: writes fail as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, former)


SAMPLE = "sample:esft_v2lite_law"


@pytest.mark.parametrize(
    ("room", "verb"),
    [
        (300, ("plan", SAMPLE, "--place-only", "--devices", "8", "--out", "new.toml")),
        (300, ("import", SAMPLE, "--out", "trace")),
        (20_000, ("import", SAMPLE, "--out", "trace")),
        (20_000, ("reorder", "demo", "--plan", "plan.toml", "--out", "out")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_a_disk_that_is_full_is_one_sentence_that_names_the_file(
    room: int, verb: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Plan((), (ExpertPlacement.explicit([e % 8 for e in range(32)]),)).save("plan.toml")
    with full_disk(room):
        ran = CliRunner().invoke(app, verb)
    assert ran.exit_code == 2, ran.output
    (sentence,) = (line for line in ran.stderr.splitlines() if line.startswith("paceline: "))
    assert "too large" in sentence  # the system's message for a file that may not grow
    assert verb[-1] in sentence
    assert {path.name for path in tmp_path.iterdir()} <= {"plan.toml", "trace"}


def test_an_open_file_is_open_to_others_as_the_process_says(tmp_path: Path) -> None:
    former = os.umask(0o027)
    try:
        with atomic_file(tmp_path / "file", private=False) as file:
            file.write_text("new")
    finally:
        os.umask(former)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


# whole folders that get their name when they are complete, or that only this process knows; and
# what all others write with
WHOLE_FOLDERS = {"checkpoint/reorder.py", "engines/serving/demo_model.py", "files.py"}


def test_nothing_is_written_without_atomic_file() -> None:
    """Every call that writes a file stands inside `with atomic_file(...)`, or in a whole folder."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if name not in WHOLE_FOLDERS:
            found += [f"{name}:{line}" for line in _bare_writes(ast.parse(path.read_text()))]
    assert found == []


def _bare_writes(node: ast.AST, inside: bool = False) -> list[int]:
    if isinstance(node, ast.With):
        calls = [item.context_expr for item in node.items]
        inside |= any(isinstance(c, ast.Call) and _name(c).endswith("atomic_file") for c in calls)
    lines = []
    if isinstance(node, ast.Call) and not inside and _writes(node):
        lines.append(node.lineno)
    for child in ast.iter_child_nodes(node):
        lines += _bare_writes(child, inside)
    return lines


def _writes(call: ast.Call) -> bool:
    if _name(call) in ("write_text", "write_bytes"):
        # our own function of that name takes the path as its first argument
        return isinstance(call.func, ast.Attribute)
    if _name(call) in ("save_file", "save_tensors"):
        return True
    modes = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return _name(call) in ("open", "fdopen") and any(set(mode) & set("wax") for mode in modes)


def _name(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""
