"""A running server over HTTP: its policy at /paceline/policy, its trace at /paceline/record.

An ASGI middleware, given to vLLM as `--middleware paceline.engines.vllm.control.PolicyControl`. It
runs outside vLLM's own check of the API key, so it checks the key itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

PATH, RECORD_PATH = "/paceline/policy", "/paceline/record"
METHODS = {PATH: ("GET", "POST", "DELETE"), RECORD_PATH: ("GET", "DELETE")}
MAX_BODY = 1 << 16  # bytes

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class Refused(Exception):
    """An answer other than 200: its status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class PolicyControl:
    """Answers for the paths of `METHODS`, and passes everything else on.

    Args:
        app: what it stands before.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._changing = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", "")).rstrip("/")
        if scope["type"] != "http" or path not in METHODS:
            await self._app(scope, receive, send)
            return
        try:
            status, answer = 200, await self._answer(path, scope, receive)
        except Refused as refused:
            status, answer = refused.status, {"error": str(refused)}
        body = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"),
                   (b"content-length", str(len(body)).encode())]  # fmt: skip
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, path: str, scope: Scope, receive: Receive) -> dict[str, Any]:
        state = scope["app"].state
        if not authorized(scope, api_keys(getattr(state, "args", None))):
            raise Refused(401, "Unauthorized")
        method = scope["method"]
        if method not in METHODS[path]:
            *others, last = METHODS[path]
            allowed = f"{', '.join(others)} or {last}"
            raise Refused(405, f"{method} is not allowed: it is {allowed}.")
        client = getattr(state, "engine_client", None)
        if client is None:
            raise Refused(503, "The engine isn't ready yet.")
        workers = expected_workers(getattr(state, "vllm_config", None))
        if path == RECORD_PATH:
            call = "paceline_recorded" if method == "GET" else "paceline_stop_recording"
            return recordings(await _all(client, call, workers))
        if method == "GET":
            return summary(await _all(client, "paceline_describe", workers))
        text = None if method == "DELETE" else wanted_policy(await _body(receive))
        async with self._changing:
            return await change(client, text, workers)


async def change(client: Any, text: str | None, workers: int | None) -> dict[str, Any]:
    """Have every worker follow a policy, or none of them.

    Args:
        client: vLLM's.
        text: the short form; "start": as the server began; None: neither cap nor count.
        workers: that must answer, None if it isn't known.

    Raises:
        Refused: 400 if a worker can't follow it, 500 if the workers don't agree afterwards.
    """
    reasons = [r for r in await _all(client, "paceline_check", workers, text) if r is not None]
    if reasons:
        raise Refused(400, reasons[0])
    await _all(client, "paceline_set", workers, text)
    # what the cache holds was computed under the old policy; running requests compute it again
    if not await client.reset_prefix_cache(reset_running_requests=True):
        raise Refused(500, "The policy is in force, but the prefix cache could not be reset.")
    found = await _all(client, "paceline_describe", workers)
    if len({json.dumps([w["off"], w["policy"], w["policies"]]) for w in found}) != 1:
        raise Refused(500, "The workers follow different policies: DELETE, then POST again.")
    return summary(found)


def summary(workers: list[dict[str, Any]]) -> dict[str, Any]:
    """What all workers have, and what each has."""
    first = workers[0]
    return {
        "policy": first["policy"],
        "fields": first["fields"],
        "policies": first["policies"],
        "off": first["off"],
        "enforced": first["enforced"],
        "min_expert_load": first["min_expert_load"],
        "agree": len({json.dumps([w["off"], w["policy"], w["policies"]]) for w in workers}) == 1,
        "workers": workers,
    }


def recordings(workers: list[dict[str, Any] | None]) -> dict[str, Any]:
    """The traces that the workers record.

    Raises:
        Refused: 404 if none records one, 500 if one couldn't be finished.
    """
    traces = [worker for worker in workers if worker is not None]
    if not traces:
        raise Refused(404, "Nothing is recorded: start the server with --record FOLDER.")
    for trace in traces:
        if "error" in trace:
            raise Refused(500, f"The trace is cut off: {trace['error']}")
    return {"traces": traces}


def wanted_policy(body: bytes) -> str:
    """The short form that a request asks for.

    Raises:
        Refused: 400 if it is no JSON object with the one field policy, a text.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, 'The body is no JSON: allowed is {"policy": "short form"}.') from None
    if not isinstance(fields, dict) or set(fields) != {"policy"}:
        raise Refused(400, 'The body has other fields: allowed is {"policy": "short form"}.')
    if not isinstance(fields["policy"], str) or not fields["policy"].strip():
        raise Refused(400, 'policy is no text: allowed is a short form, "capacity_factor=1.25".')
    return fields["policy"].strip()


def api_keys(args: Any) -> list[str]:
    """The keys that vLLM was started with, as its own middleware reads them."""
    from vllm import envs

    given = getattr(args, "api_key", None) or [envs.VLLM_API_KEY]
    return [key for key in given if key]


def authorized(scope: Scope, keys: list[str]) -> bool:
    """Whether a request carries one of the keys; any does where there are none.

    >>> authorized({"headers": [(b"authorization", b"Bearer a")]}, ["a"])
    True
    """
    if not keys:
        return True
    headers = dict(scope.get("headers", ()))
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    found = hashlib.sha256(token.encode()).digest()
    matches = [secrets.compare_digest(found, hashlib.sha256(k.encode()).digest()) for k in keys]
    return scheme.lower() == "bearer" and any(matches)


def expected_workers(config: Any) -> int | None:
    """Workers of all data-parallel engines, None where the configuration isn't known."""
    if config is None:
        return None
    parallel = config.parallel_config
    return int(parallel.world_size * parallel.data_parallel_size)


async def _all(client: Any, method: str, workers: int | None, *args: Any) -> list[Any]:
    """What every worker of every engine answers.

    Raises:
        Refused: 501 if this server reaches only some of them.
    """
    try:
        engines = await client.engine_core.call_utility_all_async(
            "collective_rpc", method, None, args, None
        )
    except Exception as error:
        raise Refused(503, f"The engine doesn't answer: {type(error).__name__}.") from error
    answers = [answer for engine in engines for answer in engine]
    if workers is not None and len(answers) != workers:
        raise Refused(
            501,
            f"This server reaches {len(answers)} of {workers} workers: with data parallelism over "
            "several servers each would have another policy.",
        )
    return answers


async def _body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "The request broke off.")
        body += bytes(message.get("body", b""))
        if len(body) > MAX_BODY:
            raise Refused(413, f"The body is too long: allowed are {MAX_BODY} bytes.")
        if not message.get("more_body"):
            return body
