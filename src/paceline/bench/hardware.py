"""Measure the experts of many layers on this machine, and fit the cost model's device to them.

Timed are experts as Transformers runs them (stacked weights, grouped products), with rows spread
unevenly over them: one device's share of a layer. What made fits hold on a busy machine: processor
time, rounds in which all cases take turns, and many sizes, since one is as much as a sixth quicker
or slower than its numbers say. With one round 30 of 36 such layers were within 15%, with five or
six 31 to 36.

The fit is least squares of relative errors with coefficients that can't be negative; which rows are
slow and how tiles are cut is chosen by the same error. It is judged on shapes that took no part in
it: some that never do, and each of the others when the fit is repeated without it.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from paceline.analysis.cost import LayerShape, device_seconds, padded_rows
from paceline.analysis.hardware import Hardware
from paceline.bench.workload import Shape, build_experts
from paceline.progress import Progress
from paceline.system_info import system_info

SCHEMA = "paceline-hardware/1"

FIT_SIZES = (
    (512, 512), (1024, 512), (1024, 1024), (1536, 1024), (2048, 768), (2048, 1536), (2880, 1440),
)  # fmt: skip
"""(hidden, expert size) that the fit sees."""
HELD_OUT_SIZES = ((2048, 1024), (1280, 768), (1024, 1408), (768, 2048))
"""Sizes that judge the fit; 2048 x 1024 is OLMoE's layer."""
EXPERTS = 8
MEAN_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 320)
DECODE_ROWS = 4
"""Mean rows per expert up to which a case counts as decode: weights rule."""
_GOOD = 0.15
_SLOW = (0, 2, 4, 6, 8, 10, 12, 16, 24, 32, 64)
_ENDLESS = 1e18
"""Rate per second of parts that take no time of their own."""


@dataclass(frozen=True)
class Timing:
    """Timing of the experts of one device.

    Attributes:
        rows: [experts] rows of each.
        seconds: of the fastest of some runs.
        second_fastest: of the next one; the closer, the quieter the machine.
    """

    shape: LayerShape
    rows: tuple[int, ...]
    seconds: float
    second_fastest: float = math.nan


def is_decode(timing: Timing) -> bool:
    """Check if experts have so few rows that reading their weights takes nearly all the time.

    >>> is_decode(Timing(LayerShape(1, 1, 1, 1), (1,), 1.0))
    True
    """
    return sum(timing.rows) <= DECODE_ROWS * len(timing.rows)


def measure(
    sizes: Sequence[tuple[int, int]],
    means: Sequence[int] = MEAN_ROWS,
    rounds: int = 3,
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Timing]:
    """Time the experts of one device for every size and mean number of rows per expert.

    All cases of all sizes run in every round, in another order each time, and the fastest run of a
    case counts: a slow moment of the machine falls on few of them, and on no size alone.

    Args:
        sizes: (hidden, expert size) of each layer.
        means: mean rows of an expert; each expert gets its own number around it.
        rounds: how often each case runs.
        progress: called with runs done, runs in all, and the last size.

    Returns:
        The timings, size by size.

    >>> [t.shape.hidden for t in measure([(32, 16)], means=(1, 2), rounds=1)]
    [32, 32]
    """
    rng = random.Random(seed)
    cases = [case for hidden, size in sizes for case in _cases(hidden, size, means, rng)]
    taken: list[list[float]] = [[] for _ in cases]
    order = list(range(len(cases)))
    with torch.inference_mode():
        for turn in range(rounds + 1):  # the first touches code and memory, and doesn't count
            rng.shuffle(order)
            for done, index in enumerate(order, 1):
                case = cases[index]
                start = _now(case.inputs[0].device)
                case.experts(*case.inputs)
                seconds = _now(case.inputs[0].device) - start
                if turn:
                    taken[index].append(seconds)
                if progress is not None:
                    size = f"{case.shape.hidden} x {case.shape.expert_size}"
                    progress(turn * len(cases) + done, (rounds + 1) * len(cases), size)
    fastest = [sorted(each)[:2] for each in taken]
    return [Timing(c.shape, c.rows, t[0], t[-1]) for c, t in zip(cases, fastest, strict=True)]


def unrest(timings: Sequence[Timing]) -> float:
    """Return the median excess of the second fastest run of a case: 0.02 is a quiet machine.

    >>> unrest([Timing(LayerShape(1, 1, 1, 1), (1,), 1.0, 1.5)])
    0.5
    """
    return float(np.median([t.second_fastest / t.seconds - 1 for t in timings]))


@dataclass(frozen=True, eq=False)
class _Case:
    """Experts to run, and rows for them."""

    shape: LayerShape
    rows: tuple[int, ...]
    experts: nn.Module
    inputs: tuple[Tensor, Tensor, Tensor]


