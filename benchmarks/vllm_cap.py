"""Cost and gain of the cap inside vLLM: stock and capped engines take turns in one process.

    make .venv-vllm/.ready && .venv-vllm/bin/python benchmarks/vllm_cap.py
    .venv-vllm/bin/python benchmarks/vllm_cap.py --rounds 5 --only decode

Three workloads on one core, eager, float32: prefill of 2,048 tokens by a random 100-million-
parameter model whose 32 experts are 512 x 1,024 and 4 of which serve a token; the same by the
embedded model, whose experts are 192 x 64; decode steps of the embedded model, eight requests at a
time. In each round every variant runs once, in an order of the round's own, and its time is taken
relative to the stock engine's in that round, so 1.00 costs nothing and 0.90 gains a tenth; a second
stock engine shows what is noise. All stock engines are made before the plugin is put in. Times
are of the processor that the process spent on its one thread, which a busy machine disturbs less
than the clock on the wall. Devices are emulated: one process runs all rows, and what becomes less
is the rows. Prints a table, writes results/vllm_cap.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "vllm_cap.json"
os.environ.update(
    OMP_NUM_THREADS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)
DEVICES = 8
TOKENS = 2048
WORKLOADS = ("prefill", "demo", "decode")
PREFILL = {
    "off": None,
    "cap that can't bind": "capacity_factor=1000",
    "shadow 1.25": "capacity_factor=1.25,mode=shadow",
    "1.25 per device": "capacity_factor=1.25",
    "1.0 per device": "capacity_factor=1.0",
}
STOCK = ("stock", "an earlier stock engine")
"""The second shows by how much two engines in one process differ anyway; it is made first."""

DECODE = {"off": None, "1.25 per device, default min_expert_load": "capacity_factor=1.25"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=WORKLOADS, help="one workload")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    from paceline.bench.timing import keep_freed_memory
    from paceline.system_info import system_info

    if options.only is None:  # each in a process of its own, so that its stock engines are stock
        found: dict[str, Any] = {}
        for name in WORKLOADS:
            command = [sys.executable, __file__, "--only", name, "--rounds", str(options.rounds)]
            subprocess.run([*command, "--out", str(options.out)], check=True)
            found |= json.loads(options.out.read_text(encoding="utf-8"))
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return
    results: dict[str, Any] = {
        "program": "benchmarks/vllm_cap.py",
        "threads": 1,
        "seconds": "of the processor, spent by the process",
        "freed_memory_kept": keep_freed_memory(),
        "rounds": options.rounds,
        "devices_emulated": DEVICES,
        **system_info(),
    }
    results["versions"]["vllm-cpu"] = version("vllm-cpu")
    with tempfile.TemporaryDirectory() as folder:
        make = big_model if options.only == "prefill" else untied
        variants, work = (DECODE, decode) if options.only == "decode" else (PREFILL, prefill)
        results[options.only] = compare(make(Path(folder)), variants, work, options.rounds)
    show(options.only, results[options.only])
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def untied(folder: Path) -> str:
    """Write the embedded model as vLLM reads it; its folder."""
    from paceline.engines.serving.demo_model import untied_demo

    return untied_demo(folder)


def compare(model: str, variants: dict[str, str | None], work: Any, rounds: int) -> dict[str, Any]:
    """Compare every variant's time with the stock engine's; count its drops."""
    from paceline.bench.timing import turns

    stocks = {name: engine(model, capped=False) for name in reversed(STOCK)}
    capped = engine(model, capped=True)

    def run(name: str) -> float:
        if name in stocks:
            return float(work(stocks[name]))
        set_policy(capped, variants[name])
        return float(work(capped))

    dropped = {STOCK[1]: 0.0}
    for name in variants:
        before = described(capped)
        run(name)
        after = described(capped)
        rows = after["assignments"] - before["assignments"]
        dropped[name] = (after["dropped"] - before["dropped"]) / rows if rows else 0.0
    times: dict[str, list[float]] = {name: [] for name in (*STOCK, *variants)}
    for name, _ in turns(times, rounds, warm_up=0):
        times[name].append(run(name))
    found: dict[str, Any] = {"stock_seconds": statistics.median(times["stock"])}
    for name in (STOCK[1], *variants):
        ratios = [a / b for a, b in zip(times[name], times["stock"], strict=True)]
        found[name] = {
            "dropped_share": round(dropped[name], 4),
            "median": round(statistics.median(ratios), 4),
            "minimum": round(min(ratios), 4),
            "maximum": round(max(ratios), 4),
        }
    return found


def engine(model: str, capped: bool) -> Any:
    """Make an engine, with the plugin in it or before it is registered."""
    from vllm import LLM

    if capped:
        from paceline.engines.vllm.plugin import register

        os.environ.update(PACELINE_POLICY="capacity_factor=1000", PACELINE_DEVICES=str(DEVICES))
        register()
    return LLM(
        model, dtype="float32", enforce_eager=True, max_model_len=512,
        max_num_batched_tokens=TOKENS,
        enable_prefix_caching=False, kv_cache_memory_bytes=1 << 28, disable_log_stats=True,
    )  # fmt: skip


def prefill(llm: Any) -> float:
    """Time one forward of eight prompts of 256 tokens, in processor seconds."""
    from vllm import SamplingParams

    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(5, 2000) for _ in range(TOKENS // 8)]} for _ in range(8)
    ]
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    begin = time.process_time()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.process_time() - begin


def decode(llm: Any) -> float:
    """Time 64 steps beyond the first of eight requests, in processor seconds."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [5 + i] * 4} for i in range(8)]
    spent = {}
    for tokens in (1, 65):
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        begin = time.process_time()
        llm.generate(prompts, sampling, use_tqdm=False)
        spent[tokens] = time.process_time() - begin
    return spent[65] - spent[1]


def big_model(folder: Path) -> str:
    """Write a random model, 32 experts of 512 x 1,024 in each of two layers, uneven gates."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from paceline.shipped import MODEL_FOLDER

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "olmoe", vocab_size=2048, hidden_size=512, intermediate_size=1024, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=8, num_experts=32, num_experts_per_tok=4,
        max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                # what all tokens share, so that some experts are liked more
                parameter += torch.randn(512) * 0.02 * 0.25
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODEL_FOLDER / name).read_bytes())
    return str(folder)


def set_policy(llm: Any, policy: str | None) -> None:
    """Set the policy as the server's POST does."""
    reason = llm.collective_rpc("paceline_check", args=(policy,))[0]
    if reason is not None:
        raise SystemExit(reason)
    llm.collective_rpc("paceline_set", args=(policy,))


def described(llm: Any) -> dict[str, Any]:
    """Read the counters of the one worker."""
    return dict(llm.collective_rpc("paceline_describe")[0])


def show(name: str, found: dict[str, Any]) -> None:
    """Print a line per variant."""
    print(f"{name}: stock {found['stock_seconds'] * 1e3:.0f} ms")
    for variant, ratio in found.items():
        if isinstance(ratio, dict):
            print(
                f"  {variant:42} {ratio['median']:.3f} of stock ({ratio['minimum']:.3f} to "
                f"{ratio['maximum']:.3f}), {ratio['dropped_share']:.1%} dropped",
                flush=True,
            )


if __name__ == "__main__":
    main()
