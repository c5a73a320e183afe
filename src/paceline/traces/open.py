"""Open a trace of any known kind: what it is, is told by its content."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.traces.format import HEADER, TraceError
from paceline.traces.importers import arrays, gguf, texts, torch_files
from paceline.traces.importers.asked import Asked
from paceline.traces.importers.refused import refuse_json, refuse_text
from paceline.traces.importers.responses import is_response, read_request_arrays, read_responses
from paceline.traces.importers.routelog import is_meta, read_route_log
from paceline.traces.importers.saved_arrays import read_arrays
from paceline.traces.importers.tables import read_table
from paceline.traces.importers.tensorrt import META, read_statistic
from paceline.traces.reader import read_trace
from paceline.traces.trace import Trace

KNOWN = (
    "a folder of paceline record, completions with routed_experts (vLLM, SGLang), JSONL route "
    "logs, SGLang's recorder (.pt, CSV, logical_count), TensorRT-LLM's expert statistic, ESFT's "
    "ids and weights, counts in JSON, llama.cpp's imatrix, and .npz arrays"
)
_SAMPLES = Path(__file__).with_name("sample")
SAMPLE = "sample:"
_MAX_JSON_BYTES = 1 << 28
_START = 1 << 16


def open_trace(path: Path | str, asked: Asked | None = None) -> Trace:
    """A trace from a file or folder, Paceline's own or of another program.

    Args:
        path: of it, or "sample:NAME" for one that comes with the package.
        asked: what its file doesn't tell.

    Raises:
        TraceError: if it is none that is known, or something in it can't be: one sentence.

    >>> open_trace("sample:gpt_oss_20b_decode").header.model
    'openai/gpt-oss-20b'
    """
    asked = asked or Asked()
    if str(path).startswith(SAMPLE):
        return sample(str(path).removeprefix(SAMPLE), asked)
    path = Path(path)
    try:
        if path.is_dir():
            return _folder(path, asked)
        if not path.exists():
            raise TraceError(f"there is no trace {path}.")
        if not path.is_file():
            raise TraceError(f"{path} is no plain file.")
        return _file(path, asked)
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error.strerror or error}.") from None


def sample(name: str, asked: Asked | None = None) -> Trace:
    """A trace that comes with the package; see sample/README.md beside this module.

    Raises:
        TraceError: if there is none of that name.

    >>> len(sample("esft_v2lite_law").header.layers)
    6
    """
    if name not in samples():
        raise TraceError(f"there is no sample {name!r}: allowed are {', '.join(samples())}.")
    path = _SAMPLES / f"{name}.npz"
    return read_arrays(arrays.read_npz(path), f"{SAMPLE}{name}", asked or Asked())


def samples() -> list[str]:
    """Names of the traces that come with the package.

    >>> samples()
    ['esft_v2lite_intent', 'esft_v2lite_law', 'gpt_oss_20b_decode']
    """
    return sorted(path.stem for path in _SAMPLES.glob("*.npz"))


def is_trace(path: Path | str) -> bool:
    """Whether a path may be a trace: a sample, a file, or a folder that is no model's.

    >>> is_trace("sample:esft_v2lite_law"), is_trace("a-model-on-the-hub")
    (True, False)
    """
    if str(path).startswith(SAMPLE):
        return True
    path = Path(path)
    return path.is_file() or (path.is_dir() and not (path / "config.json").exists())


def _folder(folder: Path, asked: Asked) -> Trace:
    where = str(folder)
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if HEADER in names:
        return read_trace(folder)
    if META in names:
        return read_statistic(folder, asked)
    files = [folder / name for name in names if (folder / name).is_file()]
    kinds = {path: _kind(path) for path in files}
    for kind, read in (
        ("torch", torch_files.read_recording),
        ("counts", texts.read_count_tables),
        ("esft", texts.read_esft),
    ):
        chosen = [path for path in files if kinds[path] == kind]
        if chosen:
            return read(chosen, where, asked)
    raise TraceError(f"the folder {folder} holds no trace that is known: {KNOWN}.")


def _file(path: Path, asked: Asked) -> Trace:
    where, kind = str(path), _kind(path)
    if path.name in (HEADER, META) or path.suffix == ".safetensors":
        for name in (HEADER, META):
            if (path.parent / name).is_file():
                raise TraceError(f"{path} is a part of a trace: say its folder, {path.parent}.")
    if kind == "gguf":
        return gguf.read_imatrix(path, where, asked)
    if kind == "torch":
        return torch_files.read_recording(torch_files.ranks_of(path), where, asked)
    if kind == "npz":
        found = arrays.read_npz(path)
        read = read_arrays if "topk_ids" in found else read_request_arrays
        return read(found, where, asked)
    if kind == "npy":
        with path.open("rb") as file:
            array = arrays.read_npy(file, path.stat().st_size, where)
        return read_request_arrays({path.stem: array}, where, asked)
    if kind == "pickle":
        raise TraceError(
            f"{path} is a pickle: reading it can run any code, so none is read; write its counts "
            "as JSON."
        )
    if kind == "esft":
        return texts.read_esft([path], where, asked)
    if kind == "counts":
        return texts.read_count_tables([path], where, asked)
    if kind == "choices":
        return texts.read_choice_table(path, where, asked)
    if kind == "json":
        return _json(path, where, asked)
    raise TraceError(f"{path} is no trace that is known: {KNOWN}.")


def _kind(path: Path) -> str:
    """What a file is, from its first bytes."""
    with path.open("rb") as file:
        start = file.read(_START)
    for magic, kind in ((gguf.MAGIC, "gguf"), (arrays.MAGIC, "npy"), (b"PK\x03\x04", "zip")):
        if start.startswith(magic):
            return kind if kind != "zip" else _zip_kind(path)
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "pickle"
    try:
        text = start.decode("utf-8", "strict" if len(start) < _START else "ignore")
    except UnicodeDecodeError:
        return "unknown"
    refuse_text(text, str(path))
    first = text.split("\n", 1)[0].strip()
    if first.startswith(("{", "[")):
        return "json"
    if first == texts.COUNTS_HEADER:
        return "counts"
    if first == texts.CHOICES_HEADER:
        return "choices"
    if texts.is_esft(first) or _long_esft(first):
        return "esft"
    return "unknown"


def _long_esft(start: str) -> bool:
    """Whether a line that goes on beyond what was read begins with ids by tab."""
    parts = start.split("\t")
    return len(parts) > 16 and all(part.isdigit() for part in parts[:16])


def _zip_kind(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except arrays.ZIP_FAULTS:
        raise TraceError(f"{path} is a zip file that is cut off or broken.") from None
    if any(name.endswith("data.pkl") for name in names):
        return "torch"
    return "npz" if names and all(name.endswith(".npy") for name in names) else "unknown"


def _json(path: Path, where: str, asked: Asked) -> Trace:
    """JSON, or one JSON object a line."""
    with path.open("rb") as file:
        first = _decoded(file.readline(_MAX_JSON_BYTES))
    if is_meta(first):
        return read_route_log(path, where, asked)
    size = path.stat().st_size
    if size > _MAX_JSON_BYTES:
        raise TraceError(f"{path} has {size} bytes: allowed for JSON are {_MAX_JSON_BYTES}.")
    data = _decoded(path.read_bytes())
    if data is None:
        rows = [_decoded(line.encode()) for _, line in texts.lines(path)]
        if first is None or any(row is None for row in rows):
            raise TraceError(f"{path} is neither JSON nor JSON lines: it is cut off or broken.")
        refuse_json(rows[0], where)
        data = rows
    responses: Sequence[Any] = data if isinstance(data, list) else [data]
    if responses and is_response(responses[0]):
        return read_responses(responses, where, asked)
    found = read_table(data, where, asked)
    if found is not None:
        return found
    refuse_json(data, where)
    raise TraceError(f"{path} is JSON of no kind that is known: {KNOWN}.")


def _decoded(raw: bytes) -> Any:
    """Decoded JSON, None where it is none."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None
