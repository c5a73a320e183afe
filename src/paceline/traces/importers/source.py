"""A file or folder to import: its bounded content, and facts that the user states about it."""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.model_config import read_model_config
from paceline.traces.format import MAX_EXPERTS, MAX_LAYERS, TraceError, seen

ZIP_FAULTS = (
    zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError, RuntimeError,
    ValueError, OverflowError, struct.error, zlib.error,
)  # fmt: skip
"""Errors that zipfile raises for broken files."""
MAX_TEXT_BYTES = 1 << 30
_MAX_JSON_BYTES, _MAX_LINE, _START = 1 << 28, 1 << 26, 1 << 16
_MAX_MEMBERS = 1 << 20
_LIMITS = {"experts": MAX_EXPERTS, "k": MAX_EXPERTS, "layers": MAX_LAYERS, "world_size": 1 << 20}
_LACKING = {
    "experts": "the number of experts per layer",
    "k": "the number of experts per token",
    "layers": "the number of hidden layers",
}


@dataclass(frozen=True)
class ImportOptions:
    """Facts about the model and the run behind a file that the file itself may not state.

    Attributes:
        layers: hidden layers of the model, dense ones included.
        world_size: how often every assignment was counted.
        physical: keep the engine's physical slots as experts instead of mapping them to logical
            experts.

    Raises:
        ValueError: if a number is out of range, or k is above experts.

    >>> ImportOptions(experts=64, k=6).experts
    64
    """

    experts: int | None = None
    k: int | None = None
    layers: int | None = None
    world_size: int | None = None
    physical: bool = False

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= limit:
                raise ValueError(f"{name} must be from 1 to {limit}, got {value}.")
        if self.k is not None and self.experts is not None and self.k > self.experts:
            raise ValueError(f"k must be at most experts={self.experts}, got {self.k}.")

    def with_config(self, path: Path) -> ImportOptions:
        """Fill in what is missing from a model's config.json (the file, or the model's folder).

        Raises:
            TraceError: if it can't be read.
        """
        try:
            config = read_model_config(path)
            experts = self.experts or config.experts
            k = self.k or config.experts_per_token
            return replace(self, experts=experts, k=k, layers=self.layers or config.hidden_layers)
        except ValueError as error:
            raise TraceError(str(error)) from None


