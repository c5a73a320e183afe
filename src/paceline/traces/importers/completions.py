"""Completions of vLLM and SGLang that state which experts every token went to.

vLLM 0.32 (`--enable-return-routed-experts`): `choices[i].routed_experts`, base64 of an .npy array
[prompt + generated - 1, hidden layers, k] of logical ids; a dense layer is all zeros. vLLM 0.21:
nested lists `prompt_routed_experts` and `choices[i].routed_experts`, MoE layers only, -1 where the
prefix cache answered. SGLang (`--enable-return-routed-experts`): `meta_info.routed_experts` (or
`sglext`, `sgl_ext`), base64 of raw little-endian int32 [tokens, hidden layers, k] with no header.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.traces.format import PHASES, UNKNOWN, TraceError
from paceline.traces.importers.numpy_arrays import MAGIC, MAX_ARRAY_BYTES, read_npy
from paceline.traces.importers.source import Source
from paceline.traces.importers.to_trace import check_ids, from_requests
from paceline.traces.trace import Trace

Array = npt.NDArray[Any]

_FIELD = "routed_experts"
_SGLANG = ("meta_info", "sglext", "sgl_ext")


def matches(source: Source) -> bool:
    """Check for a completion, or a list of them, with or without routed experts."""
    data = source.json
    first = data[0] if isinstance(data, list) and data else data
    return isinstance(first, dict) and (
        isinstance(first.get("choices"), list)
        or any(isinstance(first.get(name), dict) for name in _SGLANG)
    )


def read(source: Source) -> Trace:
    """Read completions as one trace; each is a batch and a request.

    Raises:
        TraceError: if one has no routed experts, or they are no [tokens, layers, k] ids.
    """
    experts = source.require("experts")
    responses = source.json if isinstance(source.json, list) else [source.json]
    parts: list[Array] = []
    phases, notes = [], []
    for number, response in enumerate(responses):
        place = source.where if len(responses) == 1 else f"{source.where}, response {number}"
        if not isinstance(response, Mapping):
            raise TraceError(f"{place} is no JSON object.")
        before = len(parts)
        for part, prompt in _parts(response, place, source):
            parts.append(part)
            phase = np.full(len(part), UNKNOWN if prompt is None else PHASES.index("decode"))
            phase[: prompt or 0] = PHASES.index("prefill")
            phases.append(phase.astype(np.uint8))
        if len(parts) == before:
            raise TraceError(
                f"{place} has no {_FIELD}: start the server with --enable-return-routed-experts."
            )
    if any(bool((phase == UNKNOWN).any()) for phase in phases):
        notes.append("the length of a prompt is unknown, and so are phases")
    program = f"completion with {_FIELD}"
    return from_requests(
        source, parts, program=program, experts=experts, phases=phases, notes=notes
    )  # fmt: skip


def _parts(
    response: Mapping[str, Any], where: str, source: Source
) -> Iterator[tuple[Array, int | None]]:
    """Iterate over [tokens, layers, k] of each choice of a response, and its prompt's tokens."""
    shared, usage = response.get("prompt_routed_experts"), response.get("usage")
    choices = response.get("choices")
    for choice in choices if isinstance(choices, list) else [response]:
        if not isinstance(choice, Mapping):
            raise TraceError(f"{where}: choices hold something that is no JSON object.")
        holders = [choice, *(choice.get(name) for name in _SGLANG)]
        holders += [response.get(name) for name in _SGLANG]
        found = [h[_FIELD] for h in holders if isinstance(h, Mapping) and h.get(_FIELD) is not None]
        facts = [h for h in (*holders, usage) if isinstance(h, Mapping)]
        prompt = next((h["prompt_tokens"] for h in facts if "prompt_tokens" in h), None)
        if not found:
            continue
        if isinstance(found[0], str):
            part = _decoded(found[0], where, source)
            generated = choice.get("token_ids") or response.get("output_ids")
            if prompt is None and isinstance(generated, list):
                prompt = len(part) + 1 - len(generated)  # the last generated token was never run
        else:
            part = _nested(found[0], where)
            if shared is not None:
                head = _nested(shared, where)
                part, prompt = np.concatenate([head, part]), len(head)
        usable = isinstance(prompt, int) and 0 <= prompt <= len(part)
        yield part, prompt if usable else None


def _decoded(text: str, where: str, source: Source) -> Array:
    """Decode [tokens, layers, k] from base64 of an .npy array, or of bare int32."""
    if len(text) > MAX_ARRAY_BYTES:
        raise TraceError(f"{where}: {_FIELD} has {len(text)} characters: too many.")
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise TraceError(f"{where}: {_FIELD} is no base64.") from None
    if raw[: len(MAGIC)] == MAGIC:
        what = f"{where}: {_FIELD}"
        return check_ids(read_npy(io.BytesIO(raw), len(raw), what), what)
    layers, k = source.require("layers"), source.require("k")
    if not raw or len(raw) % (4 * layers * k):
        raise TraceError(
            f"{where}: {_FIELD} has {len(raw)} bytes, which is no multiple of 4 bytes x {layers} "
            f"layers x {k} experts per token."
        )
    return np.frombuffer(raw, "<i4").reshape(-1, layers, k).astype(np.int64)


def _nested(lists: Any, where: str) -> Array:
    """Convert nested lists of whole numbers to [tokens, layers, k]."""
    try:
        array = np.array(lists)
    except ValueError:
        array = np.array([])
    if array.ndim != 3 or array.dtype.kind != "i":
        raise TraceError(f"{where}: {_FIELD} are no nested lists [tokens, layers, k] of ids.")
    return array
