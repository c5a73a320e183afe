"""Files that hold no load table, and why: so that the answer isn't just "unknown format"."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from paceline.traces.format import TraceError
from paceline.traces.importers.source import Source
from paceline.traces.trace import Trace

_NONE = "holds no load table:"


def matches(source: Source) -> bool:
    """Check for a file that is known, and known to hold no loads."""
    return _reason(source) is not None


def read(source: Source) -> Trace:
    """Raise TraceError with the reason."""
    raise TraceError(f"{source.where} {_reason(source)}.")


def _reason(source: Source) -> str | None:
    if source.start[:1] == b"\x80" and source.start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "is a pickle: reading it can run any code, so none is read; write its counts as JSON"
    text = source.text
    if re.search(r"^initial_global_assignments:", text, re.MULTILINE):
        return f"{_NONE} it is a placement for TensorRT-LLM, which expert sits in which slot"
    if "balancedness=" in text:
        values = [float(x) for x in re.findall(r"balancedness=(0\.\d+|1\.0*)", text)]
        peaks = [1 / value for value in values if value > 0]
        spread = f" (peak-to-mean {min(peaks):.2f} to {max(peaks):.2f})" if peaks else ""
        return (
            f"{_NONE} a log of EPLB has one balance a step, summed over layers, of the devices as "
            f"they were{spread}, and no loads of experts"
        )
    data = source.json
    rows = [data, data[0]] if isinstance(data, list) and data else [data]
    return next((f"{_NONE} {why}" for row in rows for fits, why in _REASONS if fits(row)), None)


def _is_order(data: Any) -> bool:
    return isinstance(data, list) and bool(data) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(x) is int for x in pair)
        for pair in data
    )  # fmt: skip


def _is_top(data: Any) -> bool:
    return isinstance(data, dict) and bool(data) and all(
        isinstance(value, dict) and any(re.fullmatch(r"top\d+", key) for key in value)
        for value in data.values()
    )  # fmt: skip


def _is_chosen(data: Any) -> bool:
    layers = data.get("experts") if isinstance(data, dict) else None
    return isinstance(layers, dict) and all(isinstance(value, list) for value in layers.values())


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda data: isinstance(data, dict) and any(name in data for name in names)


def _is_megablocks(data: Any) -> bool:
    return isinstance(data, dict) and any(str(key).startswith("mb_moe/") for key in data)


_REASONS: Sequence[tuple[Callable[[Any], bool], str]] = (
    (
        _is_order,
        "pairs [layer, expert] in order of popularity say who comes first alone",
    ),
    (_is_top, "counts of the busiest experts alone, summed over layers, are partial"),
    (_is_chosen, "experts chosen for tuning come without any count"),
    (_is_megablocks, "MegaBlocks logs the least, largest, median and spread of loads, no counts"),
    (_has("physical_to_logical_map"), "it is a placement, which expert sits in which slot"),
    (_has("moe_layer_count", "layer_list"), "it is a placement of vLLM Ascend, experts by device"),
)
