"""Cost and gain of the cap inside SGLang: policies take turns in one running server.

    make .venv-sglang/.ready && .venv-sglang/bin/python benchmarks/sglang_cap.py

Prefill of 2,048 tokens, eight prompts in one request, by a random model of 100 million weights,
whose 32 experts are 512 x 1,024 and 4 of which serve a token; one core, float32. In each round
every policy is put in force once, in an order of the round's own, and its time by the clock on the
wall is taken relative to that without a policy (off) in the same round: 1.00 costs nothing. A
second off shows what is noise. Devices are emulated: one process runs all rows. Prints a table,
writes results/sglang_cap.json.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_cap import big_model

from paceline.bench.timing import shuffled, spread
from paceline.files import to_json, write_text
from paceline.system_info import system_info

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "sglang_cap.json"
STUB = HERE.parent / "tests" / "engines" / "sglang" / "stubs"  # where torchvision is missing
PROMPTS, LENGTH = 8, 256
POLICIES = {
    "off": None,
    "off again": None,
    "cap that can't bind": "capacity_factor=1000,pool=batch",
    "1.25 per device": "capacity_factor=1.25,pool=batch",
    "1.0 per device": "capacity_factor=1.0,pool=batch",
}
FLAGS = {
    "device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch",
    "mem-fraction-static": "0.3", "max-total-tokens": "8192", "dtype": "float32",
    "chunked-prefill-size": "4096", "max-prefill-tokens": "4096",
}  # fmt: skip


class Server:
    """A capped server of one process on one core."""

    def __init__(self, model: str, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        path = [str(STUB)] if find_spec("torchvision") is None else []
        own = {
            "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
        }  # fmt: skip
        flags = [part for name, value in FLAGS.items() for part in (f"--{name}", value)]
        command = [
            sys.executable, "-c", "from paceline.cli import main; main()", "serve", model,
            "--engine", "sglang", "--policy", "capacity_factor=1000,pool=batch", "--devices", "8",
            "--port", str(self.port), "--skip-tokenizer-init", "--skip-server-warmup",
            "--disable-cuda-graph", "--disable-overlap-schedule", *flags,
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, env={**os.environ, **own}, stdout=log.open("w"), stderr=subprocess.STDOUT,
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

    def prefill(self, policy: str | None, prompts: list[list[int]]) -> tuple[float, float]:
        """Return seconds of the prompts under a policy, and the share of assignments dropped."""
        if policy is None:
            before = self.ask("DELETE", "/paceline/policy")
        else:
            body = {"policy": policy, "keep_cache": True}
            before = self.ask("POST", "/paceline/policy", body)
        sampling = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
        start = time.perf_counter()
        self.ask("POST", "/generate", {"input_ids": prompts, "sampling_params": sampling})
        seconds = time.perf_counter() - start
        after = self.ask("GET", "/paceline/policy")
        more = [
            after["workers"][0][name] - before["workers"][0][name]
            for name in ("dropped", "assignments")
        ]
        return seconds, more[0] / more[1] if more[1] else 0.0

    def stop(self) -> None:
        """End it and its processes."""
        os.killpg(self._process.pid, 9)
        self._process.wait()


def main() -> None:
    """Measure and write the results."""
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    rng = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 2048, (PROMPTS, LENGTH), generator=rng).tolist()
    seconds: dict[str, list[float]] = {name: [] for name in POLICIES}
    dropped: dict[str, list[float]] = {name: [] for name in POLICIES}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model").mkdir()
        server = Server(big_model(Path(folder) / "model"), Path(folder) / "log")
        try:
            for turn in range(-1, rounds):  # the first one is a warm-up
                for name in shuffled(list(POLICIES), max(turn, 0)):
                    took, share = server.prefill(POLICIES[name], prompts)
                    if turn >= 0:
                        seconds[name].append(took)
                        dropped[name].append(share)
        finally:
            server.stop()
    found: dict[str, Any] = {}
    for name in POLICIES:
        pairs = zip(seconds[name], seconds["off"], strict=True)
        ratio = spread([own / off for own, off in pairs])
        found[name] = {"of_off": ratio, "dropped_share": sum(dropped[name]) / rounds}
        print(
            f"{name:22} {ratio['median']:.3f} of off ({ratio['min']:.3f} to "
            f"{ratio['max']:.3f}), {found[name]['dropped_share']:.1%} dropped"
        )
    data = {
        "schema": "paceline-sglang-cap/1", "sglang": version("sglang"), "rounds": rounds,
        "tokens": PROMPTS * LENGTH, "devices": 8,
        "off_seconds": spread(seconds["off"]), "policies": found, **system_info(),
    }  # fmt: skip
    write_text(RESULTS, to_json(data), private=False)


if __name__ == "__main__":
    main()
