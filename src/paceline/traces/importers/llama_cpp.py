"""llama.cpp's importance matrix in GGUF with counts of every expert, and a patch's CSV of choices.

GGUF is read here rather than with a library, so that every length is checked against the file
before anything is made of it. Layout: docs/gguf.md of ggml-org/ggml. The CSV has a row
layer_id,expert_ids per token and layer, with the ids by space.
"""

from __future__ import annotations

import mmap
import re
from array import array
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.traces.format import TraceError
from paceline.traces.importers.source import Source, whole_numbers
from paceline.traces.importers.to_trace import even, from_choices, from_counts, layer_names
from paceline.traces.trace import Trace

_MAGIC, _CSV_HEADER = b"GGUF", "layer_id,expert_ids"
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _F32 = 8, 9, 0
_MOST = 1 << 20  # tensors, keys, or elements of an array of texts
_COUNTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.weight\.counts")


def matches(source: Source) -> bool:
    """Check for a GGUF file, or the header of the CSV."""
    return source.start.startswith(_MAGIC) or source.first_line == _CSV_HEADER


def read(source: Source) -> Trace:
    """Read expert counts of an imatrix, or each token's experts.

    Raises:
        TraceError: if the file is no such GGUF, has no experts, or a row can't be read.
    """
    return _imatrix(source) if source.start.startswith(_MAGIC) else _choices(source)


def _imatrix(source: Source) -> Trace:
    """Read one of gate, up, down and gate_up (merged), which hold the same counts."""
    path = source.path
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        tensors = _Header(data, str(path)).tensors()
        found: dict[int, dict[str, npt.NDArray[np.float32]]] = {}
        for name, (shape, kind, offset) in tensors.items():
            if (match := _COUNTS.fullmatch(name)) is None:
                continue
            count = int(np.prod(shape, dtype=object))
            if kind != _F32 or count > _MOST or offset + 4 * count > len(data):
                raise TraceError(f"{path}: {name} is no F32 tensor inside the file.")
            values = np.frombuffer(data, "<f4", count, offset).copy()
            found.setdefault(int(match[1]), {})[match[2]] = values
    if not found:
        raise TraceError(
            f"{path} holds no load table: it is a GGUF without counts of experts "
            "(blk.N.ffn_gate_exps.weight.counts of an imatrix)."
        )
    notes, rows = ["gate, up and down hold the same counts: one of them is read"], []
    for layer in sorted(found):
        kinds = found[layer]
        chosen = kinds.get("gate", next(iter(kinds.values())))
        if any(not np.array_equal(chosen, other) for other in kinds.values()):
            raise TraceError(f"{path}: gate, up and down of layer {layer} have other counts.")
        rows.append(chosen)
    if len({len(row) for row in rows}) > 1:
        raise TraceError(f"{path}: its layers have several numbers of experts.")
    source.agree("experts", len(rows[0]))
    return from_counts(
        source, np.stack(rows).astype(np.float64)[None], layer_names(sorted(found)),
        program="llama.cpp imatrix", batches="file", notes=notes,
    )  # fmt: skip


def _choices(source: Source) -> Trace:
    """Read the rows of every layer; a header inside the file begins another batch."""
    experts, k = source.require("experts"), 0
    parts: list[dict[int, array[int]]] = []

    def parse(line: str, place: str) -> None:
        nonlocal k
        if line.strip() == _CSV_HEADER:
            parts.append(defaultdict(lambda: array("q")))  # flat: there may be millions
            return
        layer, _, ids = line.rstrip("\r\n").partition(",")
        number, chosen = (
            whole_numbers([layer], 1, place)[0],
            whole_numbers(ids.split(" "), None, place),
        )
        k = k or len(chosen)
        if len(chosen) != k:
            raise TraceError(f"{place} must have {k} ids, got {len(chosen)}.")
        parts[-1][number].extend(chosen)

    source.each_line(parse)
    parts = [part for part in parts if part]
    if not parts:
        raise TraceError(f"{source.path} has no rows.")
    indices, notes = sorted(set().union(*parts)), ["in the order of the file; no weights"]
    notes.append(
        "a header inside the file begins a batch" if len(parts) > 1 else "batches are unknown"
    )
    tables = []
    for part in parts:
        table, uneven = even({index: part.get(index, ()) for index in indices}, k)
        tables.append(table)
        notes += [note for note in uneven if note not in notes]
    return from_choices(
        source, np.concatenate(tables, 1), layer_names(indices),
        program="llama.cpp CSV of choices", experts=experts,
        starts=np.cumsum([0, *(table.shape[1] for table in tables)]), batches="file", notes=notes,
    )  # fmt: skip


class _Header:
    """The header of a GGUF file, walked through once."""

    def __init__(self, data: mmap.mmap, where: str) -> None:
        self._data, self._where, self._at = data, where, 4
        version = self._number(4)
        if data[:4] != _MAGIC or version not in (2, 3):
            raise TraceError(f"{where} is no GGUF of version 2 or 3.")

    def tensors(self) -> dict[str, tuple[list[int], int, int]]:
        """Read name -> shape, type and place in the file."""
        tensors, keys = self._count(), self._count()
        alignment = 32
        for _ in range(keys):
            name, value = self._text(), self._value(self._number(4))
            if name == "general.alignment":
                alignment = value
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16:
            raise TraceError(f"{self._where} has an alignment that can't be.")
        found = {}
        for _ in range(tensors):
            name, axes = self._text(), self._number(4)
            if axes > 8:
                raise TraceError(f"{self._where}: a tensor has {axes} axes.")
            shape = [self._number(8) for _ in range(axes)]
            found[name] = (shape, self._number(4), self._number(8))
        base = -(-self._at // alignment) * alignment
        return {name: (shape, kind, base + at) for name, (shape, kind, at) in found.items()}

    def _take(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise TraceError(f"{self._where} is cut off, or states an impossible length.")
        return self._data[start : self._at]

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _count(self) -> int:
        count = self._number(8)
        if count > _MOST:
            raise TraceError(f"{self._where} must have at most {_MOST} entries, got {count}.")
        return count

    def _text(self) -> str:
        length = self._number(8)
        if length > 1 << 24:
            raise TraceError(f"{self._where} has a text of {length} bytes.")
        return self._take(length).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            inner, count = self._number(4), self._count()
            if inner == _ARRAY:
                raise TraceError(f"{self._where} has arrays in arrays.")
            if inner == _STRING:
                for _ in range(count):
                    self._text()
            else:
                self._take(count * self._size(inner))
            return None
        return self._number(self._size(kind))

    def _size(self, kind: int) -> int:
        if kind not in _SIZES:
            raise TraceError(f"{self._where} has a value of unknown type {kind}.")
        return _SIZES[kind]
