"""Write a trace folder chunk by chunk: at most the last chunk is lost in a crash."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

from paceline.files import atomic_file, save_tensors
from paceline.traces.chunk import Chunk
from paceline.traces.format import (
    CHUNK_KEY,
    HEADER,
    MAX_CHUNK_BYTES,
    MAX_HEADER_BYTES,
    Header,
    Layer,
    TraceError,
    chunk_name,
)
from paceline.traces.trace import Trace


class TraceWriter:
    """Writes chunks into a new folder, which its owner alone can read.

    A chunk gets its name only when it is whole and on disk, so that what is there can be read
    whatever happens next. A context manager: on leaving it the header says that the trace is
    finished, unless an error ends it.

    Args:
        folder: to be made; an empty one is taken.
        header: of the trace; identity and time are filled in.

    Raises:
        TraceError: if the folder can't be made, or holds something.

    >>> from pathlib import Path; from tempfile import TemporaryDirectory
    >>> from paceline.traces import open_trace, sample
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
                raise TraceError(f"{folder} holds something: a trace goes into a new folder.")
            self._write_header()
        except OSError as error:
            raise TraceError(f"{folder} can't be written: {error.strerror}.") from None

    def add(self, chunk: Chunk) -> None:
        """Append a chunk of whole batches.

        Raises:
            TraceError: if the disk doesn't take it, or it is larger than a reader takes.
        """

        tensors = {name: tensor.contiguous() for name, tensor in chunk.tensors().items()}
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if size > MAX_CHUNK_BYTES - MAX_HEADER_BYTES:
            raise TraceError(
                f"{self.folder}: a chunk has {size} bytes: allowed are {MAX_CHUNK_BYTES}, so "
                "batches must be smaller, or of choices instead of scores."
            )
        metadata = {CHUNK_KEY: self.header.identity, "chunk": str(self.chunks)}
        with self._atomic_file(chunk_name(self.chunks)) as file:
            save_tensors(tensors, file, metadata)
        self.chunks += 1

    def describe(self, layers: Sequence[Layer]) -> None:
        """Say more of the layers than was known at first."""
        self.header = self.header.model_copy(update={"layers": tuple(layers)})
        self._write_header()

    def finish(self) -> None:
        """Say in the header that nothing follows."""
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
        """`atomic_file`, which says which disk doesn't take it."""
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
        trace: to write.
        folder: to be made.
        progress: told chunks written, about how many in all, and batches so far.

    Returns:
        How many batches and tokens it has.

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
