"""Read a trace folder: one chunk in memory at a time, everything checked against the header."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from paceline.text import shortened
from paceline.traces.chunk import FACTS, PER_CHOICE, Chunk
from paceline.traces.format import (
    CHUNK_KEY,
    MAX_CHUNK_BYTES,
    MAX_HEADER_BYTES,
    MODALITIES,
    PHASES,
    UNKNOWN,
    Header,
    TraceError,
    chunk_name,
    read_header,
)
from paceline.traces.trace import Trace

_IDS = (torch.uint8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "starts": (torch.int64,),
    "ids": _IDS,
    "weights": _FLOATS,
    "topk_scores": _FLOATS,
    "scores": _FLOATS,
    "valid": (torch.bool,),
    "phase": (torch.uint8,),
    "modality": (torch.uint8,),
    "request": (torch.int64,),
    "source": (torch.int32,),
    "priority": (torch.int8,),
    "counts": (torch.int32, torch.int64, torch.float64),
    "group_codes": (torch.uint8,),
    "rows": (torch.int64,),
}


def read_trace(folder: Path) -> Trace:
    """A trace folder; its chunks are read when gone through.

    Raises:
        TraceError: if the header can't be read, or chunks are missing.
    """
    header = read_header(folder)
    found = sum(1 for path in folder.iterdir() if re.fullmatch(r"chunk-\d{6}\.\w+", path.name))
    wanted = found if header.chunks is None else header.chunks
    for number in range(wanted):
        if not (folder / chunk_name(number)).is_file():
            raise TraceError(f"{folder} lacks {chunk_name(number)}: allowed is every one in turn.")
    if header.per_token and header.k is None and not wanted:
        raise TraceError(f"{folder} holds nothing yet: recording ended before the first chunk.")
    if header.per_token and header.k is None:
        raise TraceError(f"{folder}/trace.json: layers.k is missing: expected is a number.")
    if header.chunks is None:
        note = "recording was cut off: what had not been written yet is missing"
        header = header.model_copy(update={"notes": (*header.notes, note)})
    return Trace(header, _Stored(folder, header, wanted), str(folder))


class _Stored:
    """The chunks of a folder, read one by one."""

    def __init__(self, folder: Path, header: Header, count: int) -> None:
        self._folder, self._header, self._count = folder, header, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Chunk]:
        for number in range(self._count):
            yield read_chunk(self._folder / chunk_name(number), self._header, number)


def read_chunk(path: Path, header: Header, number: int) -> Chunk:
    """One chunk, checked.

    Raises:
        TraceError: naming the file, the tensor and what is expected.
    """
    tensors = _tensors(path, header.identity, number)
    _Check(path, header, tensors).all()
    return Chunk(**tensors)


def _tensors(path: Path, identity: str, number: int) -> dict[str, Tensor]:
    """The tensors of a file whose sizes were checked by its own header (never above the file's)."""
    from safetensors import SafetensorError, safe_open

    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_CHUNK_BYTES:
            raise TraceError(f"{path} is no plain file of at most {MAX_CHUNK_BYTES} bytes.")
        with path.open("rb") as file:
            if int.from_bytes(file.read(8), "little") > MAX_HEADER_BYTES:
                raise TraceError(f"{path} is no safetensors file: its header is too large.")
        with safe_open(path, framework="pt") as stored:
            said = stored.metadata() or {}
            if said.get(CHUNK_KEY) != identity or said.get("chunk") != str(number):
                raise TraceError(
                    f"{path} is chunk {said.get('chunk')} of trace {said.get(CHUNK_KEY)}: expected "
                    f"is chunk {number} of {identity}."
                )
            names = list(stored.keys())
            known = {field.name for field in fields(Chunk)}
            if not set(names) <= known:
                extra = sorted(set(names) - known)[0]
                raise TraceError(
                    f"{path} has a tensor {extra!r}: allowed are {', '.join(_DTYPES)}."
                )
            return {name: stored.get_tensor(name) for name in names}
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error.strerror or error}.") from None
    except SafetensorError as error:
        raise TraceError(f"{path} is no safetensors file: {shortened(str(error), 200)}.") from None


