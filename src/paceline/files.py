"""Read plain files of a bounded size; write files atomically, even if the process is killed."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_TEXT = 1 << 30
"""Bytes of a text or of prompts; settings are far smaller."""
MOST_SETTINGS = 1 << 24
"""Bytes of a plan, a config, a description of hardware."""


def read_plain(path: Path, limit: int, *, pipes: bool = False) -> bytes:
    """Read a whole file from an untrusted source.

    Pipes and devices are refused: reading one may never end.

    Args:
        limit: bytes that it may have.
        pipes: True to read a pipe too, as a shell makes one of `<(command)`.

    Raises:
        ValueError: if it is no plain file, or too large; "it is ...", without the path.
        OSError: if it can't be read.
    """
    status = path.stat()
    pipe = pipes and stat.S_ISFIFO(status.st_mode)
    if not (pipe or stat.S_ISREG(status.st_mode)):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no plain file"
        raise ValueError(f"it is {kind}")
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return content


@contextmanager
def atomic_file(path: Path, *, private: bool = True) -> Iterator[Path]:
    """Yield a file to write, which replaces `path` when the block ends without an error.

    It is on the disk by then, so that a power failure leaves no half file either.

    Args:
        path: to replace or create; its folder must exist.
        private: True: readable by its owner only; False: as the process creates files.

    Raises:
        OSError: if the folder can't be written.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     with atomic_file(Path(folder) / "a") as file:
        ...         _ = file.write_text("b")
        ...     print((Path(folder) / "a").read_text())
        b
    """
    # made 0600; a killed process leaves it behind, under a name that no reader looks for
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    made = Path(name)
    try:
        yield made
        made.chmod(0o600 if private else 0o666 & ~_umask())
        _to_disk(made)
        made.replace(path)
        _to_disk(path.parent)
    except BaseException as error:
        made.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename in (None, name):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def try_file(path: Path) -> None:
    """Check that `atomic_file` could write a file, with an empty one that is removed at once.

    Raises:
        OSError: if its folder is missing or can't be written.
        ValueError: if there is a folder or a device of that name; "it is ...", without the path.
    """
    if path.is_dir():
        raise ValueError("it is a folder")
    if path.exists() and not path.is_file():  # replacing a device such as /dev/null would remove it
        raise ValueError("it is no plain file")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"there is no folder {path.parent}")
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    os.unlink(name)


def write_text(path: Path, text: str, *, private: bool) -> None:
    """Replace `path` by `text`, as `atomic_file` does.

    Raises:
        OSError: if the folder can't be written.
    """
    with atomic_file(path, private=private) as file:
        file.write_text(text, encoding="utf-8")


def save_tensors(tensors: dict[str, Any], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file, in a place that nothing reads yet.

    Raises:
        OSError: naming the file, if it can't be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # the system's message is in its text alone
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None


def to_json(data: Any) -> str:
    """Write data as indented, strictly valid JSON (no NaN)."""
    return json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current
