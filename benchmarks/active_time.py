"""Decode steps with few active experts: time beside the bound of the bytes of weights read.

Layers of real models' shapes, whose weights don't fit a core's cache, on a CPU.

    python benchmarks/active_time.py --dtype bfloat16 --json benchmarks/results/active_time.json
    python benchmarks/active_time.py --json benchmarks/results/active_time_float32.json
    python benchmarks/active_time.py --only overhead --rounds 300 --json active_overhead.json
    torchrun --nproc-per-node 2 benchmarks/active_time.py --json active_ranks.json

One process: what a device's experts cost by number and rows; EMULATED devices, played in turn, of
which a layer waits for the one that takes longest; then a model of one such layer on one device,
attached and decoding for real, with the split of its time; and what a cap costs that drops nothing.
Under torchrun: the same model on real ranks that share the batch or bring their own. A ratio is
time without the cap / time with it; its bound is bytes of weights read without / with, by the
device that reads most, attention and head included where there are any; everything takes turns
within one run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from active_devices import calls, devices_in_turn
from decode_models import (
    ProductTime,
    Row,
    Split,
    WeightsRead,
    random_model,
    results,
    standard_error,
)

from paceline import ExpertPlacement, attach
from paceline.bench.timing import prepare_machine, turns
from paceline.bench.workload import SHAPES, Shape
from paceline.engines.transformers.expert_parallel import place_experts
from paceline.files import to_json, write_text
from paceline.system_info import system_info

STEPS = 4
"""Steps in a row whose mean is taken where small differences matter."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=["olmoe", "qwen3-30b-a3b"])
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=["calls", "devices", "model", "overhead"])
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # all sequences are our own
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        dist.init_process_group("gloo")
    data: Row = {"schema": "paceline-active-time/2", "ranks": ranks, "rows": []}
    data |= {"rounds": options.rounds, "dtype": options.dtype}
    data |= {"process": prepare_machine(rank, ranks), **system_info()}
    dtype = getattr(torch, options.dtype)
    for name in options.shapes:
        for part, measure in _parts(ranks).items():
            if options.only not in (None, part) or (options.only is None and part == "overhead"):
                continue
            for row in measure(SHAPES[name], dtype, options.batches, options.rounds):
                row = {"part": part, "shape": name, **row}
                data["rows"].append(row)
                if rank == 0:
                    print(line_of(row), flush=True)
                    write_text(options.json, to_json(data), private=False)
    if ranks > 1:
        dist.destroy_process_group()


def _parts(ranks: int) -> dict[str, Callable[[Shape, torch.dtype, list[int], int], list[Row]]]:
    if ranks == 1:
        alone = partial(steps_of_model, layout="one process")
        return {"calls": calls, "devices": devices_in_turn, "model": alone,
                "overhead": overhead}  # fmt: skip
    return {layout: partial(steps_of_model, layout=layout) for layout in ("shared", "own")}


def line_of(row: Row) -> str:
    """Write a row as a line of the terminal."""
    start = f"{row['part']:8} {row['shape']:14}"
    if row["part"] == "calls":
        took = 1e3 * row["seconds"]["median"]
        return f"{start} {row['experts']} experts, {row['rows']:2} rows each: {took:.2f} ms"
    ratio = row["ratio"]
    line = (
        f"{start} batch {row['batch']:3} {row['policy']:24} "
        f"experts {row['active_before']:.2f} to {row['active_after']:.2f}, "
        f"ratio {ratio['median']:.3f} ± {row['median_error']:.3f} "
        f"(from {ratio['min']:.3f} to {ratio['max']:.3f})"
    )
    if row["bound"] > 1:
        line += f", bound {row['bound']:.3f}, {ratio['median'] / row['bound']:.3f} of it"
    if "added" in row:
        added = row["added"]
        line += (
            f", {1e3 * added['seconds']:.2f} ms more beside the products: "
            f"{added['share']:.2%} ± {added['share_error']:.2%} of a step"
        )
    if "split" in row:
        line += " " + ", ".join(f"{k} {1e3 * v:.1f} ms" for k, v in row["split"].items())
    return line