def _cases(hidden: int, size: int, means: Sequence[int], rng: random.Random) -> list[_Case]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = "bf16" if device.type == "cuda" else "fp32"
    shape = LayerShape(hidden, size, EXPERTS, 1, precision)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    experts = build_experts(Shape("", hidden, size, EXPERTS, 1, 1), EXPERTS).to(device, dtype)
    cases = []
    for mean in means:
        rows = [int(rng.gammavariate(2, mean / 2)) for _ in range(EXPERTS)]
        rows[0] = max(rows[0], 1)
        ids = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(rows)).to(device)
        inputs = torch.randn((len(ids), hidden)).to(device, dtype)
        weights = torch.ones((len(ids), 1), device=device, dtype=dtype)
        cases.append(_Case(shape, tuple(rows), experts, (inputs, ids.unsqueeze(1), weights)))
    return cases


def _now(device: torch.device) -> float:
    """Read the clock: of the thread where there is one, which other programs hardly change."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


# -- the fit ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """A device fitted to timings.

    Attributes:
        errors: relative error of each timing of the fit.
        held_out: of each timing that took no part in it.
    """

    hardware: Hardware
    errors: tuple[float, ...]
    held_out: tuple[float, ...]


def within(errors: Sequence[float]) -> int:
    """Count the errors of at most 15%.

    >>> within([0.15, -0.16, 0.0])
    2
    """
    return int((np.abs(errors) <= _GOOD).sum())


def left_out(timings: Sequence[Timing]) -> list[float]:
    """Return the error of each timing under a fit to those of all other sizes.

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
    """Fit the device whose times are nearest to the measured ones.

    Args:
        held_out: to judge the fit by.
        link: bytes/s to other devices, which is not measured; None: as quick as memory.

    Raises:
        ValueError: for fewer than 8 timings.

    >>> sizes = [(256, 128 * n) for n in range(1, 9)]
    >>> ideal = Hardware("x", flops=1e12, memory=1e11, memory_size=1e9, link=1e9, tile=1)
    >>> shapes = [LayerShape(*size, 8, 1, "fp32") for size in sizes]
    >>> rows = [(10 * n, 3, n) for n in range(1, 9)]
    >>> seen = [Timing(s, r, float(device_seconds([r], s, ideal)[0])) for s, r in zip(shapes, rows)]
    >>> max(map(abs, fit(seen).errors)) < 1e-3
    True
    """
    if len(timings) < 8:
        raise ValueError(f"timings must be at least 8 for a fit, got {len(timings)}.")
    tiles = (1,) if timings[0].shape.precision == "fp32" else (1, 16, 64, 128)
    found = [_fit(timings, name, link, tile, slow) for tile in tiles for slow in _SLOW]
    hardware = min(found, key=lambda h: float(np.square(_errors(h, timings)).sum()))
    return Fit(hardware, tuple(_errors(hardware, timings)), tuple(_errors(hardware, held_out)))


def fit_this_machine(
    link: float | None = None,
    rounds: int = 7,
    threads: int = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Time experts on this machine and fit the cost model's device to them.

    Args:
        link: bytes/s to other devices, which is not measured.
        rounds: runs of every case; the fastest counts.
        threads: of one device, on a CPU.

    Returns:
        The device, and how good it is on sizes that took no part in the fit.
    """
    from paceline.bench.timing import keep_freed_memory

    torch.set_num_threads(threads)
    keep_freed_memory()
    sizes = FIT_SIZES + HELD_OUT_SIZES
    timings = measure(sizes, rounds=rounds, progress=progress)
    seen = [t for t in timings if (t.shape.hidden, t.shape.expert_size) in FIT_SIZES]
    unseen = [t for t in timings if t not in seen]
    found = fit(seen, unseen, link=link)
    cases = [
        {
            "hidden": timing.shape.hidden,
            "expert_size": timing.shape.expert_size,
            "rows": list(timing.rows),
            "decode": is_decode(timing),
            "seconds": timing.seconds,
            "error": error,
        }
        for timing, error in zip(unseen, found.held_out, strict=True)
    ]
    decode = [e for t, e in zip(unseen, found.held_out, strict=True) if is_decode(t)]
    several = len(FIT_SIZES) > 2  # the sizes that remain have to be enough for a fit
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
        "unrest": unrest(timings),
        "threads": threads,
        **system_info(),
    }
    return {"schema": SCHEMA, "hardware": asdict(found.hardware), **more}


def _errors(hardware: Hardware, timings: Sequence[Timing]) -> list[float]:
    return [float(device_seconds([t.rows], t.shape, hardware)[0]) / t.seconds - 1 for t in timings]


def _fit(
    timings: Sequence[Timing], name: str, link: float | None, tile: int, slow: int
) -> Hardware:
    """Fit the terms of `device_seconds`, one column each, to the times."""
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
