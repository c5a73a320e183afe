"""What an attached model without a cap costs: decode steps beside the untouched model's.

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
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from paceline import attach
from paceline.bench.timing import keep_freed_memory, spread
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
        rounds = options.rounds
        results[name] = compare(model, run, options.batch, rounds)
        for kind, ratio in results[name].items():
            print(
                f"{name:12} {kind:9} untouched / attached: median {ratio['median']:.3f} "
                f"(from {ratio['min']:.3f} to {ratio['max']:.3f}, {rounds} rounds)"
            )
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def load(name: str) -> Any:
    """The model to measure, in float32."""
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
    """Seconds of 32 decode steps after a prompt of 64 tokens, and of `finish`."""
    prompt = torch.arange(batch * 64).remainder(1000).view(batch, 64)
    cache = model(input_ids=prompt, use_cache=True).past_key_values
    token = prompt[:, :1]
    start = time.perf_counter()
    for _ in range(32):
        model(input_ids=token, past_key_values=cache, use_cache=True)
    finish()
    return time.perf_counter() - start


def generate(model: Any, batch: int, finish: Callable[[], object]) -> float:
    """Seconds of generating 48 tokens after a prompt of 4, and of `finish`."""
    prompt = torch.arange(batch * 4).remainder(1000).view(batch, 4)
    start = time.perf_counter()
    model.generate(prompt, max_new_tokens=48, min_new_tokens=48, do_sample=False, pad_token_id=0)
    finish()
    return time.perf_counter() - start


def compare(model: Any, run: Any, batch: int, rounds: int) -> dict[str, dict[str, float]]:
    """Ratios untouched / attached over rounds, every kind once a round, in random order."""
    draw = random.Random(0)
    ratios: dict[str, list[float]] = {kind: [] for kind in ATTACHED}
    for number in range(rounds + 2):
        seconds = {}
        for kind in draw.sample(["untouched", *ATTACHED], k=1 + len(ATTACHED)):
            if kind == "untouched":
                seconds[kind] = run(model, batch, lambda: None)
                continue
            with attach(model, ATTACHED[kind]) as pace:
                seconds[kind] = run(model, batch, pace.stats)
        if number >= 2:  # the first ones warm up
            for kind, seen in ratios.items():
                seen.append(seconds["untouched"] / seconds[kind])
    return {kind: spread(seen) for kind, seen in ratios.items()}


if __name__ == "__main__":
    main()
