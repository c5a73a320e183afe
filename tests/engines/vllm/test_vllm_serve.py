"""`paceline serve` with the OpenAI client: changes under load, and counts exact to the row."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from paceline import CapacityPolicy
from paceline.demo.assets import read_text
from paceline.plan import Plan
from paceline.shipped import CALIBRATION_FOLDER
from paceline.traces import open_trace

KEY = "a-secret"
Answer: TypeAlias = tuple[list[str], list[float]]

START_SECONDS = 600  # a slow machine must not turn it red


class Server:
    """A running server."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.port, self.process, self.log = port, process, log
        self.client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, timeout=300)

    def call(self, method: str, path: str, body: Any = None, key: str = KEY) -> tuple[int, str]:
        """Return status and text of an answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def policy(self, method: str = "GET", text: str | None = None) -> dict[str, Any]:
        """Return the answer of /paceline/policy, which must be 200."""
        body = None if text is None else {"policy": text}
        status, answer = self.call(method, "/paceline/policy", body)
        assert status == 200, answer
        return json.loads(answer)  # type: ignore[no-any-return]

    def counted_rows(self) -> int:
        """Return the rows that the kernels of all workers computed, counted below the plugin."""
        status, answer = self.call("POST", "/collective_rpc", {"method": "counted_rows"})
        assert status == 200, answer
        return sum(map(int, json.loads(answer)["results"]))

    def samples(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Return paceline's samples on /metrics as a Prometheus parser reads them."""
        status, answer = self.call("GET", "/metrics")
        assert status == 200
        found: dict[str, dict[tuple[str, ...], float]] = {}
        for family in text_string_to_metric_families(answer):
            for sample in family.samples:
                if sample.name.startswith("paceline_"):
                    labels = tuple(f"{k}={v}" for k, v in sorted(sample.labels.items()))
                    found.setdefault(sample.name, {})[labels] = sample.value
        return found

    def complete_all(self, count: int) -> list[Answer]:
        """Return completions of so many texts, the same every time."""
        return [self.complete(i, 60 + i) for i in range(count)]

    def complete(self, seed: int, length: int, stream: bool = False, tokens: int = 8) -> Answer:
        """Return one completion of a piece of text: its tokens and their log probabilities."""
        text = read_text("prose")[seed * 97 :][: length * 3]
        out = self.client.completions.create(
            model="demo", prompt=text, max_tokens=tokens, temperature=0, stream=stream, logprobs=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        parts = [part.choices[0].logprobs for part in (out if stream else [out]) if part.choices]
        found = [part for part in parts if part is not None]
        return (
            [token for part in found for token in part.tokens],
            [value for part in found for value in part.token_logprobs],
        )


def same(one: list[Answer], other: list[Answer]) -> bool:
    """Return True if answers are the same, but for the order in which numbers are added up."""
    return all(
        a[0] == b[0] and a[1] == pytest.approx(b[1], abs=1e-3)
        for a, b in zip(one, other, strict=True)
    )


@contextmanager
def serving(log: Path, *flags: str, environ: dict[str, str] | None = None) -> Iterator[Server]:
    """Run `paceline serve demo` with flags until the context ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",  # for /collective_rpc alone
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        ),
        "VLLM_LOGGING_LEVEL": "INFO",
        **(environ or {}),
    }
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    command = [
        sys.executable, "-m", "paceline", "serve", "demo", *flags, "--port", str(port),
        "--host", "127.0.0.1", "--api-key", KEY,
        "--worker-extension-cls", "kernel_rows.RowCounter",
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    server = Server(port, process, log)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server didn't start:\n{log.read_text()[-3000:]}")
            try:
                if server.call("GET", "/health")[0] == 200:
                    break
            except OSError:
                time.sleep(1)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def settled(server: Server) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the metrics once they stand still: workers publish every second."""
    before, now = None, server.samples()
    while now != before:
        time.sleep(2.5)
        before, now = now, server.samples()
    return now


def total(samples: dict[tuple[str, ...], float], *labels: str) -> int:
    """Return the sum over the samples that have all these labels."""
    return int(sum(v for known, v in samples.items() if set(labels) <= set(known)))


def totals(samples: dict[str, dict[tuple[str, ...], float]]) -> tuple[int, int, int]:
    """Return assignments before and after the cap, and those dropped."""
    rows = samples["paceline_assignments_total"]
    before, after = total(rows, "stage=before"), total(rows, "stage=after")
    return before, after, total(samples["paceline_dropped_total"])


def test_one_server(tmp_path: Path) -> None:
    with serving(
        tmp_path / "log", "--policy", "capacity_factor=1.0,min_expert_load=0", "--devices", "8",
        "--record", str(tmp_path / "trace"),
    ) as server:  # fmt: skip
        log = server.log.read_text()
        assert "paceline: 4 MoE layers on 8 devices: capacity_factor=1.0" in log
        assert "Experts: one row per kept slot" in log
        assert "paceline: change it at /paceline/policy" in log
        assert "enforce_eager=True" in log  # the embedded model is small
        assert "prefix caching is off" in server.log.read_text()
        body = {"policy": "mode=observe"}
        assert server.call("GET", "/paceline/policy", key="wrong")[0] == 401
        assert server.call("POST", "/paceline/policy", body, "wrong")[0] == 401
        assert server.call("PUT", "/paceline/policy", {})[0] == 405
        described = json.loads(server.call("GET", "/openapi.json")[1])
        assert "/v1/completions" in described["paths"]
        body = described["paths"]["/paceline/policy"]["post"]["requestBody"]
        assert "PolicyRequest" in json.dumps(body)
        state = described["components"]["schemas"]["WorkerState"]["properties"]
        assert set(server.policy()["workers"][0]) == set(state)
        assert server.call("POST", "/paceline/policy", {"policy": "capacity_factor=0"})[0] == 400
        assert server.policy()["fields"]["capacity_factor"] == 1.0

        rows = server.counted_rows()
        with ThreadPoolExecutor(8) as pool:
            lengths = [20 + 11 * i % 300 for i in range(48)]
            jobs = [pool.submit(server.complete, i, n, i % 3 == 0) for i, n in enumerate(lengths)]
            for text in ("capacity_factor=0.7,min_expert_load=0",
                         "capacity_factor=1.5,unit=expert,min_expert_load=0", "start"):  # fmt: skip
                time.sleep(0.5)
                assert server.policy("POST", text)["agree"]
            assert all(len(job.result()[0]) == 8 for job in jobs)

        samples = settled(server)
        below = server.counted_rows() - rows
        before, after, dropped = totals(samples)
        # dropped pairs of experts this small may be computed with weight 0, which is quicker
        computed = total(samples["paceline_dropped_computed_total"])
        assert below == after + computed
        assert dropped == before - after > 0
        assert server.policy()["workers"][0]["dropped"] == dropped
        assert samples["paceline_capped_forwards_total"][()] > 0
        peaks = samples["paceline_device_peak_to_mean"]
        assert peaks[("stage=before",)] > peaks[("stage=after",)]
        assert 0 < samples["paceline_gate_mass_kept"][()] < 1

        # the trace holds all assignments; it is finished while the server runs on
        assert server.call("POST", "/paceline/record", {})[0] == 405
        assert server.call("GET", "/paceline/record", key="wrong")[0] == 401
        status, answer = server.call("DELETE", "/paceline/record")
        assert status == 200
        (recording,) = json.loads(answer)["traces"]
        assert recording == json.loads(server.call("GET", "/paceline/record")[1])["traces"][0]
        assert not recording["recording"]
        trace = open_trace(tmp_path / "trace")
        assert trace.header.chunks is not None
        assert sum(int(chunk.counts.sum()) for chunk in trace.chunks) == before
        assert sum(len(chunk.starts) - 1 for chunk in trace.chunks) == recording["forwards"]

        # the kill switch: nothing is capped or counted, and answers are those of no cap at all
        assert server.policy("DELETE")["off"]
        off = server.complete_all(4)
        server.policy("POST", "capacity_factor=1000")
        assert same(server.complete_all(4), off)
        server.policy("POST", "capacity_factor=0.3,min_expert_load=0")
        assert not same(server.complete_all(4), off)
        shadow = server.policy("POST", "capacity_factor=0.3,min_expert_load=0,mode=shadow")
        assert not shadow["enforced"]
        assert same(server.complete_all(4), off)
        assert server.policy()["workers"][0]["dropped"] > shadow["workers"][0]["dropped"]
        info = settled(server)["paceline_policy_info"]
        assert [labels for labels, value in info.items() if value == 1] == [
            ("policy=capacity_factor=0.3,min_expert_load=0.0,mode=shadow",)
        ]


def test_the_steps_of_the_page(tmp_path: Path) -> None:
    """From a stock server to a capped one, with the commands and bodies of docs/vllm.md."""
    page = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text(encoding="utf-8")
    steps = page.split("## From a stock server")[1].split("```")[1]
    (command,) = re.findall(r"^paceline (serve .*)$", steps, re.MULTILINE)
    assert command.split()[:2] == ["serve", "./my-moe"]
    assert set(command.split()[2:]) == {"--port", "8000"}  # so the server gets no further option
    shadow, cap = (json.loads(body) for body in re.findall(r"-d '(.*)'", steps))
    with serving(tmp_path / "log") as server:
        assert re.search(r"enable_prefix_caching=True", server.log.read_text())
        off = server.complete_all(6)
        assert any(name == "paceline_device_peak_to_mean" for name in server.samples())
        status, answer = server.call("POST", "/paceline/policy", shadow)
        assert status == 200
        assert json.loads(answer)["note"] is None
        status, answer = server.call("POST", "/paceline/policy", cap)
        assert status == 200, answer
        found = json.loads(answer)
        assert found["enforced"]
        assert found["fields"]["pool"] == "request"
        assert "every request has a budget of its own" in found["note"]
        server.policy("POST", cap["policy"].replace("1.25", "0.4") + ",min_expert_load=0")
        assert not same(server.complete_all(6), off)
        assert server.policy("DELETE")["off"]
        assert same(server.complete_all(6), off)


@pytest.mark.long
def test_rungs_of_a_ladder(tmp_path: Path) -> None:
    """A plan as `paceline tune` writes it; rungs change under load, and rows below are counted."""
    fields = "keep=contribution,compensate=true,min_expert_load=0"
    rungs = {name: [f"capacity_factor={name},{fields}"] * 4 for name in ("1.0", "0.5")}
    (tmp_path / "ladder.json").write_text(json.dumps({
        "tokens": {"judge": 4096},
        "rungs": [
            {"bound": float(name), "policies": policies, "change": 0.0012}
            for name, policies in rungs.items()
        ],
    }))  # fmt: skip
    first = CapacityPolicy.parse(rungs["1.0"][0])
    plan = Plan(policies=(first,), placements=(8,), calibration=str(CALIBRATION_FOLDER))
    plan.save(tmp_path / "plan.toml")
    with serving(tmp_path / "log", "--plan", str(tmp_path / "plan.toml")) as server:
        rows, share = server.counted_rows(), {}
        for name in ("1", "0.5", "1"):
            with ThreadPoolExecutor(4) as pool:
                jobs = [pool.submit(server.complete, i, 120) for i in range(8)]
                status, answer = server.call(
                    "POST", "/paceline/policy", {"rung": name, "keep_cache": name == "1"}
                )
                assert all(len(job.result()[0]) == 8 for job in jobs)
            assert status == 200, answer
            found = json.loads(answer)
            assert "changed perplexity by +0.12% on 4,096 tokens" in found["note"]
            assert float(found["fields"]["capacity_factor"]) == float(name)
            before = server.policy()["workers"][0]
            server.complete_all(4)
            after = server.policy()["workers"][0]
            share[name] = (after["dropped"] - before["dropped"]) / (
                after["assignments"] - before["assignments"]
            )
        assert 0.4 < share["0.5"] < 0.6
        assert 0 < share["1"] < 0.3
        last = server.policy()["workers"][0]
        computed = last["assignments"] - last["dropped"] + last["dropped_computed"]
        assert server.counted_rows() - rows == computed
        for body, said in (
            ({"rung": "3"}, "rung must be one of 1, 0.5, got 3"),
            ({"rung": "1", "policy": "start"}, "one of policy and rung must be given"),
            ({}, "one of policy and rung must be given"),
        ):
            status, answer = server.call("POST", "/paceline/policy", body)
            assert status == 400
            assert said in answer


@pytest.mark.long
def test_prefix_caching_needs_to_be_accepted(tmp_path: Path) -> None:
    """The cache is on, and a change empties it: results of a cap aren't read without it."""
    low = "capacity_factor=0.4,min_expert_load=0"
    with serving(tmp_path / "log", "--policy", low, "--accept-shared-budget") as server:

        def complete() -> list[Answer]:
            return [server.complete(1, 140, tokens=12)]

        server.policy("DELETE")
        off = complete()
        assert same(complete(), off)  # from the cache
        server.policy("POST", low)
        assert not same(complete(), off)
        server.policy("DELETE")
        assert same(complete(), off)
        assert re.search(r"enable_prefix_caching=True", server.log.read_text())


@pytest.mark.long
def test_two_data_parallel_engines(tmp_path: Path) -> None:
    with serving(
        tmp_path / "log", "--policy",
        "capacity_factor=1.0,expand=own_device,expand_limit=1,min_expert_load=0", "-dp", "2",
        "--enable-expert-parallel", environ={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ) as server:  # fmt: skip
        found = server.policy()
        assert len(found["workers"]) == 2
        assert found["fields"]["pool"] == "source"
        server.complete(0, 200)
        first = settled(server)
        before, after, dropped = totals(first)
        assert dropped > 0
        extras = after - (before - dropped)  # freed places go to experts of the token's own rank
        assert extras > 0

        server.policy("POST", "capacity_factor=1000")
        off = server.complete_all(6)
        for _ in range(3):
            found = server.policy("POST", "capacity_factor=0.8,min_expert_load=0")
            assert found["agree"]
            assert len(found["workers"]) == 2
            assert server.policy()["policy"] == found["policy"]
        for policy, reason in (
            ("capacity_factor=1,pool=batch", "pool must be source"),
            ("max_active=2", "of all ranks"),
        ):
            status, answer = server.call("POST", "/paceline/policy", {"policy": policy})
            assert status == 400
            assert reason in answer
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: server.complete(i, 30 + 9 * i), range(24)))
        last = settled(server)
        before, after, dropped = totals(last)
        workers = server.policy()["workers"]
        assert before == sum(w["assignments"] for w in workers)
        assert before - after + extras == dropped == sum(w["dropped"] for w in workers)
        for rank in ("rank=0", "rank=1"):
            earlier, later = (total(now["paceline_dropped_total"], rank) for now in (first, last))
            assert later > earlier
    with serving(tmp_path / "log", "--policy", "capacity_factor=1000") as alone:
        assert same(alone.complete_all(6), off)
