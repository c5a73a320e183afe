"""The file format of a trace: a folder with trace.json and chunks in safetensors.

trace.json is the header, on what was recorded of which layers. Each chunk-NNNNNN.safetensors holds
some whole batches, all layers of them; `Chunk` says which tensors. Nothing is pickled, and every
size is checked against the header before anything of that size is made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.files import read_plain
from paceline.text import shortened

HEADER = "trace.json"
FORMAT, VERSION = "paceline-trace", 1
CHUNK_KEY = "paceline-trace"
"""Key in a chunk's own metadata, with the identity of its trace as the value."""

MODALITIES = ("text", "image", "audio", "video")
"""Names of the codes 0, 1, ... in `modality`."""
PHASES = ("prefill", "decode")
"""Names of the codes 0 and 1 in `phase`."""
UNKNOWN = 255
"""Code of a modality or phase that nobody recorded."""

MAX_HEADER_BYTES = 1 << 24
MAX_CHUNK_BYTES = 1 << 32
MAX_LAYERS, MAX_EXPERTS = 4096, 1 << 20
MAX_CELLS = 1 << 22
"""Layers times experts: what the loads of a single batch may take."""

Content = Literal["counts", "shares", "choices", "scores"]
"""Content of a trace: assignments per expert; shares of them without totals; each token's experts
and weights; those and the scores of all experts."""

BatchIs = Literal["forward", "request", "sample", "window", "file"]
"""Meaning of a batch: only a forward is what one layer really computed together."""


class TraceError(ValueError):
    """A trace that can't be read: one sentence naming the file, the field and what is expected."""


class Layer(BaseModel):
    """One Mixture-of-Experts layer of a trace.

    Attributes:
        name: as the model or the file names it.
        k: experts per token; None where nobody stated it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(max_length=1024, pattern=r"^[^\x00-\x1f]*$")
    experts: int = Field(ge=1, le=MAX_EXPERTS)
    k: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _k_fits(self) -> Layer:
        if self.k is not None and self.k > self.experts:
            raise ValueError(f"k must be at most experts={self.experts}, got {self.k}")
        return self


class Header(BaseModel):
    """The content of trace.json.

    Attributes:
        content: what is recorded of a batch.
        layers: in the order of the model.
        batches: what a batch is.
        model: name of the model, where known.
        source: the program and format that the trace came from.
        scores_are_weights: the gate scores of the chosen experts are their weights.
        notes: what a reader should know: what was left out, mapped or assumed.
        identity: random; every chunk names it, so that chunks of two traces can't be mixed.
        created: time, ISO 8601.
        chunks: how many there are, once the trace is finished; None: recording was cut off.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["paceline-trace"] = "paceline-trace"
    version: Literal[1] = 1
    content: Content
    layers: tuple[Layer, ...] = Field(min_length=1, max_length=MAX_LAYERS)
    batches: BatchIs = "forward"
    model: str | None = None
    source: str = "paceline record"
    scores_are_weights: bool = False
    notes: tuple[str, ...] = ()
    identity: str = ""
    created: str = ""
    chunks: int | None = Field(default=None, ge=0)

    @property
    def per_token(self) -> bool:
        """True if the trace holds the choices of each token."""
        return self.content in ("choices", "scores")

    @property
    def experts(self) -> int:
        """Most experts of a layer: the width of the tables."""
        return max(layer.experts for layer in self.layers)

    @property
    def k(self) -> int | None:
        """Largest k of the layers, None where that of a layer is unknown."""
        known = [layer.k for layer in self.layers if layer.k is not None]
        return max(known) if len(known) == len(self.layers) else None


def read_header(folder: Path) -> Header:
    """Read the header of a trace folder.

    Raises:
        TraceError: if trace.json is missing, too large, no JSON, or has a field that can't be.
    """
    path = folder / HEADER
    raw = read_bounded(path, MAX_HEADER_BYTES)
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not JSON: {shortened(str(error), 200)}.") from None
    return parse_header(fields, str(path))


def parse_header(fields: Any, where: str) -> Header:
    """Check a header of decoded JSON; `where` names its file in errors.

    Raises:
        TraceError: naming the first field that can't be.
    """
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise TraceError(f'{where}: format is not "{FORMAT}": this is no trace of Paceline.')
    if fields.get("version") != VERSION:
        raise TraceError(f"{where}: version must be {VERSION}, got {seen(fields.get('version'))}.")
    try:
        header = Header.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "header"
        raise TraceError(
            f"{where}: {field}={seen(first['input'])} is not allowed: {first['msg']}."
        ) from None
    if len(header.layers) * header.experts > MAX_CELLS:
        raise TraceError(
            f"{where}: {len(header.layers)} layers of up to {header.experts} experts are not "
            f"allowed: their product is at most {MAX_CELLS}."
        )
    return header


def read_bounded(path: Path, limit: int) -> bytes:
    """Read a small file.

    Raises:
        TraceError: if it is missing, no plain file, or larger than `limit` bytes.
    """
    try:
        return read_plain(path, limit)
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error.strerror}.") from None
    except ValueError as error:
        raise TraceError(f"{path} can't be read: {error}.") from None


def chunk_name(number: int) -> str:
    """Return the file name of a chunk, from 0."""
    return f"chunk-{number:06d}.safetensors"


def seen(value: object) -> str:
    """Write a value of a file for an error: as Python does, on one line, shortened.

    >>> seen("two\\nlines")
    "'two\\\\nlines'"
    """
    return shortened(repr(value))
