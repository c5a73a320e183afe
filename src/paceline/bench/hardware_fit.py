"""Fit the cost model's device to timings of many layers' experts.

The fit is least squares of relative errors with coefficients that can't be negative; which rows are
slow and how tiles are cut is chosen by the same error. How good it is, shapes say that took no part
in it: some that never do, and each of the others when the fit is made again without it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from paceline.analysis.cost import device_seconds, padded_rows
from paceline.analysis.hardware import Hardware, save_hardware
from paceline.bench import hardware as bench
from paceline.bench.hardware import Timing
from paceline.progress import Progress
from paceline.system_info import system_info

_GOOD = 0.15
_SLOW = (0, 2, 4, 6, 8, 10, 12, 16, 24, 32, 64)
_ENDLESS = 1e18  # per second: what takes no time of its own


@dataclass(frozen=True)
class Fit:
    """A device fitted to timings.

    Attributes:
        hardware: the device.
        errors: relative error of each timing of the fit.
        held_out: of each timing that took no part in it.
    """

    hardware: Hardware
    errors: tuple[float, ...]
    held_out: tuple[float, ...]


def within(errors: Sequence[float]) -> int:
    """How many errors are at most 15%.

    >>> within([0.15, -0.16, 0.0])
    2
    """
    return int((np.abs(errors) <= _GOOD).sum())


def left_out(timings: Sequence[Timing]) -> list[float]:
    """The error of each timing under a fit to those of all other sizes.

    Raises:
        ValueError: if fewer than 8 timings are left for a fit.
    """
    sizes = {(t.shape.hidden, t.shape.expert_size) for t in timings}
    errors = dict.fromkeys(range(len(timings)), 0.0)
    for size in sizes:
        mine = [n for n, t in enumerate(timings) if (t.shape.hidden, t.shape.expert_size) == size]
        others = [t for n, t in enumerate(timings) if n not in mine]
        found = fit(others, [timings[n] for n in mine]).held_out
        errors |= dict(zip(mine, found, strict=True))
    return list(errors.values())


def fit(
    timings: Sequence[Timing],
    held_out: Sequence[Timing] = (),
    name: str = "this machine",
    link: float | None = None,
) -> Fit:
    """The device whose times are nearest to the measured ones.

    Args:
        timings: to fit to.
        held_out: to be judged by.
        name: of the device.
        link: bytes/s to other devices, which is not measured; None: as quick as memory.

    Raises:
        ValueError: for fewer than 8 timings.

    >>> from paceline.analysis.cost import LayerShape
    >>> sizes = [(256, 128 * n) for n in range(1, 9)]
    >>> ideal = Hardware("x", flops=1e12, memory=1e11, memory_size=1e9, link=1e9, tile=1)
    >>> shapes = [LayerShape(*size, 8, 1, "fp32") for size in sizes]
    >>> rows = [(10 * n, 3, n) for n in range(1, 9)]
    >>> seen = [Timing(s, r, float(device_seconds([r], s, ideal)[0])) for s, r in zip(shapes, rows)]
    >>> max(map(abs, fit(seen).errors)) < 1e-3
    True
    """
    if len(timings) < 8:
        raise ValueError(f"{len(timings)} timings are not allowed: a fit needs at least 8.")
    tiles = (1,) if timings[0].shape.precision == "fp32" else (1, 16, 64, 128)
    found = [_fit(timings, name, link, tile, slow) for tile in tiles for slow in _SLOW]
    hardware = min(found, key=lambda h: float(np.square(_errors(h, timings)).sum()))
    return Fit(hardware, tuple(_errors(hardware, timings)), tuple(_errors(hardware, held_out)))


def fit_this_machine(
    out: Path | None = None,
    link: float | None = None,
    rounds: int = 7,
    threads: int = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Time experts on this machine and fit the cost model's device to them.

    Args:
        out: file to write, read again by `hardware_of`.
        link: bytes/s to other devices, which is not measured.
        rounds: runs of every case; the fastest counts.
        threads: of one device, on a CPU.
        progress: called after every case.

    Returns:
        The device, and how good it is on sizes that took no part in the fit.
    """
    from paceline.bench.machine import keep_freed_memory

    torch.set_num_threads(threads)
    keep_freed_memory()
    sizes = bench.FIT_SIZES + bench.HELD_OUT_SIZES
    timings = bench.measure(sizes, rounds=rounds, progress=progress)
    seen = [t for t in timings if (t.shape.hidden, t.shape.expert_size) in bench.FIT_SIZES]
    unseen = [t for t in timings if t not in seen]
    found = fit(seen, unseen, link=link)
    cases = [
        {
            "hidden": timing.shape.hidden,
            "expert_size": timing.shape.expert_size,
            "rows": list(timing.rows),
            "decode": bench.is_decode(timing),
            "seconds": timing.seconds,
            "error": error,
        }
        for timing, error in zip(unseen, found.held_out, strict=True)
    ]
    decode = [e for t, e in zip(unseen, found.held_out, strict=True) if bench.is_decode(t)]
    several = len(bench.FIT_SIZES) > 2  # the sizes that remain have to be enough for a fit
    others = left_out(seen) if several else []
    more = {
        "held_out": cases,
        "held_out_within_15_percent": within(found.held_out),
        "held_out_worst": max(map(abs, found.held_out)),
        "decode_cases": len(decode),
        "decode_within_15_percent": within(decode),
        "each_size_left_out": len(others),
        "each_size_left_out_within_15_percent": within(others),
        "each_size_left_out_worst": max(map(abs, others), default=None),
        "unrest": bench.unrest(timings),
        "threads": threads,
        **system_info(),
    }
    if out is not None:
        save_hardware(found.hardware, out, more)
    return {"hardware": asdict(found.hardware), **more}


def _errors(hardware: Hardware, timings: Sequence[Timing]) -> list[float]:
    return [float(device_seconds([t.rows], t.shape, hardware)[0]) / t.seconds - 1 for t in timings]


def _fit(
    timings: Sequence[Timing], name: str, link: float | None, tile: int, slow: int
) -> Hardware:
    """The terms of `device_seconds`, one column each, against the times."""
    columns = []
    for timing in timings:
        rows = np.array(timing.rows, dtype=np.float64)
        active, padded = float((rows > 0).sum()), padded_rows(rows, tile)
        shape = timing.shape
        columns.append(
            [
                1.0,
                active,
                active * shape.expert_bytes,
                float(padded.sum()) * shape.row_flops,
                float(np.minimum(padded, slow).sum()) * shape.row_flops,
                float(rows.sum()) * shape.row_bytes,
            ]
        )
    seconds = np.array([timing.seconds for timing in timings])
    table = np.array(columns) / seconds[:, None]
    scale = np.maximum(table.max(0), 1e-300)
    found, _ = nnls(table / scale, np.ones(len(seconds)))
    launch, each, byte, flop, slower, moved = map(float, found / scale)
    flops, memory = _rate(flop), _rate(byte)
    return Hardware(
        name=name,
        flops=flops,
        memory=memory,
        memory_size=_memory_size(),
        link=memory if link is None else link,
        network=memory if link is None else link,
        launch=launch,
        per_expert=each,
        exchange=0.0 if link is None else 20e-6,
        tile=tile,
        slow_rows=slow if slower > 0 else 0,
        slow_flops=1 / (slower + flop) if slower > 0 else 0.0,
        activations=_rate(moved),
        precision=timings[0].shape.precision,
        source="paceline bench hardware",
    )


def _rate(seconds: float) -> float:
    return 1 / seconds if seconds > 1 / _ENDLESS else _ENDLESS


def _memory_size() -> float:
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
