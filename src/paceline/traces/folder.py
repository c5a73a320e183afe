"""The folder that holds a trace: written chunk by chunk, read one chunk at a time.

A writer loses the last chunk at most in a crash. A reader checks everything against the header.
"""

from __future__ import annotations

import re
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from paceline.files import atomic_file, save_tensors
from paceline.text import shortened
from paceline.traces.chunk import FACTS, PER_CHOICE, Chunk
from paceline.traces.format import (
    CHUNK_KEY,
    HEADER,
    MAX_CHUNK_BYTES,
    MAX_HEADER_BYTES,
    MODALITIES,
    PHASES,
    UNKNOWN,
    Header,
    Layer,
    TraceError,
    chunk_name,
    read_header,
)  # fmt: skip
from paceline.traces.trace import LazyChunks, Trace

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


class TraceWriter:
    """A writer of chunks into a new folder, which its owner alone can read; a context manager.

    A chunk gets its name only when it is whole and on disk, so that what is there can be read
    whatever happens next. Leaving the context marks the trace as finished, unless by an error.

    Args:
        folder: to be made; an empty one is taken.
        header: of the trace; identity and time are filled in.

    Raises:
        TraceError: if the folder can't be made, or is not empty.

    >>> from pathlib import Path; from tempfile import TemporaryDirectory
    >>> from paceline.traces import sample
    >>> trace = sample("esft_v2lite_law")
    >>> with TemporaryDirectory() as folder:
    ...     with TraceWriter(Path(folder) / "copy", trace.header) as writer:
    ...         for chunk in trace.chunks:
    ...             writer.add(chunk)
    ...     print(writer.chunks)
    1
    """

    def __init__(self, folder: Path, header: Header) -> None:
        self.folder = folder
        self.chunks = 0
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.header = header.model_copy(
            update={"identity": secrets.token_hex(8), "created": header.created or created}
        )
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if any(folder.iterdir()):
                raise TraceError(f"{folder} is not empty: a trace goes into a new folder.")
            self._write_header()
        except OSError as error:
            raise TraceError(f"{folder} can't be written: {error.strerror}.") from None

    def add(self, chunk: Chunk) -> None:
        """Write a chunk of whole batches.

        Raises:
            TraceError: if it can't be written, or is larger than a reader takes.
        """
        tensors = {name: tensor.contiguous() for name, tensor in chunk.tensors().items()}
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if size > MAX_CHUNK_BYTES - MAX_HEADER_BYTES:
            raise TraceError(
                f"{self.folder}: a chunk must have at most {MAX_CHUNK_BYTES} bytes, got {size}: "
                "batches must be smaller, or of choices instead of scores."
            )
        metadata = {CHUNK_KEY: self.header.identity, "chunk": str(self.chunks)}
        with self._atomic_file(chunk_name(self.chunks)) as file:
            save_tensors(tensors, file, metadata)
        self.chunks += 1

    def describe(self, layers: Sequence[Layer]) -> None:
        """Replace the layers of the header, once more is known of them."""
        self.header = self.header.model_copy(update={"layers": tuple(layers)})
        self._write_header()

    def finish(self) -> None:
        """Mark the trace as finished in its header."""
        self.header = self.header.model_copy(update={"chunks": self.chunks})
        self._write_header()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()

    def _write_header(self) -> None:
        text = self.header.model_dump_json(indent=1) + "\n"
        with self._atomic_file(HEADER) as file:
            file.write_text(text, encoding="utf-8")

    @contextmanager
    def _atomic_file(self, name: str) -> Iterator[Path]:
        """Write a file of the trace; an error names it."""
        try:
            with atomic_file(self.folder / name) as file:
                yield file
        except OSError as error:
            reason = error.strerror or error
            raise TraceError(f"{self.folder / name} can't be written: {reason}.") from None


def save_trace(
    trace: Trace, folder: Path, progress: Callable[[int, int, str], None] | None = None
) -> tuple[int, int]:
    """Write a whole trace, an imported one for example, in Paceline's own format.

    Args:
        progress: called with chunks written, about how many in all, and batches so far.

    Returns:
        Number of batches and tokens.

    Raises:
        TraceError: if the folder can't be written.

    >>> from pathlib import Path; from tempfile import TemporaryDirectory
    >>> from paceline.traces import open_trace, sample
    >>> with TemporaryDirectory() as folder:
    ...     print(save_trace(sample("esft_v2lite_law"), Path(folder) / "copy"))
    ...     print(open_trace(Path(folder) / "copy").header.content)
    (17, 4096)
    choices
    """
    batches = tokens = 0
    with TraceWriter(folder, trace.header) as writer:
        for chunk in trace.chunks:
            writer.add(chunk)
            batches, tokens = batches + chunk.batches, tokens + chunk.tokens
            if progress is not None:
                total = max(writer.chunks, len(trace.chunks))
                progress(writer.chunks, total, f"{batches:,} batches")
    return batches, tokens


