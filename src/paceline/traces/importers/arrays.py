"""Arrays in .npy bytes and .npz files, their sizes bounded before anything is allocated."""

from __future__ import annotations

import ast
import math
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from paceline.text import shortened
from paceline.traces.format import TraceError

MAGIC = b"\x93NUMPY"
MAX_ARRAY_BYTES = 1 << 32
"""Of all arrays of a file: a million tokens of 26 layers in wide integers and floats are 1.3 GB."""
ZIP_FAULTS = (
    zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError, RuntimeError,
    ValueError, OverflowError, struct.error, zlib.error,
)  # fmt: skip
"""What zipfile raises for files that are broken in one way or another."""
_BLOCK = 1 << 24
_MAX_DICT, _MAX_MEMBERS = 1 << 16, 1 << 20
_KINDS = "iufbU"


def read_npy(file: IO[bytes], size: int, where: str) -> npt.NDArray[Any]:
    """One array; `size` bytes follow in all.

    Raises:
        TraceError: if it is no array of numbers (or short texts), or another size than it says.
    """
    start = file.read(8)
    if len(start) < 8 or start[:6] != MAGIC or start[6] not in (1, 2, 3):
        raise TraceError(f"{where} is no .npy array.")
    width = 2 if start[6] == 1 else 4
    length = int.from_bytes(file.read(width), "little")
    if length > _MAX_DICT:
        raise TraceError(f"{where} is no .npy array: its header is too long.")
    try:
        said = ast.literal_eval(file.read(length).decode("latin1"))
        shape, order, dtype = said["shape"], said["fortran_order"], np.dtype(said["descr"])
        sizes = tuple(shape)
        counts = all(type(n) is int and n >= 0 for n in sizes)
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        raise TraceError(f"{where} is no .npy array: its header can't be read.") from None
    if not counts or len(sizes) > 8 or dtype.kind not in _KINDS or dtype.hasobject:
        raise TraceError(f"{where} has dtype {dtype} and shape {shape}: expected are numbers.")
    wanted = math.prod(sizes) * dtype.itemsize
    if wanted != size - 8 - width - length or wanted > MAX_ARRAY_BYTES:
        raise TraceError(
            f"{where} says {wanted} bytes of data and has {size - 8 - width - length}: they must "
            f"be the same, at most {MAX_ARRAY_BYTES}."
        )
    data = bytearray(wanted)  # and not bytes, which can't be written to
    view, filled = memoryview(data), 0
    while filled < wanted and (block := file.read(min(_BLOCK, wanted - filled))):
        view[filled : filled + len(block)] = block
        filled += len(block)
    if filled != wanted:
        raise TraceError(f"{where} is cut off.")
    return np.frombuffer(data, dtype).reshape(sizes, order="F" if order else "C")


def read_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    """All arrays of an .npz file.

    Raises:
        TraceError: if it is no such file, or larger inside than allowed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            check_zip(members, str(path))
            found = {}
            for member in members:
                with archive.open(member) as file:
                    name = member.filename.removesuffix(".npy")
                    found[name] = read_npy(file, member.file_size, f"{path}: {name!r}")
            return found
    except ZIP_FAULTS as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(
            f"{path} is no zip file that can be read: {shortened(str(error), 200)}."
        ) from None


def check_zip(members: list[zipfile.ZipInfo], where: str, limit: int = MAX_ARRAY_BYTES) -> None:
    """Refuse a zip file that unpacks to more bytes than allowed."""
    if len(members) > _MAX_MEMBERS:
        raise TraceError(f"{where} has {len(members)} members: allowed are {_MAX_MEMBERS}.")
    total = sum(member.file_size for member in members)
    if total > limit:
        raise TraceError(f"{where} unpacks to {total} bytes: allowed are {limit}.")
