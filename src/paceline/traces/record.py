"""Record the routing of an attached model while it runs, into a trace folder.

Counts alone by default: per-token choices let a reader guess at the text (arXiv 2602.04105).
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

from torch import Tensor

from paceline.facts import Facts
from paceline.routing import Assignment, RoutingInputs
from paceline.traces.folder import TraceWriter
from paceline.traces.format import Header, Layer, TraceError
from paceline.traces.recorded_forward import Forward, Recorded, chunk_of

Recording = Literal["counts", "choices", "scores"]

CHUNK_BYTES, CHUNK_SECONDS = 64 << 20, 30.0
"""Size in bytes and age in seconds from which a chunk is written when a forward ends."""


class Watched(Protocol):
    """An attached model, as `paceline.attach` returns it."""

    @property
    def layers(self) -> list[str]: ...

    @property
    def context(self) -> Any: ...

    def stats(self) -> Any: ...

    def watch(
        self, watcher: Callable[[str, RoutingInputs, Assignment], None], facts: Facts
    ) -> Callable[[], None]: ...


class RecordingStoppedWarning(UserWarning):
    """A warning that nothing is recorded any more; the model runs on."""


class Recorder:
    """A recording of every forward of an attached model until `close`; a context manager.

    A forward is a batch of the trace; forwards of several threads are kept apart. In memory are the
    running forwards and one chunk. Copying to the host waits for the device, so that a model on an
    accelerator runs slower while it is recorded.

    Args:
        pace: what `paceline.attach` returned, still attached.
        folder: for the trace, to be made.
        content: "counts" (loads by phase and modality), "choices" (each token's experts, weights,
            their gate scores) or "scores" (those, and the gate scores of all experts).
        model: name of the model, for the header.
        source: program that records, for the header.
        chunk_bytes: size from which a chunk is written.
        chunk_seconds: age from which a chunk is written: at most this much is lost in a crash.

    Raises:
        TraceError: if the folder can't be made.

    >>> from pathlib import Path; from tempfile import TemporaryDirectory
    >>> from paceline import attach
    >>> from paceline.demo.assets import load_model
    >>> from paceline.traces import open_trace
    >>> model, tokenizer = load_model()
    >>> with TemporaryDirectory() as folder, attach(model) as pace:
    ...     with Recorder(pace, Path(folder) / "trace"):
    ...         _ = model(**tokenizer("Experts of the world", return_tensors="pt"))
    ...     print(open_trace(Path(folder) / "trace").header.content)
    counts
    """

    def __init__(
        self,
        pace: Watched,
        folder: Path,
        content: Recording = "counts",
        *,
        model: str | None = None,
        source: str = "paceline record",
        chunk_bytes: int = CHUNK_BYTES,
        chunk_seconds: float = CHUNK_SECONDS,
    ) -> None:
        if content not in ("counts", "choices", "scores"):
            raise ValueError(f'content must be "counts", "choices" or "scores", got {content!r}.')
        self._pace, self._content = pace, content
        self._limits = chunk_bytes, chunk_seconds
        experts = [len(layer.expert_loads_before) for layer in pace.stats().layers]
        layers = tuple(
            Layer(name=name, experts=count)
            for name, count in zip(pace.layers, experts, strict=True)
        )
        self._layer_of = {name: index for index, name in enumerate(pace.layers)}
        self._writer = TraceWriter(
            folder, Header(content=content, layers=layers, model=model, source=source)
        )
        self._lock = threading.Lock()
        self._open: dict[int, Forward] = {}  # the running forward of each thread
        self._done: list[Recorded] = []
        self._bytes, self._since = 0, time.monotonic()
        self._requests = self._most_requests = 0
        self._error: BaseException | None = None
        self.forwards = 0
        tokens = content != "counts"
        facts = Facts(scores=tokens, request=tokens, source=tokens, decode=True, modality=True)
        self._undo = pace.watch(self._see, facts)

    def next_requests(self) -> None:
        """Label rows of later batches as other requests than those of earlier ones."""
        with self._lock:
            self._finish_forwards()
            self._requests = self._most_requests

    def close(self) -> None:
        """End the recording and finish the trace. Idempotent.

        Raises:
            TraceError: if something couldn't be written; what was before is there.
        """
        self._undo()
        with self._lock:
            if self._error is None and self._writer.header.chunks is None:
                self._guarded(self._finish_all)
        if self._error is not None:
            raise self._error

    def _finish_all(self) -> None:
        self._finish_forwards()
        self._write_chunk()
        self._writer.finish()

    def _see(self, name: str, inputs: RoutingInputs, assignment: Assignment) -> None:
        """Record one layer of one forward; never raise an error into the model."""
        with self._lock:
            if self._error is None:
                self._guarded(lambda: self._add(name, inputs))

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a step; on an error warn, and record nothing from here on."""
        try:
            step()
        except Exception as error:
            self._error = error
            self._open, self._done = {}, []
            warnings.warn(
                f"recording into {self._writer.folder} has stopped: {error}",
                RecordingStoppedWarning,
                stacklevel=2,
            )

    def _add(self, name: str, inputs: RoutingInputs) -> None:
        thread, layer = threading.get_ident(), self._layer_of[name]
        running = self._open.get(thread)
        if running is None or running.has(layer):
            if running is not None:
                self._end(running)
            running = self._open[thread] = Forward(len(self._layer_of), self._content)
            self._flush_if_due()
        context = self._pace.context
        rows = inputs.topk_ids.shape[0]
        modality: dict[str, Tensor] | None = None
        if context is not None:
            modality = context.modality_of(rows, name)
        running.add(layer, inputs, modality, known=context is not None)

    def _finish_forwards(self) -> None:
        for running in self._open.values():
            self._end(running)
        self._open = {}

    def _end(self, running: Forward) -> None:
        recorded = running.recorded(self._requests)
        self._most_requests = max(self._most_requests, recorded.requests)
        self._done.append(recorded)
        self._bytes += recorded.bytes
        self.forwards += 1

    def _flush_if_due(self) -> None:
        most, age = self._limits
        if self._bytes >= most or time.monotonic() - self._since >= age:
            self._write_chunk()

    def _write_chunk(self) -> None:
        self._since = time.monotonic()
        if not self._done:
            return
        for forward in self._done:
            self._learn(forward.ks)
        self._writer.add(chunk_of(self._done, self._writer.header))
        self._done, self._bytes = [], 0

    def _learn(self, ks: Sequence[int | None]) -> None:
        """Put experts per token of each layer into the header."""
        layers = self._writer.header.layers
        if all(layer.k is not None for layer in layers):
            return
        most = max(k or 1 for k in ks)  # assumed for a layer that hasn't run yet
        self._writer.describe(
            [
                layer if layer.k is not None else layer.model_copy(update={"k": k or most})
                for layer, k in zip(layers, ks, strict=True)
            ]
        )

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except TraceError:
            if kind is None:  # else the first error says more
                raise
