"""Measure the experts of many layers on this machine, for `hardware_fit`.

What is timed are the experts as Transformers runs them (stacked weights, grouped products), with
rows spread unevenly over them: one device's share of a layer.

What made fits hold on a busy machine: processor time, rounds in which all cases take turns, and
many sizes, since one is as much as a sixth quicker or slower than its numbers say. With one round
30 of 36 such layers were within 15%, with five or six 31 to 36.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from paceline.analysis.cost import LayerShape
from paceline.bench.workload import Shape, build_experts

FIT_SIZES = (
    (512, 512), (1024, 512), (1024, 1024), (1536, 1024), (2048, 768), (2048, 1536), (2880, 1440),
)  # fmt: skip
"""(hidden, expert size) that the fit sees."""
HELD_OUT_SIZES = ((2048, 1024), (1280, 768), (1024, 1408), (768, 2048))
"""Those it is judged by; 2048 x 1024 is OLMoE's layer."""
EXPERTS = 8
MEAN_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 320)
DECODE_ROWS = 4
"""Mean rows an expert up to which a case counts as decode: weights rule."""


@dataclass(frozen=True)
class Timing:
    """The experts of one device, timed.

    Attributes:
        shape: of the layer.
        rows: [experts] rows of each.
        seconds: of the fastest of some runs.
        second_fastest: of the next one; how far it is off says how quiet the machine is.
    """

    shape: LayerShape
    rows: tuple[int, ...]
    seconds: float
    second_fastest: float = math.nan


def is_decode(timing: Timing) -> bool:
    """Whether experts have so few rows that reading their weights is nearly all.

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
    """Time the experts of one device for every size and mean number of rows an expert.

    All cases of all sizes run in every round, in another order each time, and the fastest run of a
    case counts: a slow moment of the machine falls on few of them, and on no size alone.

    Args:
        sizes: (hidden, expert size) of each layer.
        means: mean rows of an expert; each expert gets its own number around it.
        rounds: how often each case runs.
        seed: of rows and weights.
        progress: told runs done, runs in all, and the last size.

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
                    said = f"{case.shape.hidden} x {case.shape.expert_size}"
                    progress(turn * len(cases) + done, (rounds + 1) * len(cases), said)
    fastest = [sorted(each)[:2] for each in taken]
    return [Timing(c.shape, c.rows, t[0], t[-1]) for c, t in zip(cases, fastest, strict=True)]


def unrest(timings: Sequence[Timing]) -> float:
    """Median of how much longer the second fastest run of a case took: 0.02 is a quiet machine.

    >>> unrest([Timing(LayerShape(1, 1, 1, 1), (1,), 1.0, 1.5)])
    0.5
    """
    return float(np.median([t.second_fastest / t.seconds - 1 for t in timings]))


@dataclass(frozen=True, eq=False)
class _Case:
    """What is run: experts, and rows for them."""

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
        given = torch.randn((len(ids), hidden)).to(device, dtype)
        weights = torch.ones((len(ids), 1), device=device, dtype=dtype)
        cases.append(_Case(shape, tuple(rows), experts, (given, ids.unsqueeze(1), weights)))
    return cases


def _now(device: torch.device) -> float:
    """Seconds; of the one thread where there is one, which other programs hardly change."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
