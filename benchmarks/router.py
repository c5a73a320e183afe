"""The router against its floor and its peers: softmax, top-k and cap over softmax and top-k alone.

    python benchmarks/router.py                       every backend and installed peer, one thread
    python benchmarks/router.py --shapes 4096,64,8 --rounds 50
    python benchmarks/router.py --plot router.html    cost against T and against E as well
    python benchmarks/router.py --only-costs          memory and first-use compile time alone

Before timing, every backend has to keep the same set as the reference, and the same as each peer
where both define one (a cap per expert, ranked by score). Then all take turns, and each round
gives one ratio to the floor of the same round. Peers: `pip install 'paceline[peers]'`; one that
can't be imported is named and left out. A quiet machine is needed: its load is in the results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline import Assignment, CapacityPolicy, ExpertPlacement, RoutingInputs, route
from paceline.bench.timing import ratios, spread, turns
from paceline.routing.backends import BACKENDS, using_backend
from paceline.system_info import system_info

SHAPES = [(512, 8, 2), (4096, 64, 8), (16384, 64, 8), (4096, 256, 8), (65536, 128, 8)]
RESULTS = Path(__file__).parent / "results" / "router.json"
Router = Callable[[], Any]
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


@dataclass
class Entry:
    """One way to route, and the [T, E] set that it keeps."""

    name: str
    run: Router
    kept: Callable[[Any], Tensor]


def skewed_logits(tokens: int, experts: int) -> Tensor:
    """Draw [T, E] logits with favourites: the busiest expert gets some twice its share."""
    rng = torch.Generator().manual_seed(tokens + experts)
    favour = torch.randn(experts, generator=rng) * 0.3
    return torch.randn(tokens, experts, generator=rng) + favour


def floor(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute [T, E] scores, [T, k] weights and [T, k] ids, as any router does."""
    scores = logits.softmax(dim=-1)
    weights, ids = scores.topk(k, dim=-1)
    return scores, weights, ids