class Source:
    """A file or folder that importers look at; content is read on first use.

    Args:
        options: facts that the user states about it.
        where: name in messages; the path by default.

    >>> Source(Path("counts.json"), ImportOptions(experts=8)).require("experts")
    8
    """

    def __init__(self, path: Path, options: ImportOptions, where: str | None = None) -> None:
        self.path, self.options = path, options
        self.where = str(path) if where is None else where
        self.remarks: list[str] = []
        """What was left out of the file so far, for the notes of its trace."""

    # -- facts stated by the user ------------------------------------------------------------------

    def require(self, name: str) -> int:
        """Return an option that the file does not state.

        Raises:
            TraceError: if it was not given.
        """
        value: int | None = getattr(self.options, name)
        if value is None:
            raise TraceError(
                f"{self.where} doesn't state {_LACKING[name]}: give --{name}, or --model-config "
                "with the model's config.json."
            )
        return value

    def agree(self, name: str, found: int) -> int:
        """Return a fact that the file states.

        Raises:
            TraceError: if it contradicts the option.
        """
        given = getattr(self.options, name)
        if given is not None and given != found:
            raise TraceError(f"{self.where} has {name}={found}, but {name}={given} was given.")
        return found

    # -- what the file holds -----------------------------------------------------------------------

    @cached_property
    def files(self) -> list[Source]:
        """The plain files of a folder in order of their names; of a file, itself."""
        if not self.path.is_dir():
            return [self]
        return [Source(self.path / name, self.options) for name in self.names
                if (self.path / name).is_file()]  # fmt: skip

    @cached_property
    def names(self) -> list[str]:
        """Names of what is in a folder, hidden files left out; empty for a file."""
        if not self.path.is_dir():
            return []
        return sorted(path.name for path in self.path.iterdir() if not path.name.startswith("."))

    @cached_property
    def start(self) -> bytes:
        """First bytes of a file; empty for a folder."""
        if self.path.is_dir():
            return b""
        with self.path.open("rb") as file:
            return file.read(_START)

    @cached_property
    def text(self) -> str:
        """The start of a text file; empty where it is no UTF-8."""
        try:
            strict = "strict" if len(self.start) < _START else "ignore"
            return self.start.decode("utf-8-sig", strict)
        except UnicodeDecodeError:
            return ""

    @property
    def first_line(self) -> str:
        """First line of a text, without blanks around it."""
        return self.text.split("\n", 1)[0].strip()

    @property
    def looks_like_json(self) -> bool:
        """Return True if a text begins like a JSON object or list."""
        return self.first_line.startswith(("{", "["))

    @cached_property
    def first_row(self) -> Any:
        """The first line of JSON lines, decoded; None where it is no JSON."""
        if not self.looks_like_json:
            return None
        with self.path.open("rb") as file:
            return _decoded(file.readline(_MAX_JSON_BYTES))

    @cached_property
    def json(self) -> Any:
        """Decoded JSON, or the list of the JSON lines of a file; None where it is neither.

        Raises:
            TraceError: if the file is larger than allowed.
        """
        if not self.looks_like_json:
            return None
        size = self.path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise TraceError(
                f"{self.path} must have at most {_MAX_JSON_BYTES} bytes for JSON, got {size}."
            )
        data = _decoded(self.path.read_bytes())
        if data is None and self.first_row is not None:
            lines = list(self.lines())
            rows = [_decoded(line.encode()) for _, line in lines]
            if rows[-1] is None and len(rows) > 1 and not lines[-1][1].endswith("\n"):
                rows.pop()
                self._cut_off(lines[-1][0])
            return None if any(row is None for row in rows) else rows
        return data

    @cached_property
    def zip_names(self) -> list[str]:
        """Names of the members of a zip file; empty for any other.

        Raises:
            TraceError: if the zip file is broken.
        """
        if not self.start.startswith(b"PK\x03\x04"):
            return []
        try:
            with zipfile.ZipFile(self.path) as archive:
                return archive.namelist()
        except ZIP_FAULTS:
            raise TraceError(f"{self.path} is a zip file that is cut off or broken.") from None

    def lines(self) -> Iterator[tuple[int, str]]:
        """Iterate over number, from 1, and text of each line that isn't empty.

        Raises:
            TraceError: if the file is too large, or no text.
        """
        path = self.path
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise TraceError(f"{path} is larger than the {MAX_TEXT_BYTES} bytes that are allowed.")
        try:
            with path.open(encoding="utf-8-sig") as file:
                number = 0
                while line := file.readline(_MAX_LINE):
                    number += 1
                    if len(line) >= _MAX_LINE:
                        raise TraceError(
                            f"{path}, line {number} is longer than {_MAX_LINE} characters."
                        )
                    if line.strip():
                        yield number, line
        except UnicodeDecodeError:
            raise TraceError(f"{path} is no UTF-8 text.") from None

    def each_line(self, parse: Callable[[str, str], None]) -> None:
        """Call `parse(line, place)` on each line that isn't empty.

        A last line without an end that can't be parsed was cut off: it is left out, and noted.

        Raises:
            TraceError: as `parse` does.
        """
        for number, line in self.lines():
            try:
                parse(line, f"{self.path}, line {number}")
            except TraceError:
                if number == 1 or line.endswith("\n"):
                    raise
                self._cut_off(number)

    def _cut_off(self, number: int) -> None:
        self.remarks.append(f"line {number}, the last, is cut off and left out")


def check_zip(members: list[zipfile.ZipInfo], where: str, limit: int) -> None:
    """Refuse a zip file that unpacks to more bytes than allowed."""
    if len(members) > _MAX_MEMBERS:
        raise TraceError(f"{where} must have at most {_MAX_MEMBERS} members, got {len(members)}.")
    total = sum(member.file_size for member in members)
    if total > limit:
        raise TraceError(f"{where} must unpack to at most {limit} bytes, got {total}.")


def whole_number(value: Any, field: str, where: str, least: int = 0, below: int = 1 << 40) -> int:
    """Return a whole number of decoded JSON.

    Raises:
        TraceError: naming the field, if it is none, or out of range.
    """
    if type(value) is not int or not least <= value < below:
        raise TraceError(f"{where}: {field}={seen(value)} is no whole number from {least} on.")
    return value


def whole_numbers(texts: list[str], count: int | None, where: str) -> list[int]:
    """Return the whole numbers in the fields of a line, `count` of them where that is given.

    Raises:
        TraceError: if one is none, or there are more or fewer.
    """
    stripped = [text.strip() for text in texts]
    fine = all(text.isascii() and text.isdigit() and len(text) < 18 for text in stripped)
    if not fine or count not in (None, len(texts)):
        raise TraceError(f"{where}: {seen(','.join(texts))} are no {count or 'whole'} numbers.")
    return [int(text) for text in stripped]


def _decoded(raw: bytes) -> Any:
    """Decode JSON; None where it is none."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None
