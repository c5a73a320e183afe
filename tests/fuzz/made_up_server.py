"""The real routes of a server in a bare app; behind them workers that keep a policy, no model."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI

from paceline.engines.vllm.control import PolicyControl
from paceline.policy import CapacityPolicy, PolicyError

KEY = "a-key"


class Worker:
    """One worker's answers, in the form that `CappedModel.describe` and the recorder give them."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.start = CapacityPolicy(capacity_factor=1.25)
        self.policy: CapacityPolicy | None = self.start
        self.recording = True

    def _wanted(self, text: str | None) -> CapacityPolicy | None:
        if text == "start":
            return self.start
        if text is not None and text.startswith("rung "):
            if text != "rung 0.75":
                raise PolicyError("rung must be 0.75.")
            return CapacityPolicy(capacity_factor=0.75)
        return None if text is None else CapacityPolicy.parse(text)

    def paceline_check(self, text: str | None) -> str | None:
        try:
            self._wanted(text)
        except PolicyError as error:
            return str(error)
        return None

    def paceline_set(self, text: str | None) -> None:
        self.policy = self._wanted(text)

    def paceline_describe(self) -> dict[str, Any]:
        one = self.policy
        layer = {
            "name": "model.layers.0.mlp",
            "assignments": 12,
            "dropped": 3,
            "device_peak_to_mean_before": 1.5,
            "device_peak_to_mean_after": 1.0,
        }
        return {
            "rank": self.rank, "layers": 1, "devices": 8, "expert_rank": 0, "data_ranks": 1,
            "off": one is None, "policy": one and str(one), "policies": None,
            "fields": None if one is None else json.loads(one.to_json()),
            "min_expert_load": None if one is None else 8.0,
            "forwards": 2, "capped_forwards": 1, "assignments": 12, "dropped": 3,
            "dropped_computed": 0, "enforced": one is not None and one.mode == "enforce",
            "note": None, "kernels": {"CPUUnquantizedExperts": "one row per kept slot"},
            "by_layer": [layer],
        }  # fmt: skip

    def paceline_recorded(self) -> dict[str, Any] | None:
        if self.rank:
            return None
        return {"folder": "trace", "recording": self.recording, "forwards": 2}

    def paceline_stop_recording(self) -> dict[str, Any] | None:
        self.recording = False
        return self.paceline_recorded()


class Client:
    """vLLM's client, as far as the routes use it."""

    def __init__(self, workers: int = 2) -> None:
        self.workers = [Worker(rank) for rank in range(workers)]
        self.engine_core = self
        self.emptied = 0

    async def call_utility_all_async(
        self, name: str, method: str, timeout: None, args: tuple[Any, ...], kwargs: None
    ) -> list[list[Any]]:
        assert name == "collective_rpc"
        return [[getattr(worker, method)(*args)] for worker in self.workers]

    async def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        self.emptied += 1
        return True


def app(client: Any, workers: int = 2) -> FastAPI:
    """An app with the middleware before it, as vLLM makes its own."""
    made = FastAPI()
    made.state.args = SimpleNamespace(api_key=[KEY])
    made.state.engine_client = client
    parallel = SimpleNamespace(world_size=workers, data_parallel_size=1)
    made.state.vllm_config = SimpleNamespace(parallel_config=parallel)
    made.add_middleware(PolicyControl)
    return made


def call(
    served: FastAPI,
    method: str,
    path: str,
    body: bytes = b"",
    key: str | None = KEY,
    pieces: int = 1,
    kind: bytes = b"application/json",
) -> tuple[int, Any]:
    """One request over ASGI: status and what the body says, which has to be strict JSON."""
    headers = [(b"content-type", kind)]
    if key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "headers": headers, "client": ("127.0.0.1", 1), "server": ("h", 80),
    }  # fmt: skip
    size = -(-len(body) // pieces) or 1
    parts = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
    asked, told = iter(parts), []

    async def receive() -> dict[str, Any]:
        part = next(asked, None)
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": part is not parts[-1]}

    async def send(message: Any) -> None:
        told.append(message)

    asyncio.run(served(scope, receive, send))
    said = b"".join(message.get("body", b"") for message in told[1:])
    return told[0]["status"], json.loads(said, parse_constant=_no_constant)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
