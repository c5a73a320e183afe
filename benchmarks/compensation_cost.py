"""Cost of stand-ins at OLMoE's shape, on a CPU: their time in a capped layer, and fitting them.

    python benchmarks/compensation_cost.py --out benchmarks/results/compensation_cost.json

Hidden size 2048, expert width 1024, 64 experts, 8 a token, 8 devices, rank 16, random weights. The
cap is 0.87, so that 13% are dropped. Layers without and with stand-ins are timed in turn,
processor time of one thread; where other work makes the whole layer's time unsure, that of the
stand-ins within it, over the layer alone, is steadier. The fit is timed for some experts with the
rows that 65,536 tokens give each, and extended to the 64 experts of a layer.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from decode_models import random_model, random_stand_ins
from torch import Tensor

from paceline import attach
from paceline.bench.timing import keep_freed_memory, ratios, turns
from paceline.bench.workload import SHAPES
from paceline.calibration.layer_fit import RIDGE_EXPERTS, fit_layer
from paceline.calibration.rows import Rows, Seen
from paceline.files import to_json, write_text
from paceline.stand_ins.compensation import Compensation
from paceline.stand_ins.identity import LayerIdentity
from paceline.system_info import system_info

HIDDEN, WIDTH, EXPERTS, K, RANK, DEVICES = 2048, 1024, 64, 8, 16, 8
POLICY = "capacity_factor=0.87,min_expert_load=0"
TOKENS = 65536  # of a calibration


def time_layer(tokens: int, rounds: int) -> dict[str, Any]:
    model = random_model(SHAPES["olmoe"], 1, torch.float32)
    found = random_stand_ins(model, RANK)
    hidden = torch.randn(1, tokens, HIDDEN)
    block = model.model.layers[0].mlp
    policies = {"alone": POLICY, "with stand-ins": f"{POLICY},compensate=true"}
    seconds: dict[str, list[float]] = {name: [] for name in (*policies, "stand-ins")}
    compensate = Compensation.__call__

    def timed(*args: Any, **kwargs: Any) -> Tensor:
        start = time.thread_time()
        out = compensate(*args, **kwargs)
        seconds["stand-ins"].append(time.thread_time() - start)
        return out

    with (
        patch.object(Compensation, "__call__", timed),
        attach(
            model,
            POLICY,
            DEVICES,
            calibration=found,
            token_valid=lambda *_: torch.ones(1, tokens) > 0,
        ) as pace,
        torch.inference_mode(),
    ):
        for name, counts in turns(policies, rounds):
            pace.policy = policies[name]
            start = time.thread_time()
            block(hidden)
            if counts:
                seconds[name].append(time.thread_time() - start)
        del seconds["stand-ins"][0]
        dropped = pace.stats().layers[0].dropped_share
    return {
        "tokens": tokens,
        "dropped_share": dropped,
        "seconds": seconds,
        "with_over_alone": ratios(seconds["with stand-ins"], seconds["alone"]),
        "stand_ins_over_alone": ratios(seconds["stand-ins"], seconds["alone"]),
    }


def time_fit(experts: int) -> dict[str, Any]:
    """Time the fit of so many experts, each with the rows of a mean expert of 64."""
    each = TOKENS * K // EXPERTS
    weight = torch.randn(3, HIDDEN, WIDTH) / HIDDEN**0.5

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        gate, up = x @ weight[0], x @ weight[1]
        out: Tensor = (torch.nn.functional.silu(gate) * up) @ weight[2].T
        return out

    names = {expert: str(expert) for expert in range(experts)}
    layer = LayerIdentity("layer", 1, experts, "router", names)
    x = torch.randn(experts * each, 256) @ torch.randn(256, HIDDEN) / 16
    x += 0.3 * torch.randn_like(x)
    ids = torch.arange(experts).repeat(each).unsqueeze(1)
    text = torch.arange(len(x)) * 4 // len(x)
    device = torch.device("cpu")
    metric = torch.rand(ids.shape)
    seen = Seen(run, [x], [ids], [metric], [torch.ones(ids.shape)], device)
    rows = Rows(seen, layer, text, text, torch.zeros_like(text))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, ends = time.process_time(), []
    fit_layer(rows, RANK, 4, None, lambda: ends.append(time.process_time()))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    # every expert is fitted twice, after ridges were tried
    first = (ends[experts - 1] - ends[0]) / (experts - 1)
    expert = first + (ends[-1] - ends[experts - 1]) / experts
    ridge = (ends[0] - start - first) / min(experts, RIDGE_EXPERTS)
    layer_seconds = EXPERTS * expert + RIDGE_EXPERTS * ridge
    return {
        "rows_an_expert": each,
        "experts_timed": experts,
        "seconds_an_expert": expert,
        "seconds_of_ridges_an_expert": ridge,
        "seconds_a_layer": layer_seconds,
        "hours_of_16_layers": 16 * layer_seconds / 3600,
        "more_peak_memory_gib": used / 2**20,
        "inputs_of_a_layer_gib": TOKENS * HIDDEN * 2 / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--experts", type=int, default=4, help="to fit, 2 or more")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["layer", "fit"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data: dict[str, Any] = {"schema": "paceline-compensation-cost/1", "threads": options.threads}
    data["freed_memory_kept"] = keep_freed_memory()  # as `paceline tune` does
    if options.only != "layer":
        data["fit"] = time_fit(options.experts)
        print(to_json(data["fit"]), flush=True)
    if options.only != "fit":
        data["layer"] = time_layer(options.tokens, options.rounds)
        print(to_json(data["layer"]), flush=True)
    if options.out is not None:
        write_text(options.out, to_json({**data, **system_info()}), private=False)


if __name__ == "__main__":
    main()
