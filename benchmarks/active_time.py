"""Decode steps with few active experts: time beside the bound of the bytes of weights read.

Layers of real models' shapes, whose weights don't fit the cache, in float32 on a CPU.

    python benchmarks/active_time.py --json benchmarks/results/active_time.json
    torchrun --nproc-per-node 2 benchmarks/active_time.py --json active_ranks.json

One process: EMULATED devices, played in turn, of which a layer waits for the one that takes
longest; then a model of one such layer on one device, attached and decoding for real, also where
the cap drops nothing. Under torchrun: the same model on real ranks that share the batch. A ratio
is time without the cap / time with it; its bound is experts read without / with, by the device
that reads most; everything takes turns within one run. One core multiplies slowly, so beside it
stands a bound that counts rows too: what an expert costs with one row, and each further row.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline import CapacityPolicy, ExpertPlacement, attach, route
from paceline.bench.emulated import split_by_device
from paceline.bench.machine import prepare_machine
from paceline.bench.spread import ratios, shuffled, spread
from paceline.bench.workload import SHAPES, Shape, build_experts, skewed_workload
from paceline.engines.transformers.expert_parallel import place_experts
from paceline.environment import environment
from paceline.files import to_json, write_text

DEVICES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=["olmoe", "qwen3-30b-a3b"])
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=["devices", "model"])
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # all sequences are our own
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        dist.init_process_group("gloo")
    machine = prepare_machine(rank, ranks)
    data: dict[str, Any] = {"schema": "paceline-active-time/1", "ranks": ranks, "rows": []}
    data |= {"rounds": given.rounds, "machine": machine, **environment()}
    for name in given.shapes:
        shape = SHAPES[name]
        parts: dict[str, Callable[[Shape, list[int], int], list[dict[str, Any]]]] = {
            "devices": devices_in_turn,
            "model": whole_model,
        }
        for part, measure in parts.items():
            if (ranks > 1 and part == "devices") or given.only not in (None, part):
                continue
            for row in measure(shape, given.batches, given.rounds):
                row = {"part": part, "shape": name, **row}
                data["rows"].append(row)
                if rank == 0:
                    print(said(row), flush=True)
                    write_text(given.json, to_json(data), private=False)
    if ranks > 1:
        dist.destroy_process_group()


def said(row: dict[str, Any]) -> str:
    """A line of the terminal."""
    ratio, bound = row["ratio"], row["bound"]
    return (
        f"{row['part']:8} {row['shape']:14} batch {row['batch']:3} {row['policy']:16} "
        f"experts {row['active_before']:.2f} to {row['active_after']:.2f}, bound {bound:.2f}, "
        f"ratio {ratio['median']:.3f} (from {ratio['min']:.3f} to {ratio['max']:.3f}), "
        f"{ratio['median'] / bound:.2f} of the bound"
        + (f" (rows counted: {row['bound_with_rows']:.2f})" if "bound_with_rows" in row else "")
    )


def devices_in_turn(shape: Shape, batches: list[int], rounds: int) -> list[dict[str, Any]]:
    """Every device of a layer in turn, so that none finds its weights in the cache."""
    experts = build_experts(shape, shape.experts)
    placement = ExpertPlacement.contiguous(shape.experts, DEVICES)
    hosted, rows = shape.experts // DEVICES, []
    for batch in batches:
        given = skewed_workload(shape, batch, 1.3, placement)
        inputs = given.gate(given.hidden)
        work, active, costs = {}, {}, {}
        first, further = cost_of_rows(experts, given.hidden, placement)
        for most in [None, *sorted({hosted * 3 // 4, hosted // 2, max(1, hosted // 4)})[::-1]]:
            name = "none" if most is None else f"max_active={most}"
            policy = CapacityPolicy(max_active=most, mode="enforce" if most else "observe")
            a = route(inputs, policy, placement)
            work[name] = split_by_device(given.hidden, a.topk_ids, a.topk_weights, placement)
            active[name] = int(a.active_after.max())
            costs[name] = max(
                first * (n := len(torch.unique(device.ids))) + further * (device.rows - n)
                for device in work[name]
            )
        seconds: dict[str, list[float]] = {name: [] for name in work}
        with torch.inference_mode():
            for turn in range(rounds + 1):
                for name in shuffled(list(work), turn):
                    slowest = max(device.run(experts)[1] for device in work[name])
                    if turn:  # the first touches everything once
                        seconds[name].append(slowest)
        for row in results("none", seconds, active, batch):
            bound = costs["none"] / costs[row["policy"]]
            rows.append(row | {"bound_with_rows": bound, "rows_cost": further / first})
    return rows


def cost_of_rows(
    experts: torch.nn.Module, hidden: torch.Tensor, placement: ExpertPlacement, many: int = 5
) -> tuple[float, float]:
    """Seconds of an expert with one row, and of each further row; weights out of the cache."""
    spent: dict[int, list[float]] = {1: [], many: []}
    with torch.inference_mode():
        for count in (1, many, 1, many):
            for device in range(placement.num_devices):
                own = torch.tensor(placement.experts_of(device)).repeat_interleave(count)
                given = hidden[torch.zeros_like(own)]
                start = time.thread_time()
                experts(given, own.unsqueeze(1), torch.ones(len(own), 1))
                spent[count].append((time.thread_time() - start) * count / len(own))
    first, with_many = (statistics.median(values) for values in spent.values())
    return first, (with_many - first) / (many - 1)


def results(
    base: str, seconds: Mapping[str, list[float]], active: Mapping[str, float], batch: int
) -> list[dict[str, Any]]:
    """A row of each policy beside `base`."""
    return [
        {
            "batch": batch,
            "policy": name,
            "active_before": active[base],
            "active_after": active[name],
            "bound": active[base] / active[name],
            "ratio": ratios(seconds[base], seconds[name]),
            "seconds": spread(seconds[name]),
        }
        for name in seconds
        if name != base
    ]


def whole_model(shape: Shape, batches: list[int], rounds: int) -> list[dict[str, Any]]:
    """Decode steps of a model of one layer, its own forward and cache, attached."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(0)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    config = OlmoeConfig(
        vocab_size=512,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_experts=shape.experts,
        num_experts_per_tok=shape.k,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    with torch.device("meta"):
        model = OlmoeForCausalLM(config)
    model = model.to_empty(device="cpu").eval()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.uniform_(-0.03, 0.03, generator=rng)
        for name, buffer in OlmoeForCausalLM(_small(config)).named_buffers():
            model.get_buffer(name).copy_(buffer)  # positions, which to_empty forgot
    model.set_experts_implementation("grouped_mm")
    placement = ExpertPlacement.contiguous(shape.experts, ranks)
    hosted = shape.experts // ranks
    if ranks > 1:
        place_experts(model, placement, batch="shared")
    rows = []
    for batch in batches:
        prompt = torch.randint(512, (batch, 8), generator=rng)
        policies: dict[str, str | None] = {"none": None}
        policies |= {f"max_active={n}": f"max_active={n}" for n in (hosted // 2, hosted // 4)}
        # never more wanted than that: routed in every step, and nothing dropped
        policies["binds nothing"] = f"max_active={hosted - 1}"
        seconds: dict[str, list[float]] = {"untouched": [], **{name: [] for name in policies}}
        active: dict[str, float] = {}
        for turn in range(rounds + 1):
            for name in shuffled(list(seconds), turn):
                token = prompt[:, :1].roll(turn, 0)
                if name == "untouched":
                    spent = step(model, prompt, token)
                else:
                    with attach(model, policies[name], None if ranks > 1 else placement) as pace:
                        spent = step(model, prompt, token, pace)
                        stats = pace.stats().layers[0]
                        active[name] = stats.most_active_experts_after
                        if name == "binds nothing" and stats.dropped:
                            seconds.pop(name)  # here it does bind
                            continue
                if turn:
                    seconds[name].append(spent)
        active["untouched"] = active["none"]
        rows += results("untouched", seconds, active, batch)
    return rows


def _small(config: Any) -> Any:
    """The same positions with hardly any weights."""
    small = type(config)(**config.to_dict())
    small.num_experts, small.intermediate_size, small.vocab_size = 8, 8, 8
    return small


@torch.no_grad()
def step(model: Any, prompt: torch.Tensor, token: torch.Tensor, pace: Any = None) -> float:
    """Seconds of one decode step, in processor time where there are no ranks to wait for."""
    cache = model(input_ids=prompt, use_cache=True).past_key_values
    if pace is not None:
        pace.reset_stats()
    clock = time.perf_counter if dist.is_initialized() else time.thread_time
    if dist.is_initialized():
        dist.barrier()
    start = clock()
    model(input_ids=token, past_key_values=cache, use_cache=True)
    return clock() - start


if __name__ == "__main__":
    main()
