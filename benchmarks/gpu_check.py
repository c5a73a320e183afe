"""All checks and timings that need a CUDA machine, in one program of under six minutes.

    python benchmarks/gpu_check.py              on a CUDA machine
    python benchmarks/gpu_check.py --dry-run    the same code on a CPU, tiny shapes, no claims

1. the GPU tests; 2. what the cap adds to softmax and top-k, both as CUDA graphs; 3. one MoE layer
(OLMoE, Mixtral and Qwen3-30B shapes, bf16) with and without a cap; 4. the same layer on 8 emulated
devices: the rows that each rank would get are run one rank after the other on this one GPU, and
the slowest is what the others would wait for; 5. time against rows per expert, where tile steps and
the memory-bound ridge show; 6. the cap as the vLLM plugin runs it, which needs no vLLM: one
captured graph is replayed under changed policies and padding, and compared with routing on the
host. Weights are random: times are real, qualities are not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs, route
from paceline.engines.vllm.accelerator import DeviceCap
from paceline.routing.backends import using_backend
from paceline.system_info import system_info

ROOT = Path(__file__).resolve().parents[1]
DEVICES = 8
FACTORS = (1.0, 1.25, 1.5, 2.0)


class Layer(NamedTuple):
    """Shape of one MoE layer: experts, experts per token, hidden and expert widths."""

    experts: int
    k: int
    hidden: int
    inner: int


LAYERS = {
    "olmoe": Layer(64, 8, 2048, 1024),
    "mixtral": Layer(8, 2, 4096, 14336),
    "qwen3-30b": Layer(128, 8, 2048, 768),
}
TOKENS = [1024, 4096, 16384, 65536]
ROUTERS = [(512, 8, 2), (4096, 64, 8), (16384, 64, 8), (4096, 256, 8), (65536, 128, 8)]


class Bench:
    """Device, data type and clock of the timings."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.dtype = torch.float32 if dry else torch.bfloat16
        self.rng = torch.Generator(self.device).manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        """Draw a normal tensor of the layer's dtype."""
        return torch.randn(shape, generator=self.rng, device=self.device).to(self.dtype)

    def microseconds(self, run: Callable[[], Any], seconds: float = 0.3, inner: int = 1) -> float:
        """Measure the median time of a run, after a warm-up; `inner` runs are timed together."""
        times: list[float] = []
        for _ in range(2):
            run()
        begin = time.perf_counter()
        while len(times) < 5 or (time.perf_counter() - begin < seconds and len(times) < 200):
            times.append(self._once(run, inner) / inner)
            if self.dry:
                break
        return statistics.median(times)

    def _once(self, run: Callable[[], Any], inner: int) -> float:
        if self.dry:
            begin = time.perf_counter()
            for _ in range(inner):
                run()
            return (time.perf_counter() - begin) * 1e6
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(inner):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def graph(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Capture the run as a CUDA graph, so that the host's launches aren't timed."""
        if self.dry:
            return run
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay


def favoured(bench: Bench, tokens: int, experts: int) -> Tensor:
    """Draw [T, E] float32 logits with favourites, so that devices are loaded unevenly."""
    logits = torch.randn(tokens, experts, generator=bench.rng, device=bench.device)
    return logits + 0.5 * torch.randn(experts, generator=bench.rng, device=bench.device)


def router(bench: Bench, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Time the cap beside fused softmax and top-k."""
    tokens, experts, k = shape
    logits = favoured(bench, tokens, experts)
    placement = ExpertPlacement.contiguous(experts, min(DEVICES, experts))

    def floor() -> tuple[Tensor, Tensor, Tensor]:
        scores = logits.softmax(-1)
        weights, ids = scores.topk(k, dim=-1)
        return scores, weights, ids

    def capped(policy: CapacityPolicy) -> Any:
        scores, weights, ids = floor()
        return route(RoutingInputs(ids, weights, scores), policy, placement)

    inner = 1 if bench.dry else 20
    result: dict[str, Any] = {"shape": shape}
    result["floor"] = base = bench.microseconds(bench.graph(floor), inner=inner)
    result["floor_compiled"] = (
        None if bench.dry else bench.microseconds(bench.graph(torch.compile(floor)), inner=inner)
    )
    for unit in ("device", "expert"):
        policy = CapacityPolicy(capacity_factor=1.0, unit=unit, min_expert_load=0)
        for backend in ("cuda", "plain"):
            with using_backend(backend):
                whole = bench.microseconds(bench.graph(partial(capped, policy)), inner=inner)
            result[f"{backend} {unit}"] = {"whole": whole, "cap": whole - base}
    return result


class Experts:
    """Gated experts of a layer, as grouped matrix products over rows sorted by expert."""

    def __init__(self, bench: Bench, layer: Layer) -> None:
        self.up = bench.random(layer.experts, layer.hidden, 2 * layer.inner) * 0.02
        self.down = bench.random(layer.experts, layer.inner, layer.hidden) * 0.02

    def __call__(self, rows: Tensor, ends: Tensor, first: int = 0) -> Tensor:
        """Run [n, hidden] rows: those up to ends[i] are of expert first + i, later ones of none."""
        last = first + ends.shape[0]
        gate, up = _grouped(rows, self.up[first:last], ends).chunk(2, dim=-1)
        return _grouped(torch.nn.functional.silu(gate) * up, self.down[first:last], ends)


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    if rows.is_cuda:
        product: Tensor = torch._grouped_mm(rows, weights, offs=ends)
        return product
    result = rows.new_zeros(rows.shape[0], weights.shape[2])
    start = 0
    for weight, end in zip(weights, ends.tolist(), strict=True):
        result[start:end] = rows[start:end] @ weight
        start = end
    return result


def moe(
    experts: Experts, x: Tensor, logits: Tensor, layer: Layer, policy: CapacityPolicy | None
) -> Tensor:
    """Run the layer after its router's linear, [T, hidden] -> [T, hidden], without a host sync."""
    scores = logits.softmax(-1)
    weights, ids = scores.topk(layer.k, dim=-1)
    if policy is not None:
        placement = ExpertPlacement.contiguous(layer.experts, min(DEVICES, layer.experts))
        assignment = route(RoutingInputs(ids, weights, scores), policy, placement)
        ids, weights = assignment.topk_ids, assignment.topk_weights
    flat, order = ids.flatten().sort(stable=True)
    counts = torch.zeros(layer.experts + 1, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    ends = counts[:-1].cumsum(0).to(torch.int32)
    token = order // layer.k
    rows = experts(x[token], ends)
    there = torch.arange(rows.shape[0], device=x.device) < ends[-1]  # others hold anything
    rows = torch.where(there[:, None], rows, 0) * weights.flatten()[order][:, None].to(x.dtype)
    return torch.zeros_like(x).index_add_(0, token, rows)


def one_layer(bench: Bench, name: str, layer: Layer, tokens: int, experts: Experts) -> Any:
    """Time the layer with and without a cap, and its emulated ranks."""
    x, logits = bench.random(tokens, layer.hidden), favoured(bench, tokens, layer.experts)
    whole = bench.microseconds(partial(moe, experts, x, logits, layer, None))
    result: dict[str, Any] = {"layer": name, "tokens": tokens, "uncapped": whole}
    unbound = CapacityPolicy(capacity_factor=1e6, min_expert_load=0)  # the cap's cost alone
    result["cap that never binds"] = bench.microseconds(
        partial(moe, experts, x, logits, layer, unbound)
    )
    scores = logits.softmax(-1)
    weights, ids = scores.topk(layer.k, dim=-1)
    inputs = RoutingInputs(ids, weights, scores)
    placement = ExpertPlacement.contiguous(layer.experts, min(DEVICES, layer.experts))
    for factor in FACTORS:
        policy = CapacityPolicy(capacity_factor=factor, min_expert_load=0)
        assignment = route(inputs, policy, placement)
        if "emulated ranks uncapped" not in result:
            before = assignment.expert_loads_before.tolist()
            result["emulated ranks uncapped"] = ranks(bench, layer, experts, placement, before)
        after = assignment.expert_loads_after.tolist()
        result[f"factor {factor}"] = {
            "whole layer": bench.microseconds(partial(moe, experts, x, logits, layer, policy)),
            "gate mass kept": float(assignment.gate_mass_kept),
            "emulated ranks": ranks(bench, layer, experts, placement, after),
        }
    return result


def ranks(
    bench: Bench, layer: Layer, experts: Experts, placement: ExpertPlacement, loads: list[int]
) -> dict[str, Any]:
    """Time each rank's experts on the rows that they would get, one rank after the other."""
    times, rows = [], []
    for device in range(placement.num_devices):
        own = placement.experts_of(device)
        counts = torch.tensor([loads[expert] for expert in own])
        ends = counts.cumsum(0).to(bench.device, torch.int32)
        x = bench.random(max(1, int(counts.sum())), layer.hidden)
        times.append(bench.microseconds(partial(experts, x, ends, own[0]), 0.05))
        rows.append(int(counts.sum()))
    return {"slowest": max(times), "mean": statistics.mean(times), "each": times, "rows": rows}


def ridge(bench: Bench, name: str, layer: Layer, experts: Experts) -> dict[str, Any]:
    """Time one rank against equal rows per expert."""
    local = max(1, layer.experts // DEVICES)
    counts = (4, 8) if bench.dry else (1, 4, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 4096)
    times = {}
    for count in counts:
        ends = (torch.arange(1, local + 1, device=bench.device) * count).to(torch.int32)
        x = bench.random(local * count, layer.hidden)
        times[count] = bench.microseconds(partial(experts, x, ends), 0.05)
    return {"layer": name, "experts": local, "microseconds by rows an expert": times}


def plugin(bench: Bench, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Check a captured graph of the vLLM plugin's operator while policy and padding change.

    Raises:
        AssertionError: if a replay differs from `route` on the host.
        RuntimeError: if the operator waits for the device.
    """
    tokens, experts, k = shape
    logits = favoured(bench, tokens, experts)
    placement = ExpertPlacement.contiguous(experts, min(DEVICES, experts // 4))
    scores = logits.softmax(-1)
    chosen_weights, chosen = scores.topk(k, dim=-1)
    start = CapacityPolicy(capacity_factor=1.0, min_expert_load=1, max_active=0.5)
    cap = DeviceCap(start, placement, k, tokens, bench.device)
    ids, weights = chosen.int(), chosen_weights.clone()
    valid = torch.ones(tokens, dtype=torch.bool, device=bench.device)

    def run() -> None:
        ids.copy_(chosen)
        weights.copy_(chosen_weights)
        cap(weights, ids, chosen_weights, valid)

    run()
    if not bench.dry:  # kernels are compiled by now: from here on nothing may wait
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        run()
        torch.cuda.set_sync_debug_mode("default")
    replay, checked = bench.graph(run), 0
    changes: tuple[dict[str, Any], ...] = (
        {}, {"capacity_factor": 0.7}, {"mode": "shadow"}, {"min_expert_load": 1e6},
        {"min_expert_load": 1e6, "max_active": 1}, {"min_expert_load": 1e6, "max_active": None},
    )  # fmt: skip
    for change in changes:
        policy = start.replace(**change)
        cap.set_policy(policy)
        for real in (tokens, tokens // 3):
            valid.copy_(torch.arange(tokens, device=bench.device) < real)
            replay()
            inputs = RoutingInputs(
                chosen.cpu(), chosen_weights.cpu(), scores.cpu(), valid=valid.cpu()
            )
            kept = route(inputs, policy, placement).kept
            lost = ~kept & valid.cpu().unsqueeze(1)
            assert torch.equal(ids.cpu(), torch.where(lost, -1, chosen.cpu()).int()), change
            assert torch.equal(weights.cpu() == 0, lost), change
            checked += int(lost.sum())
    cap.set_policy(None)
    replay()
    assert torch.equal(ids, chosen.int())
    inner = 1 if bench.dry else 20
    return {
        "shape": shape,
        "dropped in all checks": checked,
        "microseconds": bench.microseconds(replay, inner=inner),
    }


def gpu_tests() -> dict[str, Any]:
    """Run the GPU tests; their closing line and whether they passed."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/routing/test_kernels_gpu.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return {"passed": done.returncode == 0, "said": lines[-1] if lines else done.stderr[-500:]}


def main() -> None:
    """Run all parts and write one JSON file; each part is written as soon as it is known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/gpu_check.json")
    parser.add_argument("--seconds", type=float, default=330, help="start no new shape after this")
    args = parser.parse_args()
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        sys.exit("benchmarks/gpu_check.py needs a CUDA device; --dry-run exercises it on a CPU.")
    bench, begin = Bench(args.dry_run), time.perf_counter()
    document: dict[str, Any] = {"environment": system_info(), "dry_run": args.dry_run}
    document["environment"]["gpu"] = None if args.dry_run else torch.cuda.get_device_name()
    layers, tokens, routers = dict(LAYERS), TOKENS, ROUTERS
    if args.dry_run:
        layers, tokens, routers = {"tiny": Layer(8, 2, 16, 8)}, [64], [(48, 8, 2)]

    def add(part: str, result: Any) -> None:
        document.setdefault(part, []).append(result)
        document["seconds"] = time.perf_counter() - begin
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(part, json.dumps(result), flush=True)

    with torch.inference_mode():
        if not args.dry_run:
            add("tests", gpu_tests())
        for shape in routers:
            add("router", router(bench, shape))
        for shape in routers:
            add("plugin", plugin(bench, shape))
        for name, layer in layers.items():
            experts = Experts(bench, layer)
            add("ridge", ridge(bench, name, layer, experts))
            for count in tokens:
                if time.perf_counter() - begin > args.seconds:
                    add("skipped for time", [name, count])
                    continue
                add("layers", one_layer(bench, name, layer, count, experts))
            del experts
    print(f"wrote {args.json.name} after {document['seconds']:.0f} s")


if __name__ == "__main__":
    main()