def read_trace(folder: Path) -> Trace:
    """Open a trace folder; its chunks are read when they are gone through.

    Raises:
        TraceError: if the header can't be read, or chunks are missing.
    """
    header = read_header(folder)
    found = sum(1 for path in folder.iterdir() if re.fullmatch(r"chunk-\d{6}\.\w+", path.name))
    count = found if header.chunks is None else header.chunks
    for number in range(count):
        if not (folder / chunk_name(number)).is_file():
            raise TraceError(
                f"{folder} lacks {chunk_name(number)}: chunks must be numbered without a gap."
            )
    if header.per_token and header.k is None and not count:
        raise TraceError(f"{folder} holds nothing yet: recording ended before the first chunk.")
    if header.per_token and header.k is None:
        raise TraceError(f"{folder}/trace.json: layers.k is missing.")
    if header.chunks is None:
        note = "recording was cut off: what had not been written yet is missing"
        header = header.model_copy(update={"notes": (*header.notes, note)})
    chunks = LazyChunks(
        count, lambda: (read_chunk(folder / chunk_name(n), header, n) for n in range(count))
    )
    return Trace(header, chunks, str(folder))


def read_chunk(path: Path, header: Header, number: int) -> Chunk:
    """Read one chunk and check it.

    Raises:
        TraceError: naming the file, the tensor and what is expected.
    """
    tensors = _tensors(path, header.identity, number)
    _Check(path, header, tensors).all()
    return Chunk(**tensors)


def _tensors(path: Path, identity: str, number: int) -> dict[str, Tensor]:
    """Read the tensors of a file, whose sizes safetensors checks against that of the file."""
    from safetensors import SafetensorError, safe_open

    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_CHUNK_BYTES:
            raise TraceError(f"{path} is no plain file of at most {MAX_CHUNK_BYTES} bytes.")
        with path.open("rb") as file:
            if int.from_bytes(file.read(8), "little") > MAX_HEADER_BYTES:
                raise TraceError(f"{path} is no safetensors file: its header is too large.")
        with safe_open(path, framework="pt") as stored:
            stated = stored.metadata() or {}
            if stated.get(CHUNK_KEY) != identity or stated.get("chunk") != str(number):
                raise TraceError(
                    f"{path} is chunk {stated.get('chunk')} of trace {stated.get(CHUNK_KEY)}: "
                    f"expected chunk {number} of {identity}."
                )
            names = list(stored.keys())
            known = {field.name for field in fields(Chunk)}
            if not set(names) <= known:
                extra = sorted(set(names) - known)[0]
                raise TraceError(f"{path} has a tensor {extra!r}, expected {', '.join(_DTYPES)}.")
            return {name: stored.get_tensor(name) for name in names}
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error.strerror or error}.") from None
    except SafetensorError as error:
        raise TraceError(f"{path} is no safetensors file: {shortened(str(error), 200)}.") from None


class _Check:
    """A check of the tensors of a chunk against the header."""

    def __init__(self, path: Path, header: Header, tensors: dict[str, Tensor]) -> None:
        self.path, self.header, self.tensors = path, header, tensors

    def all(self) -> None:
        """Raise TraceError at the first tensor that does not fit."""
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

    def shape(self, name: str, expected: list[int | None]) -> None:
        """Refuse a tensor that is missing or has another shape; None: any size."""
        if name not in self.tensors:
            self.refuse(name, "is missing", f"a tensor {_sizes(expected)}")
        shape = list(self.tensors[name].shape)
        fits = [size in (None, have) for size, have in zip(expected, shape, strict=False)]
        if len(shape) != len(expected) or not all(fits):
            self.refuse(name, f"has shape {shape}", _sizes(expected))

    def codes(self, name: str, count: int, column: int | None = None) -> None:
        """Refuse codes, of one column or of all, that name nothing."""
        if name in self.tensors:
            codes = self.tensors[name]
            codes = codes if column is None else codes[:, column]
            if bool(((codes >= count) & (codes != UNKNOWN)).any()):
                self.refuse(name, f"has a code above {count - 1}", f"0 to {count - 1} or {UNKNOWN}")

    def refuse(self, name: str, found: str, expected: str) -> None:
        """Raise for one tensor."""
        raise TraceError(f"{self.path}: {name} {found}, expected {expected}.")


def _sizes(sizes: list[int | None]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in sizes) + "]"