class _Check:
    """Whether the tensors of a chunk are what its header says."""

    def __init__(self, path: Path, header: Header, tensors: dict[str, Tensor]) -> None:
        self.path, self.header, self.tensors = path, header, tensors

    def all(self) -> None:
        """Raise TraceError at the first tensor that isn't."""
        header, tensors = self.header, self.tensors
        for name, tensor in tensors.items():
            allowed = _DTYPES[name]
            if tensor.dtype not in allowed:
                expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
                self.refuse(name, f"has dtype {tensor.dtype}", expected)
        self.shape("starts", [None])
        if tensors["starts"].shape[0] < 1:
            self.refuse("starts", "is empty", "[batches + 1]")
        layers = len(header.layers)
        if header.per_token:
            self.shape("ids", [layers, None, header.k])
            self._tokens(layers, tensors["ids"].shape[1])
            if header.content == "scores" and "scores" not in tensors:
                self.refuse("scores", "is missing", "the scores of all experts")
        else:
            self._counts(layers)

    def _tokens(self, layers: int, tokens: int) -> None:
        header, tensors = self.header, self.tensors
        starts = tensors["starts"]
        if starts[0] != 0 or starts[-1] != tokens or bool((starts.diff() < 0).any()):
            self.refuse("starts", "is out of order", f"0 to {tokens}, ascending")
        for name in PER_CHOICE[1:]:
            width = header.experts if name == "scores" else header.k
            if name in tensors:
                self.shape(name, [layers, tokens, width])
        for name in FACTS:
            if name in tensors:
                per_layer = tensors[name].dim() == 2
                self.shape(name, [layers, tokens] if per_layer else [tokens])
        for layer, described in enumerate(header.layers):
            ids = tensors["ids"][layer]
            highest = int(ids.max()) if ids.numel() else 0
            if highest > described.experts:
                self.refuse(
                    "ids", f"names expert {highest} of {described.name}",
                    f"0 to {described.experts - 1}, or {described.experts} for none",
                )  # fmt: skip
        self.codes("phase", len(PHASES))
        self.codes("modality", len(MODALITIES))

    def _counts(self, layers: int) -> None:
        header, tensors = self.header, self.tensors
        batches = tensors["starts"].shape[0] - 1
        self.shape("group_codes", [None, 2])
        self.codes("group_codes", len(PHASES), column=0)
        self.codes("group_codes", len(MODALITIES), column=1)
        groups = tensors["group_codes"].shape[0]
        self.shape("counts", [batches, layers, groups, header.experts])
        if "rows" in tensors:
            self.shape("rows", [batches, layers, groups])
        shares = tensors["counts"].is_floating_point()
        if shares != (header.content == "shares"):
            self.refuse("counts", f"has dtype {tensors['counts'].dtype}", header.content)
        for name in ("counts", "rows"):
            if name in tensors and tensors[name].numel() and not bool((tensors[name] >= 0).all()):
                self.refuse(name, "has negative values", "0 or more")

    def shape(self, name: str, wanted: list[int | None]) -> None:
        """Refuse a tensor that is missing or has another shape; None: any size."""
        if name not in self.tensors:
            self.refuse(name, "is missing", f"a tensor {_sizes(wanted)}")
        shape = list(self.tensors[name].shape)
        fits = [want in (None, have) for want, have in zip(wanted, shape, strict=False)]
        if len(shape) != len(wanted) or not all(fits):
            self.refuse(name, f"has shape {shape}", _sizes(wanted))

    def codes(self, name: str, count: int, column: int | None = None) -> None:
        """Refuse codes, of one column where that is said, that name nothing."""
        if name in self.tensors:
            codes = self.tensors[name]
            codes = codes if column is None else codes[:, column]
            if bool(((codes >= count) & (codes != UNKNOWN)).any()):
                self.refuse(name, f"has a code above {count - 1}", f"0 to {count - 1} or {UNKNOWN}")

    def refuse(self, name: str, found: str, expected: str) -> None:
        """Raise for one tensor."""
        raise TraceError(f"{self.path}: {name} {found}, expected is {expected}.")


def _sizes(wanted: list[int | None]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in wanted) + "]"
