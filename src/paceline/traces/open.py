"""Open a trace of any known kind, recognised by its content: a loop over the importers."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from paceline.traces.folder import read_trace
from paceline.traces.format import HEADER, TraceError
from paceline.traces.importers import (
    colibri,
    completions,
    csv_counts,
    esft,
    json_tables,
    llama_cpp,
    numpy_arrays,
    refused,
    route_log,
    sglang_recorder,
    tensorrt_llm,
)  # fmt: skip
from paceline.traces.importers.source import ImportOptions, Source
from paceline.traces.merge import combined
from paceline.traces.trace import Trace


class Importer(Protocol):
    """The two functions of a module that imports one kind of file or folder."""

    def matches(self, source: Source) -> bool: ...

    def read(self, source: Source) -> Trace: ...


IMPORTERS: tuple[Importer, ...] = (
    tensorrt_llm, llama_cpp, colibri, csv_counts, sglang_recorder, numpy_arrays, esft, route_log,
    completions, json_tables, refused,
)  # fmt: skip
"""Importers in order: the first that matches reads."""
KNOWN = (
    "a folder of paceline record, completions with routed_experts (vLLM, SGLang), JSONL route "
    "logs, SGLang's recorder (.pt, logical_count), TensorRT-LLM's expert statistic, ESFT's ids and "
    "weights, counts in JSON or CSV, llama.cpp's imatrix, Colibri's history and trace, .npz "
    "arrays, and folders of such files"
)
_SAMPLES = Path(__file__).with_name("sample")
SAMPLE = "sample:"


def open_trace(path: Path | str, options: ImportOptions | None = None) -> Trace:
    """Open a trace from a file or folder, Paceline's own or of another program.

    Args:
        path: of it, or "sample:NAME" for one that comes with the package.
        options: facts that its file doesn't state.

    Raises:
        TraceError: if its kind is unknown, or it holds something that is not allowed: one sentence.

    >>> open_trace("sample:gpt_oss_20b_decode").header.model
    'openai/gpt-oss-20b'
    """
    options = options or ImportOptions()
    if str(path).startswith(SAMPLE):
        return sample(str(path).removeprefix(SAMPLE), options)
    path = Path(path)
    try:
        if not path.exists():
            raise TraceError(f"there is no trace {path}.")
        if (path / HEADER).is_file():
            return read_trace(path)
        if not path.is_dir():
            _check_file(path)
        source = Source(path, options)
        found = _read(source) or _folder(source)
        if found is None:
            raise _unknown(source)
        return found
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error.strerror or error}.") from None


def _read(source: Source) -> Trace | None:
    """Read a file or folder by the first importer that matches it, None without one."""
    found = next((importer for importer in IMPORTERS if importer.matches(source)), None)
    return None if found is None else found.read(source)


def _folder(source: Source) -> Trace | None:
    """Read a folder of files that are a trace each, None if it is something else."""
    if not source.path.is_dir() or not source.files:
        return None
    traces = [_read(file) for file in source.files]
    known = [trace for trace in traces if trace is not None]
    return combined(known) if len(known) == len(traces) else None


def sample(name: str, options: ImportOptions | None = None) -> Trace:
    """Open a trace that comes with the package; see sample/README.md beside this module.

    Raises:
        TraceError: if there is none of that name.

    >>> len(sample("esft_v2lite_law").header.layers)
    6
    """
    if name not in samples():
        raise TraceError(f"sample must be one of {', '.join(samples())}, got {name!r}.")
    path = _SAMPLES / f"{name}.npz"
    return numpy_arrays.read(Source(path, options or ImportOptions(), f"{SAMPLE}{name}"))


def samples() -> list[str]:
    """Return the names of the traces that come with the package.

    >>> samples()
    ['esft_v2lite_intent', 'esft_v2lite_law', 'gpt_oss_20b_decode']
    """
    return sorted(path.stem for path in _SAMPLES.glob("*.npz"))


def is_trace(path: Path | str) -> bool:
    """Check if a path may be a trace: a sample, a file, or a folder that is no model's.

    >>> is_trace("sample:esft_v2lite_law"), is_trace("a-model-on-the-hub")
    (True, False)
    """
    if str(path).startswith(SAMPLE):
        return True
    path = Path(path)
    return path.is_file() or (path.is_dir() and not (path / "config.json").exists())


def _check_file(path: Path) -> None:
    """Refuse what is no plain file, and the parts of a trace that is a folder."""
    if not path.is_file():
        raise TraceError(f"{path} is no plain file.")
    if path.name in (HEADER, tensorrt_llm.META) or path.suffix == ".safetensors":
        for name in (HEADER, tensorrt_llm.META):
            if (path.parent / name).is_file():
                raise TraceError(f"{path} is a part of a trace: give its folder, {path.parent}.")


def _unknown(source: Source) -> TraceError:
    path = source.path
    if path.is_dir():
        return TraceError(f"the folder {path} holds no known trace, which is {KNOWN}.")
    if source.looks_like_json and source.json is None:
        return TraceError(f"{path} is neither JSON nor JSON lines: it is cut off or broken.")
    if source.looks_like_json:
        return TraceError(f"{path} is JSON of an unknown form; known are {KNOWN}.")
    return TraceError(f"{path} is no known trace, which is {KNOWN}.")