def cases(
    tokens: int, experts: int
) -> dict[str, tuple[CapacityPolicy, ExpertPlacement, Tensor | None]]:
    """Return the measured cases: name -> policy, placement and the tokens' devices."""
    common: dict[str, Any] = {"capacity_factor": 1.0, "min_expert_load": 0}
    eight = ExpertPlacement.contiguous(experts, min(8, experts))
    found: dict[str, tuple[CapacityPolicy, ExpertPlacement, Tensor | None]] = {
        "expert": (
            CapacityPolicy(unit="expert", **common),
            ExpertPlacement.per_expert(experts),
            None,
        ),
        "device": (CapacityPolicy(unit="device", **common), eight, None),
    }
    if experts > 8:
        local = ExpertPlacement.contiguous(experts, experts // 8)
        source = torch.arange(tokens) * local.num_devices // tokens
        found["expanded"] = (CapacityPolicy(expand="own_device", **common), local, source)
    return found


def ours(logits: Tensor, k: int, backends: list[str]) -> list[Entry]:
    """Make entries of Token Drop at either unit and Expanded Drop, on every backend."""
    entries = []
    for backend in backends:
        for name, (policy, placement, of_token) in cases(*logits.shape).items():

            def run(
                backend: str = backend,
                policy: CapacityPolicy = policy,
                placement: ExpertPlacement = placement,
                of_token: Tensor | None = of_token,
            ) -> Assignment:
                with using_backend(backend):
                    scores, weights, ids = floor(logits, k)
                    inputs = RoutingInputs(ids, weights, scores, token_source=of_token)
                    return route(inputs, policy, placement)

            entries.append(Entry(f"paceline/{backend} {name}", run, dense))
    return entries


def dense(assignment: Assignment) -> Tensor:
    """Mark the experts that a token keeps, [T, E] bool."""
    ids, experts = assignment.topk_ids, assignment.num_experts
    marks = torch.zeros((ids.shape[0], experts + 1), dtype=torch.bool)
    return marks.scatter_(1, ids, True)[:, :experts]


def megatron(logits: Tensor, k: int) -> Entry:
    """Make an entry of Megatron-Core's top-k with its capacity, dropping by probability."""
    from megatron.core.transformer.moe import moe_utils

    def run() -> tuple[Tensor, Tensor]:
        probs, chosen = moe_utils.topk_routing_with_score_function(logits, k, use_pre_softmax=True)
        kept: tuple[Tensor, Tensor] = moe_utils.apply_router_token_dropping(
            probs, chosen, router_topk=k, capacity_factor=1.0, drop_policy="probs"
        )
        return kept

    return Entry(f"megatron-core {version('megatron-core')}", run, lambda kept: kept[1])


def deepspeed(logits: Tensor, k: int) -> Entry:
    """Make an entry of DeepSpeed's top-k gating with sparse routes, dropping by probability."""
    from deepspeed.moe.sharded_moe import topkgating

    def run() -> Any:
        return topkgating(logits, k, 1.0, min_capacity=0, drop_policy="probs", sparse_routes=True)

    def kept(result: Any) -> Tensor:
        routes = result[3].long()
        routes = routes if routes.shape[0] == logits.shape[0] else routes.T
        experts = logits.shape[1]
        marks = torch.zeros((logits.shape[0], experts + 1), dtype=torch.bool)
        return marks.scatter_(1, torch.where(routes < 0, experts, routes), True)[:, :experts]

    return Entry(f"deepspeed {version('deepspeed')}", run, kept)


def peers(logits: Tensor, k: int) -> list[Entry]:
    """Make an entry of each installed peer; print which are missing, and why."""
    found = []
    for make in (megatron, deepspeed):
        try:
            found.append(make(logits, k))
        except Exception as error:  # whatever a foreign package does at import
            print(f"  left out: {make.__name__} ({type(error).__name__}: {error})")
    return found


def check(entries: list[Entry], logits: Tensor, k: int) -> dict[str, bool]:
    """Check that each keeps the set of the first of its kind; ours must, peers are reported."""
    by_kind: dict[str, Tensor] = {}
    same = {}
    for entry in entries:
        mine = entry.name.startswith("paceline")
        kind = entry.name.rsplit(" ", 1)[1] if mine else "expert"
        kept = entry.kept(entry.run())
        want = by_kind.setdefault(kind, kept)
        same[entry.name] = bool(torch.equal(kept, want))
        if kind == "expert":
            limit = ceil(logits.shape[0] * k / logits.shape[1])
            if int(kept.sum(0).max()) > limit:
                raise RuntimeError(f"{entry.name} exceeds its capacity.")
        if mine and not same[entry.name]:
            raise RuntimeError(f"{entry.name} keeps another set.")
    return same


def measure(
    entries: list[Entry], base: Router, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Time every entry in each round, the floor ("floor") with them, in another order each time."""
    runs: dict[str, Router] = {"floor": base, **{entry.name: entry.run for entry in entries}}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name, counts in turns(runs, rounds):
        begin = clock()
        runs[name]()
        if counts:
            times[name].append(clock() - begin)
    return times


def against_floor(times: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Return name -> ratio to the floor of the same round (min, median, max), and the time."""
    base = times["floor"]
    table: dict[str, dict[str, Any]] = {}
    for name, own in times.items():
        table[name] = {**ratios(own, base), "microseconds": spread(own)["median"] * 1e6}
    return table


def one_shape(shape: tuple[int, int, int], args: argparse.Namespace) -> dict[str, Any]:
    """Check and time one shape; prints its table."""
    tokens, experts, k = shape
    logits = skewed_logits(tokens, experts)
    print(f"T={tokens} E={experts} k={k}", flush=True)
    entries = ours(logits, k, args.backends)
    if not args.no_peers:
        entries += peers(logits, k)
    with torch.inference_mode():
        same = check(entries, logits, k)
        begin = time.perf_counter()
        measure(entries, lambda: floor(logits, k), 1)
        once = (time.perf_counter() - begin) / 2
        rounds = args.rounds or max(7, min(300, int(args.seconds / once)))
        times = measure(entries, lambda: floor(logits, k), rounds, CLOCKS[args.clock])
        table = against_floor(times)
    print(f"  {'':34}{'min':>8}{'median':>8}{'max':>8}{'us':>11}   same set ({rounds} rounds)")
    for name, row in table.items():
        shown = "".join(f"{row[column]:8.2f}" for column in ("min", "median", "max"))
        print(f"  {name:34}{shown}{row['microseconds']:11.1f}   {same.get(name, '')}", flush=True)
    return {"shape": shape, "rounds": rounds, "ratios": table, "same_set": same}


def in_new_process(function: str, *values: str, **environment: str) -> float:
    """Run a function of this file in a process of its own; its number."""
    call = f"import router; print(router.{function}(*{values!r}))"
    run = subprocess.run(
        [sys.executable, "-c", call],
        env={**os.environ, **environment, "PYTHONPATH": str(Path(__file__).parent)},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return float(run.stdout.split()[-1])


def one_route(backend: str, kind: str, shape: tuple[int, int, int]) -> Router:
    """Prepare one of `cases` without the softmax and top-k before it."""
    torch.set_num_threads(1)
    tokens, experts, k = shape
    scores, weights, ids = floor(skewed_logits(tokens, experts), k)
    policy, placement, source = cases(tokens, experts)[kind]

    def run() -> Assignment:
        with using_backend(backend):
            inputs = RoutingInputs(ids, weights, scores, token_source=source)
            return route(inputs, policy, placement)

    return run


def bytes_an_assignment(backend: str, kind: str) -> float:
    """Measure the peak memory of one call, beyond the inputs, per slot of the result."""
    run, clear = one_route(backend, kind, (65536, 128, 8)), Path("/proc/self/clear_refs")

    def resident(kind: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))

    one_route(backend, kind, (1024, 128, 8))()  # code and tables are there
    clear.write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    slots: int = run().topk_ids.numel()
    return (resident("VmHWM") - before) / slots


def first_call_seconds() -> float:
    """Time the native backend's first call in this process."""
    run = one_route("native", "device", (512, 8, 2))
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def costs(backends: list[str]) -> dict[str, Any]:
    """Measure the memory of each backend, and the native one's first call on a machine."""
    # a freed buffer has to leave the process at once, or the next one hides in its place
    returned = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    found: dict[str, Any] = {"bytes_an_assignment": {}}
    for backend in backends:
        for kind in ("expert", "device", "expanded"):
            bytes_ = in_new_process("bytes_an_assignment", backend, kind, **returned)
            found["bytes_an_assignment"][f"{backend} {kind}"] = round(bytes_, 1)
            print(f"  {backend} {kind}: {bytes_:.1f} bytes per assignment beyond the inputs")
    if "native" in backends:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("compiling_seconds", "cached_seconds"):
                found[name] = in_new_process("first_call_seconds", NUMBA_CACHE_DIR=folder)
                print(f"  native, first call of a process, {name}: {found[name]:.2f}")
    return found


SWEEPS: dict[str, list[tuple[int, int, int]]] = {
    "T (E=64, k=8)": [(t, 64, 8) for t in (1024, 2048, 4096, 8192, 16384, 32768, 65536)],
    "E (T=4096, k=8)": [(4096, e, 8) for e in (16, 32, 64, 128, 256)],
}


def plot(sweeps: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Plot the time of a call against T and against E, as a page, or (with kaleido) a picture."""
    from plotly import graph_objects
    from plotly.colors import qualitative
    from plotly.subplots import make_subplots

    figure = make_subplots(1, 2, subplot_titles=[f"against {name}" for name in sweeps])
    for column, (name, rows) in enumerate(sweeps.items(), 1):
        sizes = [row["shape"][0 if name[0] == "T" else 1] for row in rows]
        drawn = [entry for entry in rows[-1]["ratios"] if not entry.endswith("device")]
        for number, entry in enumerate(drawn):
            figure.add_trace(
                graph_objects.Scatter(
                    x=sizes,
                    y=[row["ratios"].get(entry, {}).get("microseconds") for row in rows],
                    name=entry,
                    legendgroup=entry,
                    showlegend=column == 1,
                    line={"color": qualitative.Dark24[number]},
                ),
                row=1,
                col=column,
            )
        ticks = {"tickvals": sizes, "ticktext": [f"{size:,}" for size in sizes]}
        figure.update_xaxes(type="log", title=name[0], row=1, col=column, **ticks)
        figure.update_yaxes(type="log", title="microseconds per call", row=1, col=column)
    labels = {1e3: "1k", 3e3: "3k", 1e4: "10k", 3e4: "30k", 1e5: "100k", 3e5: "300k"}
    figure.update_yaxes(tickvals=list(labels), ticktext=list(labels.values()))
    figure.update_layout(
        template="plotly_white", legend={"orientation": "h", "y": -0.2}, margin={"t": 40}
    )
    if file.suffix == ".html":
        figure.write_html(file)
    else:
        figure.write_image(file, width=1100, height=520)
    print(f"wrote {file}")


def main() -> None:
    """Run the shapes and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", nargs="*", help="T,E,k of each (default: all)")
    parser.add_argument("--backends", nargs="*", choices=list(BACKENDS), help="default: on CPU all")
    parser.add_argument("--rounds", type=int, default=0, help="default: as --seconds allow")
    parser.add_argument("--seconds", type=float, default=10, help="for each shape")
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="cpu: where others use the machine"
    )
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--json", type=Path, default=RESULTS, help=f"default: {RESULTS.name}")
    parser.add_argument("--only-costs", action="store_true", help="no timing; writes nothing")
    parser.add_argument("--plot", type=Path, help="cost against T and E, to this .html or .svg")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.backends is None:
        args.backends = ["plain", *(["native"] if find_spec("numba") else [])]
    if args.only_costs:
        costs(args.backends)
        return
    shapes = [tuple(map(int, text.split(","))) for text in args.shapes or []] or SHAPES
    document = {
        "environment": system_info(),
        "threads": 1,
        "clock": args.clock,
        "capacity_factor": 1.0,
    }
    for name in ("numba", "megatron-core", "deepspeed"):
        try:
            document["environment"]["versions"][name] = version(name)
        except Exception:  # not installed
            continue
    document["shapes"] = [one_shape(shape, args) for shape in shapes]  # type: ignore[arg-type]
    document["costs"] = costs(args.backends)
    if args.plot:
        document["sweeps"] = {
            name: [one_shape(shape, args) for shape in shapes] for name, shapes in SWEEPS.items()
        }
        plot(document["sweeps"], args.plot)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
