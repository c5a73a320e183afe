"""Expert parallelism: speed-ups of a layer and of models beside the bounds of their loads.

    python benchmarks/expert_parallel.py ranks      two gloo ranks, a core each: a layer
    python benchmarks/expert_parallel.py figure4    8 (6) emulated devices at the paper's shapes
    python benchmarks/expert_parallel.py sweep      emulated, growing batches
    python benchmarks/expert_parallel.py trace      emulated, recorded routing (--trace FILE)
    python benchmarks/expert_parallel.py model      two gloo ranks: demo and random model

Each part runs `paceline bench` and writes results/expert_parallel_PART.json. A quiet machine is
needed: its load before each run is in the results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FACTORS = ("2.0", "1.5", "1.0")
PAPER_FIGURE_4 = {
    "olmoe": {
        "token drop": dict(zip(FACTORS, (1.21, 1.30, 1.46), strict=True)),
        "expanded drop": dict(zip(FACTORS, (1.16, 1.25, 1.36), strict=True)),
    },
    "mixtral": {
        "token drop": dict(zip(FACTORS, (1.44, 1.89, 2.55), strict=True)),
        "expanded drop": dict(zip(FACTORS, (1.43, 1.86, 2.51), strict=True)),
    },
}
"""Layer speed-ups on 8 H20 GPUs (He et al., arXiv 2503.05066, Figure 4)."""


def run(verb: str, *options: str, ranks: int | None = None, label: str = "") -> dict[str, Any]:
    """Run `paceline bench VERB` and return its results."""
    start = [sys.executable, "-m", "paceline"]
    if ranks is not None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        start = [sys.executable, *torchrun, "-m", "paceline"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        command = [*start, "bench", verb, *options, "--out", str(out)]
        print("+ paceline bench", verb, *options, f"({ranks} ranks)" if ranks else "", flush=True)
        subprocess.run(command, check=True, env=environment)
        results: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    # the name of a file, not where it was on this machine
    named = [Path(part).name if os.sep in part else part for part in options]
    shown = " ".join(["paceline", "bench", verb, *named])
    return {"label": label, "command": shown, "ranks": ranks, **results}


def save(part: str, found: list[dict[str, Any]]) -> None:
    """Write what a part has found so far."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"expert_parallel_{part}.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path.name}", flush=True)


def policies(*texts: str) -> list[str]:
    return [part for text in texts for part in ("--policy", text)]


def drops(unit: str = "device") -> list[str]:
    return [f"capacity_factor={factor},unit={unit}" for factor in FACTORS]


def ranks_part(rounds: int) -> list[dict[str, Any]]:
    """Run two real ranks with 80% of the load on one of them, with 70%, and with a shared batch."""
    chosen = policies(
        "capacity_factor=1.5",
        "capacity_factor=1.0",
        "capacity_factor=1.0,unit=expert",
        "capacity_factor=1.5,expand=own_device",
        "capacity_factor=1.5,pool=batch",
        "capacity_factor=1.0,pool=batch",
    )
    common = ["--shape", "1024,512,32,4,2", "--tokens", "2048", "--rounds", str(rounds)]
    shared = policies("capacity_factor=1.5", "capacity_factor=1.0")
    return [
        run("layer", *common, "--peak-to-mean", "1.6", *chosen, ranks=2, label="80% on one rank"),
        run("layer", *common, "--peak-to-mean", "1.4", *chosen, ranks=2, label="70% on one rank"),
        run(
            "layer", *common, "--peak-to-mean", "1.6", "--batch", "shared", *shared, ranks=2,
            label="80% on one rank, shared batch",
        ),
    ]  # fmt: skip


def figure4_part(rounds: int) -> list[dict[str, Any]]:
    """Run the paper's shapes, with a skew near what its figures imply, on emulated devices."""
    expanded = [f"capacity_factor={factor},expand=own_device" for factor in FACTORS]
    found = []
    for shape, tokens, skew in (
        ("olmoe", "256", "1.8"),
        ("deepseek-v2-lite", "256", "1.8"),
        ("qwen1.5-moe", "256", "1.8"),
        ("mixtral", "64", "2.8"),
    ):
        one_expert_a_device = shape == "mixtral"  # the two units are the same
        units = drops() if one_expert_a_device else [*drops(), *drops("expert")]
        options = ["--shape", shape, "--tokens", tokens, "--peak-to-mean", skew]
        chosen = policies(*units, *expanded)
        result = run("layer", *options, "--rounds", str(rounds), *chosen, label=shape)
        found.append({**result, "paper_speedup_8_H20": PAPER_FIGURE_4.get(shape)})
        save("figure4", found)
        if not one_expert_a_device:
            same = policies(*at_equal_bound(result))
            label = f"{shape}, both units with the same busiest device"
            found.append(run("layer", *options, "--rounds", str(rounds), *same, label=label))
            save("figure4", found)
    return found


def at_equal_bound(result: dict[str, Any]) -> list[str]:
    """Pair each cap per expert of a result with the cap per device of the same busiest device."""
    chosen = []
    for row in result["policies"]:
        if row["policy"].endswith("unit=expert"):
            factor = round(row["peak_to_mean"], 3)
            chosen += [row["policy"], f"capacity_factor={factor},unit=device"]
    return chosen


def sweep_part(rounds: int) -> list[dict[str, Any]]:
    """Run batches from a few tokens per device, where weights dominate, to many."""
    chosen = policies(*drops())
    options = ["--shape", "olmoe", "--peak-to-mean", "1.8", "--rounds", str(rounds), *chosen]
    return [
        run("layer", *options, "--tokens", str(tokens), label=f"{tokens} tokens per device")
        for tokens in (4, 16, 64, 256)
    ]


def trace_part(rounds: int, trace: Path) -> list[dict[str, Any]]:
    """Run recorded routing of DeepSeek-V2-Lite through experts of its shape, some layers."""
    chosen = policies(*drops(), *drops("expert"))
    options = ["--shape", "deepseek-v2-lite", "--tokens", "128", "--rounds", str(rounds), *chosen]
    return [
        run("layer", *options, "--trace", str(trace), "--layer", layer, label=f"layer {layer}")
        for layer in ("3", "12", "20")
    ]


def model_part(rounds: int) -> list[dict[str, Any]]:
    """Run whole models on two real ranks: the demo model on text of one kind, and random ones."""
    chosen = policies("capacity_factor=1.5", "capacity_factor=1.25", "capacity_factor=1.0")
    common = ["--new-tokens", "17", "--rounds", str(rounds), *chosen]
    demo = ["--model", "demo", "--text", "python", "--sequences", "16", "--prompt-tokens", "256"]
    prompts = ["--sequences", "4", "--prompt-tokens", "256"]
    found = [run("model", *demo, *common, ranks=2, label="demo model, Python text")]
    for shape in ("random", "random:1536,1024,32,4,12"):
        save("model", found)
        label = "random OLMoE, skewed routers"
        found.append(run("model", "--model", shape, *prompts, *common, ranks=2, label=label))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", choices=("ranks", "figure4", "sweep", "trace", "model"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--trace", type=Path, help="an .npz for the part trace")
    arguments = parser.parse_args()
    if arguments.part == "trace":
        if arguments.trace is None:
            parser.error("the part trace needs --trace FILE")
        found = trace_part(arguments.rounds, arguments.trace)
    else:
        parts = {
            "ranks": ranks_part,
            "figure4": figure4_part,
            "sweep": sweep_part,
            "model": model_part,
        }
        found = parts[arguments.part](arguments.rounds)
    save(arguments.part, found)


if __name__ == "__main__":
    main()
