"""A running server over HTTP: its policy at /paceline/policy, its trace at /paceline/record.

An ASGI middleware, given to vLLM as `--middleware paceline.engines.vllm.control.PolicyControl`,
adds the routes to vLLM's own app, so that its /openapi.json describes them. vLLM's check of the API
key doesn't cover them, so they check it themselves.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeAlias

from fastapi import APIRouter, Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from paceline.engines.vllm.all_workers import (
    Refused,
    change,
    everyone,
    expected_workers,
    recordings,
    summary,
)
from paceline.engines.vllm.forms import Recordings, Refusal, ServerState, WantedPolicy

PATH, RECORD_PATH = "/paceline/policy", "/paceline/record"
MAX_BODY = 1 << 16  # bytes
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Refusal, "description": why}
    for status, why in {
        400: "The body, or the policy, can't be; nothing was changed.",
        401: "The API key is missing or wrong.",
        404: "Nothing is recorded.",
        413: f"The body has more than {MAX_BODY} bytes.",
        500: "Workers don't agree, or a trace could not be finished.",
        501: "This server reaches only some of the workers.",
        503: "The engine isn't ready, or doesn't answer.",
    }.items()
}

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]


class PolicyControl:
    """Adds the routes when the app is first called, which is at its start; passes everything on.

    Args:
        app: what it stands before.
    """

    def __init__(self, app: App) -> None:
        self._app, self._added = app, False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if not self._added:
            self._added = True
            scope["app"].include_router(routes())
        await self._app(scope, receive, send)


class Guarded(APIRoute):
    """Checks the key before a body is read, and its length while; refuses with one sentence."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI asks for it."""
        answer = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                keys = api_keys(getattr(request.app.state, "args", None))
                if not authorized(request.scope, keys):
                    raise Refused(401, "Unauthorized")
                return await answer(Request(request.scope, await _bounded(request)))
            except Refused as refused:
                return JSONResponse({"error": str(refused)}, refused.status)
            except RequestValidationError as error:
                return JSONResponse({"error": _sentence(error)}, 400)
            except HTTPException:
                return JSONResponse({"error": f"The body can't be read: {_ALLOWED}"}, 400)

        return guarded


_ALLOWED = 'allowed is {"policy": "short form"}, with content-type: application/json.'


def _sentence(error: RequestValidationError) -> str:
    """What is wrong with a body; nothing of it is quoted."""
    first = error.errors()[0]
    field = ".".join(str(part)[:40] for part in first["loc"][1:] if isinstance(part, str))
    return f"{field or 'The body'}: {first['msg']}; {_ALLOWED}"


async def _bounded(request: Request) -> Callable[[], Awaitable[dict[str, Any]]]:
    """The body once more, read while it is short enough."""
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise Refused(413, f"The body is too long: allowed are {MAX_BODY} bytes.")
    except ClientDisconnect:
        raise Refused(400, "The request broke off.") from None

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def routes() -> APIRouter:
    """The routes, for one server."""
    key = Depends(HTTPBearer(auto_error=False))  # for the description alone: Guarded checks it
    router = APIRouter(
        tags=["paceline"], route_class=Guarded, responses=REFUSALS, dependencies=[key]
    )
    changing = asyncio.Lock()

    @router.get(PATH, summary="The policy in force")
    async def policy(request: Request) -> ServerState:
        return ServerState(**summary(await everyone(*_engine(request), "paceline_describe")))

    @router.post(PATH, summary="Have every worker follow a policy, or none")
    async def follow(request: Request, wanted: WantedPolicy) -> ServerState:
        engine = _engine(request)
        async with changing:
            return ServerState(**await change(*engine, wanted.policy))

    @router.delete(PATH, summary="Neither cap nor count")
    async def switch_off(request: Request) -> ServerState:
        engine = _engine(request)
        async with changing:
            return ServerState(**await change(*engine, None))

    @router.get(RECORD_PATH, summary="The traces that are recorded")
    async def recorded(request: Request) -> Recordings:
        return Recordings(**recordings(await everyone(*_engine(request), "paceline_recorded")))

    @router.delete(RECORD_PATH, summary="Finish the traces")
    async def finish(request: Request) -> Recordings:
        found = await everyone(*_engine(request), "paceline_stop_recording")
        return Recordings(**recordings(found))

    return router


def _engine(request: Request) -> tuple[Any, int | None]:
    """vLLM's client, and how many workers it has to reach."""
    state = request.app.state
    client = getattr(state, "engine_client", None)
    if client is None:
        raise Refused(503, "The engine isn't ready yet.")
    return client, expected_workers(getattr(state, "vllm_config", None))


def api_keys(args: Any) -> list[str]:
    """The keys that vLLM was started with, as its own middleware reads them."""
    given = getattr(args, "api_key", None)
    if not given:
        from vllm import envs

        given = [envs.VLLM_API_KEY]
    return [key for key in given if key]


def authorized(scope: Message, keys: list[str]) -> bool:
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
