"""`paceline serve --engine sglang`: the policy changes while requests run, and counts agree."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sglang_runs import HERE, prompts

from paceline.traces import open_trace
from paceline.traces.loads import trace_loads

FLAGS = {
    "device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch",
    "mem-fraction-static": "0.2", "max-total-tokens": "8192", "dtype": "float32",
}  # fmt: skip


class Server:
    """A server on a port of its own; `counts` is what its experts computed, by rank."""

    def __init__(self, port: int, folder: Path) -> None:
        self.port, self.folder = port, folder

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return status and body, JSON where it is."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json", "authorization": "Bearer key"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        return status, json.loads(text) if text.startswith(("{", "[")) else text

    def generate(self, ids: list[int], tokens: int = 8) -> list[int]:
        """Return the tokens that follow a prompt."""
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        asked = {"input_ids": ids, "sampling_params": sampling}
        status, answer = self.ask("POST", "/generate", asked)
        assert status == 200, answer
        return answer["output_ids"]  # type: ignore[no-any-return]

    def rows(self) -> int:
        """Return the rows that experts computed so far."""
        lines = (self.folder / "counts-0").read_text().splitlines()
        return sum(sum(map(sum, json.loads(line)["rows"])) for line in lines)


@pytest.fixture(scope="module")
def server(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(HERE / "stubs"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {
        **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1",
        "PACELINE_TEST_COUNTS": str(folder / "counts"),
    }  # fmt: skip
    flags = [part for name, value in FLAGS.items() for part in (f"--{name}", value)]
    command = [
        sys.executable, "-c", "from paceline.cli import main; main()", "serve", str(qwen),
        "--engine", "sglang", "--record", str(folder / "trace"), "--devices", "4",
        "--policy", "capacity_factor=1000,pool=batch",
        "--port", str(port), "--api-key", "key", "--skip-tokenizer-init", "--skip-server-warmup",
        "--disable-cuda-graph", *flags,
    ]  # fmt: skip
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    served = Server(port, folder)
    until = time.monotonic() + 180
    while True:
        assert process.poll() is None, (folder / "log").read_text()[-5000:]
        assert time.monotonic() < until, (folder / "log").read_text()[-5000:]
        try:
            if served.ask("GET", "/health")[0] == 200:
                break
        except OSError:
            time.sleep(0.5)
    yield served
    os.killpg(process.pid, 9)
    process.wait()
    log.close()


def test_the_state_is_told(server: Server) -> None:
    status, state = server.ask("GET", "/paceline/policy")
    assert status == 200, state
    assert state["policy"] == "capacity_factor=1000.0"
    assert state["agree"] is True
    (worker,) = state["workers"]
    assert (worker["layers"], worker["devices"], worker["rank"]) == (2, 4, 0)
    assert worker["kernels"] == {"moe_forward_native": "one row per kept slot"}
    assert "radix cache is off" in (server.folder / "log").read_text()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"policy": "capacity_factor=0"}, "capacity_factor must be a number > 0"),
        ({"policy": "capacity_factor=1,compensate=true"}, "needs a calibration"),
        ({"policy": "capacity_factor=1,pool=source"}, "pool=source needs"),
        ({}, "one of policy and rung must be given"),
        ({"policy": "capacity_factor=1", "more": 1}, "more: Extra inputs are not permitted"),
        ({"rung": "1"}, "rung must be of a ladder.json"),
    ],
)
def test_a_refusal_is_one_sentence_and_changes_nothing(
    server: Server, body: dict[str, str], said: str
) -> None:
    status, answer = server.ask("POST", "/paceline/policy", body)
    assert (status, list(answer)) == (400, ["error"])
    assert said in answer["error"]
    assert server.ask("GET", "/paceline/policy")[1]["policy"] == "capacity_factor=1000.0"


def test_numbers_of_nobody_do_no_harm(server: Server) -> None:
    for number in (123456, -1, 0.5):
        body = {"server_args": {"paceline": number}}
        assert server.ask("POST", "/set_internal_state", body) == (200, [False])
    assert server.ask("GET", "/paceline/policy")[0] == 200


def test_a_key_is_needed(server: Server) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/paceline/policy")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=60)


def test_policies_change_under_load_and_every_row_is_counted(server: Server) -> None:
    """48 requests, three changes: no request fails, and the counts are the test's own."""
    before = server.ask("GET", "/paceline/policy")[1]["workers"][0]
    rows = server.rows()
    failed: list[Any] = []
    enough = threading.Event()

    def ask(length: int) -> int:
        answered = 0
        while not enough.is_set():
            try:
                assert len(server.generate(prompts(length)[0])) == 8
                answered += 1
            except Exception as error:
                failed.append(error)
        return answered

    states = []
    with ThreadPoolExecutor(48) as pool:
        asked = [pool.submit(ask, 30 + length) for length in range(48)]
        for policy in ("capacity_factor=0.5,pool=batch", "max_active=1", "capacity_factor=1"):
            time.sleep(1)
            body = {"policy": policy, "keep_cache": True}
            status, state = server.ask("POST", "/paceline/policy", body)
            assert status == 200, state
            states.append(state["policy"])
        time.sleep(1)
        enough.set()
        assert all(each.result() for each in asked)
    assert not failed
    assert states == ["capacity_factor=0.5", "max_active=1", "capacity_factor=1.0"]
    after = server.ask("GET", "/paceline/policy")[1]["workers"][0]
    dropped = after["dropped"] - before["dropped"]
    assigned = after["assignments"] - before["assignments"]
    assert dropped > 0
    assert server.rows() - rows == assigned - dropped
    metrics = until_published(server, after["dropped"])
    assert metrics["paceline_dropped_total"] == after["dropped"]
    stages = re.findall(r'paceline_assignments_total{.*stage="after"} ([\d.e+]+)', metrics["text"])
    assert sum(map(float, stages)) == after["assignments"] - after["dropped"]


def until_published(server: Server, dropped: int) -> dict[str, Any]:
    """Return the metrics once they have all drops: they are published every second."""
    for _ in range(30):
        text = server.ask("GET", "/metrics")[1]
        found = re.findall(r"paceline_dropped_total{.*} ([\d.e+]+)", text)
        total = sum(map(float, found))
        if total == dropped:
            break
        time.sleep(0.2)
    return {"paceline_dropped_total": total, "text": text}


def test_off_is_stock(server: Server) -> None:
    status, state = server.ask("DELETE", "/paceline/policy")
    assert (status, state["off"]) == (200, True), state
    rows = server.rows()
    one = threading.Thread(target=server.generate, args=(prompts(60)[0], 4))
    one.start()
    one.join()
    assert server.rows() - rows == (60 + 3) * 2 * 2


def test_a_trace_has_what_the_routers_chose(server: Server) -> None:
    """All assignments that were counted, whatever was dropped of them."""
    assigned = server.ask("GET", "/paceline/policy")[1]["workers"][0]["assignments"]
    status, state = server.ask("DELETE", "/paceline/record")
    assert status == 200, state
    assert state["traces"][0]["recording"] is False
    loads = trace_loads(open_trace(str(server.folder / "trace")), 4)
    assert sum(layer.assignments for layer in loads.layers) == assigned > 0
    assert (server.folder / "trace").stat().st_mode & 0o077 == 0
