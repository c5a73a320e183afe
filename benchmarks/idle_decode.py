"""Cost of an attached model without a cap: decode steps beside the untouched model's.

    python benchmarks/idle_decode.py                 a random Mixtral-shaped model of 8 layers
    python benchmarks/idle_decode.py --model demo    the demo model

Untouched, observed (`attach(model)`) and capped-but-idle (a cap that small decode batches never
reach) forwards of one token take turns in random order within one run; the ratio of each round
is untouched / attached, so 1 costs nothing and 0.98 costs 2%. Reading the statistics once is part
of the attached time. `generate` takes part too, with its switch from grouped to batched experts
for decoding. Prints a table, writes results/idle_decode.json.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from paceline import attach
from paceline.bench.timing import Spread, keep_freed_memory, ratios, turns
from paceline.shipped import MODEL_FOLDER
from paceline.system_info import system_info

RESULTS = Path(__file__).parent / "results" / "idle_decode.json"
ATTACHED = {"observed": None, "idle cap": "capacity_factor=1.25"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random", help="random, demo, or a model folder")
    parser.add_argument("--batch", type=int, default=4, help="sequences decoded together")
    parser.add_argument("--rounds", type=int, default=45)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()

    warnings.simplefilter("ignore")  # all sequences are our own, and old argument names work
    torch.set_num_threads(1)
    keep_freed_memory()
    model = load(options.model)
    results: dict[str, Any] = {
        "program": "benchmarks/idle_decode.py",
        "model": options.model,
        "parameters": model.num_parameters(),
        "batch": options.batch,
        "threads": 1,
        **system_info(),
    }
    for name, run in {"decode step": step, "generate": generate}.items():
        results[name] = compare(model, run, options.batch, options.rounds)
        for kind, ratio in results[name].items():
            print(
                f"{name:12} {kind:9} untouched / attached: median {ratio['median']:.3f} "
                f"(from {ratio['min']:.3f} to {ratio['max']:.3f}, {options.rounds} rounds)"
            )
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def load(name: str) -> Any:
    """Load the model to measure, in float32."""
    if name != "random":
        folder = MODEL_FOLDER if name == "demo" else Path(name)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=896,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=8,
    )
    return MixtralForCausalLM(config).eval()


@torch.no_grad()
def step(model: Any, batch: int, finish: Callable[[], object]) -> float:
    """Time 32 decode steps after a prompt of 64 tokens, and `finish`."""
    prompt = torch.arange(batch * 64).remainder(1000).view(batch, 64)
    cache = model(input_ids=prompt, use_cache=True).past_key_values
    token = prompt[:, :1]
    start = time.perf_counter()
    for _ in range(32):
        model(input_ids=token, past_key_values=cache, use_cache=True)
    finish()
    return time.perf_counter() - start


def generate(model: Any, batch: int, finish: Callable[[], object]) -> float:
    """Time the generation of 48 tokens after a prompt of 4, and `finish`."""
    prompt = torch.arange(batch * 4).remainder(1000).view(batch, 4)
    start = time.perf_counter()
    model.generate(prompt, max_new_tokens=48, min_new_tokens=48, do_sample=False, pad_token_id=0)
    finish()
    return time.perf_counter() - start


def compare(model: Any, run: Any, batch: int, rounds: int) -> dict[str, Spread]:
    """Return ratios untouched / attached over rounds, every kind once per round."""
    seconds: dict[str, list[float]] = {kind: [] for kind in ("untouched", *ATTACHED)}
    for kind, counts in turns(seconds, rounds, warm_up=2):
        if kind == "untouched":
            spent = run(model, batch, lambda: None)
        else:
            with attach(model, ATTACHED[kind]) as pace:
                spent = run(model, batch, pace.stats)
        if counts:
            seconds[kind].append(spent)
    return {kind: ratios(seconds["untouched"], seconds[kind]) for kind in ATTACHED}


if __name__ == "__main__":
    main()
