"""First token, decode and load of a real vLLM server of two ranks: policies take turns in it.

    make .venv-vllm/.ready && .venv-vllm/bin/python benchmarks/vllm_server.py

`paceline serve`, tensor + expert parallelism over two processes with a core each, float32. The
model is random: 474 million weights, six layers of 32 experts of 768 x 1,024, 4 of which serve a
token. Each token id is of one of two kinds, and routers prefer the experts of one rank for a kind.

First token: eight prompts of 256 tokens, of one kind or four of each, until all have answered. In
each round every policy is put in force once, in an order of the round's own, and its time is
compared with that without a policy (off) in the same round; a second off shows what is noise.
Amdahl's bound comes from the same runs: a worker extension times the experts' kernel below the
plugin and counts its rows, and the bound is what the server would gain if the kernel's time on the
busiest rank fell as its rows do and nothing else changed. Decode: eight requests of 4 + 32 tokens.
Load: Poisson arrivals of prompts of one kind with 8 new tokens each, the same arrivals for every
policy, at two rates relative to what the server can do without a cap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.bench.timing import shuffled, spread
from paceline.files import to_json, write_text
from paceline.system_info import system_info

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "vllm_server.json"
VOCABULARY, EXPERTS = 4096, 32
PROMPTS, LENGTH, NEW = 8, 256, 8
POLICIES = {
    "off": None,
    "off again": None,
    "cap that can't bind": "capacity_factor=1000",
    "1.25": "capacity_factor=1.25",
    "1.0": "capacity_factor=1.0",
}
LOADS = (0.6, 0.9)


def random_model(folder: Path) -> str:
    """Write the model; its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "olmoe", vocab_size=VOCABULARY, hidden_size=768, intermediate_size=1024,
        num_hidden_layers=6, num_attention_heads=12, num_key_value_heads=12, num_experts=EXPERTS,
        num_experts_per_tok=4, max_position_embeddings=512, tie_word_embeddings=False,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    kind = torch.ones(VOCABULARY, 1)
    kind[VOCABULARY // 2 :] = -1
    side = torch.ones(EXPERTS, 1)
    side[EXPERTS // 2 :] = -1
    own = slice(0, 32)  # directions of hidden states that hold the kind and that no layer changes
    with torch.no_grad():
        model.model.embed_tokens.weight[:, own] = 0.1 * kind
        for layer in model.model.layers:
            for added in (layer.self_attn.o_proj.weight, layer.mlp.experts.down_proj):
                added *= 0.05  # a random layer drowns the tokens in what all of them share
                added[..., own, :] = 0
            layer.mlp.gate.weight[:, own] = SKEW * side
    model.save_pretrained(folder)
    return str(folder)


SKEW = 0.0017
"""How much routers prefer the experts of a token's kind."""


class Server:
    """A server of two ranks."""

    def __init__(self, model: str, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for /collective_rpc alone
            "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
            "MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
        }  # fmt: skip
        command = [
            sys.executable, "-m", "paceline", "serve", model, "--policy", "capacity_factor=1000",
            "--tensor-parallel-size", "2", "--enable-expert-parallel", "--dtype", "float32",
            "--enforce-eager", "--max-model-len", "512", "--max-num-batched-tokens", "2048",
            "--skip-tokenizer-init", "--no-enable-prefix-caching", "--port", str(self.port),
            "--served-model-name", "model", "--disable-uvicorn-access-log",
            "--worker-extension-cls", "kernel_times.KernelTimes",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, env=environ, stdout=log.open("w"), stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        while True:
            if self._process.poll() is not None:
                raise SystemExit(log.read_text()[-3000:])
            try:
                self.ask("GET", "/health")
                break
            except OSError:
                time.sleep(0.5)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the answer, JSON where it is."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def set(self, policy: str | None) -> None:
        """Put a policy in force."""
        if policy is None:
            self.ask("DELETE", "/paceline/policy")
        else:
            self.ask("POST", "/paceline/policy", {"policy": policy})

    def kernel_calls(self) -> list[list[tuple[float, int]]]:
        """Return (seconds, rows) per kernel call of every rank since the last question."""
        answer = self.ask("POST", "/collective_rpc", {"method": "taken_calls"})
        calls = [json.loads(text) for text in answer["results"]]
        if len({len(of_rank) for of_rank in calls}) != 1:
            raise SystemExit("the ranks' kernels must have run equally often")
        return calls

    def complete(self, prompts: list[list[int]], tokens: int) -> float:
        """Return the seconds until all prompts have so many tokens."""
        body = {"model": "model", "prompt": prompts, "max_tokens": tokens, "ignore_eos": True,
                "temperature": 0, "detokenize": False}  # fmt: skip
        start = time.perf_counter()
        self.ask("POST", "/v1/completions", body)
        return time.perf_counter() - start

    def stop(self) -> None:
        """End it and its processes."""
        os.killpg(self._process.pid, 9)
        self._process.wait()


def prompts_of(
    kind: str, length: int = LENGTH, seed: int = 0, count: int = PROMPTS
) -> list[list[int]]:
    """Return prompts of the first kind, or of both in turn."""
    rng, half = random.Random(seed), VOCABULARY // 2
    first = [half if kind == "mixed" and number % 2 else 3 for number in range(count)]
    return [[rng.randrange(at, half + (at == half) * half) for _ in range(length)] for at in first]


def first_token(server: Server, kind: str, rounds: int) -> dict[str, Any]:
    """Time the prompts under all policies; return ratios and bounds."""
    prompts = prompts_of(kind)
    seconds: dict[str, list[float]] = {name: [] for name in POLICIES}
    kernel: dict[str, list[float]] = {name: [] for name in POLICIES}
    rows: dict[str, tuple[int, int]] = {}
    for turn in range(-1, rounds):  # the first one is a warm-up
        for name in shuffled(list(POLICIES), max(turn, 0)):
            server.set(POLICIES[name])
            server.kernel_calls()
            took = server.complete(prompts, 1)
            calls = list(zip(*server.kernel_calls(), strict=True))
            busiest = sum(max(rows for _, rows in call) for call in calls)
            total = sum(rows for call in calls for _, rows in call)
            if turn >= 0:
                seconds[name].append(took)
                kernel[name].append(sum(max(spent for spent, _ in call) for call in calls))
                rows[name] = busiest, total
    off, off_kernel = (statistics.median(values["off"]) for values in (seconds, kernel))
    found: dict[str, Any] = {
        "off_seconds": spread(seconds["off"]),
        "kernel_share_on_the_busiest_rank": off_kernel / off,
        "load_of_the_busiest_rank": rows["off"][0] / rows["off"][1],
        "policies": {},
    }
    for name in POLICIES:
        pairs = list(zip(seconds["off"], seconds[name], strict=True))
        faster = [before / after for before, after in pairs]
        bound = off / (off - off_kernel * (1 - rows[name][0] / rows["off"][0]))
        found["policies"][name] = {
            "times_as_soon": spread(faster),
            "standard_error_of_the_mean": statistics.stdev(faster) / len(faster) ** 0.5,
            "mean": statistics.mean(faster),
            "amdahl_bound": bound,
            "kernel_times_as_fast": off_kernel / statistics.median(kernel[name]),
            "rows_dropped": 1 - rows[name][1] / rows["off"][1],
            "rows_of_the_busiest_rank": rows[name][0] / rows["off"][0],
        }
        show(kind, name, found["policies"][name])
    print(kind, to_json({n: v for n, v in found.items() if n != "policies"}), flush=True)
    return found


def decode(server: Server, rounds: int) -> dict[str, Any]:
    """Time decode steps of eight requests; ratios to off."""
    prompts, seconds = prompts_of("one kind", 4), {name: list[float]() for name in POLICIES}
    for turn in range(-1, rounds):
        for name in shuffled(list(POLICIES), max(turn, 0)):
            server.set(POLICIES[name])
            took = server.complete(prompts, 33) - server.complete(prompts, 1)
            if turn >= 0:
                seconds[name].append(took)
    return {
        name: spread([off / own for off, own in zip(seconds["off"], seconds[name], strict=True)])
        for name in POLICIES
    }


def load(server: Server, rate: float, requests: int, repeats: int) -> dict[str, Any]:
    """Send the same Poisson arrivals under off and every cap that binds, in turn."""
    names = ("off", "1.25", "1.0")
    seen: dict[str, list[Any]] = {name: [] for name in names}
    for turn in range(repeats):
        for name in shuffled(list(names), turn):
            server.set(POLICIES[name])
            seen[name].append(asyncio.run(_arrivals(server.port, rate, requests, seed=turn)))
    found: dict[str, Any] = {"requests_per_second": rate, "requests": requests * repeats}
    for name in names:
        firsts = [first for run, _ in seen[name] for first, _ in run]
        steps = [step for run, _ in seen[name] for _, steps in run for step in steps]
        tokens = sum(len(steps) + 1 for run, _ in seen[name] for _, steps in run)
        found[name] = {
            "first_token_seconds": _percentiles(firsts),
            "next_token_seconds": _percentiles(steps),
            "new_tokens_per_second": tokens / sum(took for _, took in seen[name]),
        }
        print(f"{rate:.2f} requests/s, {name}: {to_json(found[name])}", flush=True)
    return found


async def _arrivals(
    port: int, rate: float, requests: int, seed: int
) -> tuple[list[tuple[float, list[float]]], float]:
    """Return first-token time and times between tokens of every request, and all seconds."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600)
    prompts, rng = prompts_of("one kind", seed=seed + 1, count=requests), random.Random(seed)

    async def one(prompt: list[int]) -> tuple[float, list[float]]:
        times = [time.perf_counter()]
        stream = await client.completions.create(
            model="model", prompt=prompt, max_tokens=NEW, temperature=0, stream=True,
            extra_body={"ignore_eos": True, "detokenize": False, "return_token_ids": True},
        )  # fmt: skip
        async for part in stream:
            if part.choices:
                times.append(time.perf_counter())
        return times[1] - times[0], [b - a for a, b in pairwise(times[1:])]

    start, running = time.perf_counter(), []
    for prompt in prompts:
        running.append(asyncio.create_task(one(prompt)))
        await asyncio.sleep(rng.expovariate(rate))
    found = list(await asyncio.gather(*running)), time.perf_counter() - start
    await client.close()
    return found


def _percentiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{part}": cuts[part - 1] for part in (50, 95, 99)}


def show(kind: str, name: str, found: dict[str, Any]) -> None:
    """Print a policy's line."""
    ratio = found["times_as_soon"]
    print(
        f"{kind}, {name:20} first token {ratio['median']:.3f} ({ratio['min']:.3f} to "
        f"{ratio['max']:.3f}) times as soon as off, at most {found['amdahl_bound']:.3f}; mean "
        f"{found['mean']:.3f} +- {found['standard_error_of_the_mean']:.3f}; "
        f"{found['rows_dropped']:.1%} dropped",
        flush=True,
    )


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=50, help="per run of a load")
    parser.add_argument("--repeats", type=int, default=1, help="runs per policy and load")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    data: dict[str, Any] = {
        "schema": "paceline-vllm-server/1", "vllm": version("vllm-cpu"),
        "rounds": options.rounds, "ranks": 2, "threads_per_rank": 1,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        server = Server(random_model(Path(folder) / "model"), Path(folder) / "log")
        try:
            fewer = max(options.rounds // 4, 2)
            data["first_token"] = {
                "one kind": first_token(server, "one kind", options.rounds),
                "mixed": first_token(server, "mixed", fewer),
            }
            data["decode_times_as_fast"] = decode(server, fewer)
            server.set(None)
            whole = server.complete(prompts_of("one kind"), NEW)
            data["load"] = {
                str(part): load(server, part * PROMPTS / whole, options.requests, options.repeats)
                for part in LOADS
            }
        finally:
            server.stop()
    write_text(options.out, to_json({**data, **system_info()}), private=False)


if __name__ == "__main__":
    main()