class Stepper:
    """Decode steps of a model of one layer, its prompt in the cache, on one process or on ranks."""

    def __init__(self, model: Any, batch: int, own: bool = False) -> None:
        rng = torch.Generator().manual_seed(2 + (dist.get_rank() if own else 0))
        self.model, self.prompt = model, torch.randint(512, (batch, 8), generator=rng)
        with torch.no_grad():
            self.cache = model(input_ids=self.prompt, use_cache=True).past_key_values

    def step(self, turn: int) -> float:
        """Run a step: seconds of processor time, on ranks of the one that needs most."""
        token = self.prompt[:, :1].roll(turn, 0)
        if dist.is_initialized():
            dist.barrier()
        with torch.no_grad():
            start = time.thread_time()
            self.model(input_ids=token, past_key_values=self.cache, use_cache=True)
            spent = time.thread_time() - start
        self.cache.crop(-1)
        return most_of_ranks(spent)

    def weights_read(self, turn: int = 0) -> tuple[float, float]:
        """Count experts, and bytes of all weights, read in a step, by the rank that reads most."""
        with WeightsRead(self.model) as read:
            self.step(turn)
        return most_of_ranks(read.most_experts()), most_of_ranks(float(read.bytes))

    def split(self, pace: Any, rounds: int) -> Mapping[str, float]:
        """Return the median parts of a step, of this process."""
        found = []
        for turn in range(rounds):
            parts = Split(self.model, pace)
            spent = self.step(turn)
            parts.close()
            found.append(parts.of(spent))
        return {part: statistics.median(f[part] for f in found) for part in found[0]}


def most_of_ranks(value: float) -> float:
    """Return the largest of all ranks' values."""
    if not dist.is_initialized():
        return value
    most = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def steps_of_model(
    shape: Shape, dtype: torch.dtype, batches: list[int], rounds: int, layout: str
) -> list[Row]:
    """Time decode steps under max_active beside the untouched model's, alone or on ranks."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    model = random_model(shape, 1, dtype)
    placement = ExpertPlacement.contiguous(shape.experts, ranks)
    hosted, rows = shape.experts // ranks, []
    if layout != "one process":
        place_experts(model, placement, batch=layout)  # type: ignore[arg-type]
    where = placement if layout == "one process" else None
    policies = [f"max_active={hosted * part // 4}" for part in (3, 2, 1)]
    if layout == "own":
        policies += [f"{policy},pool=batch" for policy in policies]
    for batch in batches:
        stepper = Stepper(model, batch, layout == "own")
        seconds: dict[str, list[float]] = {"untouched": [], **{name: [] for name in policies}}
        active, read, parts = {}, {}, {}
        active["untouched"], read["untouched"] = stepper.weights_read()
        with attach(model, None, where) as pace:
            parts["untouched"] = stepper.split(pace, 5)
        for name in policies:
            with attach(model, name, where) as pace:
                active[name], read[name] = stepper.weights_read()
                parts[name] = stepper.split(pace, 5)
        for number, (name, counts) in enumerate(turns(seconds, rounds)):
            turn = number // len(seconds)  # every policy of a round decodes the same tokens
            spent = step_under(stepper, None if name == "untouched" else name, where, turn)
            if counts:
                seconds[name].append(spent)
        for row in results("untouched", seconds, active, read, batch):
            split = {"split": parts[row["policy"]], "split_before": parts["untouched"]}
            rows.append(row | (split if ranks == 1 else {}))
    return rows


def step_under(
    stepper: Stepper, policy: str | None, where: Any, turn: int, steps: int = 1
) -> float:
    """Time the mean step of the untouched model, or of the model attached for the steps."""
    if policy is None:
        return statistics.mean(stepper.step(turn) for _ in range(steps))
    with attach(stepper.model, policy, where):
        return statistics.mean(stepper.step(turn) for _ in range(steps))


def overhead(shape: Shape, dtype: torch.dtype, batches: list[int], rounds: int) -> list[Row]:
    """Time a cap that is computed in every step and drops nothing, beside the untouched model."""
    model = random_model(shape, 1, dtype)
    placement, rows = ExpertPlacement.contiguous(shape.experts, 1), []
    for batch in batches:
        stepper = Stepper(model, batch)
        # steps could exceed this number of experts, and never do: computed in every step, no drop
        idle = f"max_active={min(shape.experts, batch * shape.k) - 1}"
        seconds: dict[str, list[float]] = {"untouched": [], "binds nothing": []}
        active, read = {}, {}
        active["untouched"], read["untouched"] = stepper.weights_read()
        with attach(model, idle, placement) as pace:
            active["binds nothing"], read["binds nothing"] = stepper.weights_read()
            layer = pace.stats().layers[0]
            assert layer.narrowed_forwards == 1
            assert layer.dropped == 0
        beside: dict[str, list[float]] = {"untouched": [], "binds nothing": []}
        for name, counts in turns(seconds, rounds):
            policy = None if name == "untouched" else idle
            with ProductTime() as products:
                spent = step_under(stepper, policy, placement, 0, steps=STEPS)
            if counts:
                seconds[name].append(spent)
                beside[name].append(spent - products.seconds / STEPS)
        more = [a - b for a, b in zip(beside["binds nothing"], beside["untouched"], strict=True)]
        step = statistics.median(seconds["untouched"])
        added = {
            "seconds": statistics.median(more),
            "share": statistics.median(more) / step,
            "share_error": standard_error(more) / step,
        }
        rows += [
            row | {"added": added} for row in results("untouched", seconds, active, read, batch)
        ]
    return rows


if __name__ == "__main__":
    main()
