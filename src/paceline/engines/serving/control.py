"""HTTP routes of a running server: /paceline/policy and, for its traces, /paceline/record."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Annotated, Any, Protocol, TypeAlias

from fastapi import APIRouter, Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

PATH, RECORD_PATH = "/paceline/policy", "/paceline/record"
MAX_BODY = 1 << 16  # bytes

Message: TypeAlias = MutableMapping[str, Any]
Short = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, strict=True)]


# -- bodies ----------------------------------------------------------------------------------------


class PolicyRequest(BaseModel):
    """A policy for all workers."""

    model_config = ConfigDict(extra="forbid")

    policy: Short | None = Field(
        None,
        description='Short form of a policy; "start": the one that the server began with.',
        examples=["capacity_factor=1.25", "capacity_factor=1.5,pool=request", "start"],
    )
    rung: Short | None = Field(
        None, description="Instead of a policy: a rung of ladder.json beside the plan, such as 0.75"
    )
    keep_cache: bool = Field(
        False,
        strict=True,
        description="Keep the prefix cache: its entries come from the former policy, and running "
        "requests don't compute their prompts again.",
    )

    @model_validator(mode="after")
    def _one(self) -> PolicyRequest:
        if (self.policy is None) == (self.rung is None):
            raise ValueError("one of policy and rung must be given")
        return self

    @property
    def text(self) -> str:
        """Text that a worker parses."""
        return f"rung {self.rung}" if self.policy is None else self.policy


class LayerCounts(BaseModel):
    """Counts of one layer of a worker since counting began."""

    name: str
    assignments: int = Field(description="(token, expert) pairs that the router chose.")
    dropped: int = Field(description="Of these, those that a cap dropped.")
    device_peak_to_mean_before: float = Field(description="Busiest device over the mean.")
    device_peak_to_mean_after: float


class PolicyState(BaseModel):
    """Policy in force."""

    policy: str | None = Field(description="Short form; null if layers differ, or off.")
    fields: dict[str, Any] | None = Field(description="Fields of the policy.")
    policies: list[str | None] | None = Field(description="One per layer, if they differ.")
    off: bool = Field(description="Neither caps nor counts.")
    enforced: bool = Field(description="True if the policy of any layer drops assignments.")
    min_expert_load: float | None = Field(
        description="Mean rows per expert below which nothing is capped."
    )
    note: str | None = Field(description="Sentence on what was added to the policy, if anything.")


class WorkerState(PolicyState):
    """Policy in force in one worker, and its counts over all its layers."""

    rank: int
    layers: int
    devices: int
    expert_rank: int
    data_ranks: int
    forwards: int
    capped_forwards: int
    assignments: int
    dropped: int
    dropped_computed: int = Field(description="Dropped, but computed with weight 0.")
    kernels: dict[str, str] = Field(description="How experts leave dropped slots out, by class.")
    by_layer: list[LayerCounts]


class ServerState(PolicyState):
    """Policy in force in the first worker, and the state of every worker."""

    agree: bool = Field(description="True if all workers have the same policy in force.")
    workers: list[WorkerState]


class Recording(BaseModel):
    """State of a trace that a worker records."""

    folder: str
    recording: bool = Field(description="True until the trace is finished.")
    forwards: int = Field(description="Number of forwards in the trace.")


class Recordings(BaseModel):
    """All traces that are recorded."""

    traces: list[Recording]


class Refusal(BaseModel):
    """Reason of a refusal, in one sentence."""

    error: str


class Refused(Exception):
    """An answer other than 200: its status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Refusal, "description": why}
    for status, why in {
        400: "The body or the policy is not valid; nothing was changed.",
        401: "The API key is missing or wrong.",
        404: "Nothing is recorded.",
        413: f"The body has more than {MAX_BODY} bytes.",
        500: "The workers do not agree, or a trace could not be finished.",
        501: "This server reaches only some of the workers.",
        503: "The engine is not ready, or does not answer.",
    }.items()
}


# -- routes ----------------------------------------------------------------------------------------


class Workers(Protocol):
    """The workers of a server, each with the methods of `serving.worker`."""

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker, and return their answers.

        Raises:
            Refused: if they can't all be reached.
        """

    async def empty_cache(self) -> bool:
        """Drop cached prefixes, which hold results of the former policy; False if that fails."""


def routes(
    workers_of: Callable[[Request], Workers], keys_of: Callable[[Request], list[str]]
) -> APIRouter:
    """Return the routes for one server.

    Args:
        workers_of: may raise `Refused`.
        keys_of: returns the API keys that a request must carry one of; none: all are allowed.
    """
    key = Depends(HTTPBearer(auto_error=False))  # for /openapi.json alone: GuardedRoute checks it
    guarded = type("Guarded", (GuardedRoute,), {"keys_of": staticmethod(keys_of)})
    router = APIRouter(
        tags=["paceline"], route_class=guarded, responses=REFUSALS, dependencies=[key]
    )
    changing = asyncio.Lock()

    @router.get(PATH, summary="The policy in force")
    async def policy(request: Request) -> ServerState:
        return server_state(await workers_of(request).call("paceline_describe"))

    @router.post(PATH, summary="Put a policy in force in every worker")
    async def set_policy(request: Request, body: PolicyRequest) -> ServerState:
        workers = workers_of(request)
        async with changing:
            return await change_policy(workers, body.text, body.keep_cache)

    @router.delete(PATH, summary="Neither cap nor count")
    async def switch_off(request: Request) -> ServerState:
        workers = workers_of(request)
        async with changing:
            return await change_policy(workers, None)

    @router.get(RECORD_PATH, summary="The traces that are recorded")
    async def recorded(request: Request) -> Recordings:
        return recordings(await workers_of(request).call("paceline_recorded"))

    @router.delete(RECORD_PATH, summary="Finish the traces")
    async def finish(request: Request) -> Recordings:
        return recordings(await workers_of(request).call("paceline_stop_recording"))

    return router


class GuardedRoute(APIRoute):
    """Route that checks the key before it reads a body, and the body's length while it reads it."""

    keys_of: Callable[[Request], list[str]]

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler with these checks; every error is one sentence of JSON."""
        answer = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                if not is_authorized(request.scope, self.keys_of(request)):
                    raise Refused(401, "Unauthorized")
                return await answer(Request(request.scope, await _read_bounded(request)))
            except Refused as refused:
                return JSONResponse({"error": str(refused)}, refused.status)
            except RequestValidationError as error:
                return JSONResponse({"error": _sentence(error)}, 400)
            except HTTPException:
                return JSONResponse({"error": f"The body can't be read: {_ALLOWED}"}, 400)

        return guarded


_ALLOWED = (
    'it must be {"policy": "short form"} or {"rung": "name"}, with content-type: application/json.'
)


def _sentence(error: RequestValidationError) -> str:
    """Return the first error of a body without quoting the body."""
    first = error.errors()[0]
    field = ".".join(str(part)[:40] for part in first["loc"][1:] if isinstance(part, str))
    message = first["msg"].removeprefix("Value error, ")
    return f"{field or 'The body'}: {message}; {_ALLOWED}"


async def _read_bounded(request: Request) -> Callable[[], Awaitable[dict[str, Any]]]:
    """Read a body while it is short enough; return a function that gives it once more."""
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise Refused(413, f"The body must have at most {MAX_BODY} bytes.")
    except ClientDisconnect:
        raise Refused(400, "The request broke off.") from None

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def is_authorized(scope: Message, keys: list[str]) -> bool:
    """Return True if a request carries one of the keys, or if there are none.

    >>> is_authorized({"headers": [(b"authorization", b"Bearer a")]}, ["a"])
    True
    """
    if not keys:
        return True
    headers = dict(scope.get("headers", ()))
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    found = hashlib.sha256(token.encode()).digest()
    matches = [secrets.compare_digest(found, hashlib.sha256(k.encode()).digest()) for k in keys]
    return scheme.lower() == "bearer" and any(matches)


# -- workers ---------------------------------------------------------------------------------------


async def change_policy(
    workers: Workers, text: str | None, keep_cache: bool = False
) -> ServerState:
    """Put a policy in force in every worker, or in none of them.

    Args:
        text: the short form; "start": as the server began; "rung NAME"; None: neither cap nor
            count.
        keep_cache: True: cached prefixes stay, although the former policy computed them.

    Raises:
        Refused: 400 if a worker refuses it, 500 if the workers don't agree afterwards.
    """
    reasons = await workers.call("paceline_check", text)
    if any(reasons):
        raise Refused(400, next(filter(None, reasons)))
    await workers.call("paceline_set", text)
    if not keep_cache and not await workers.empty_cache():
        raise Refused(
            500,
            "The policy is in force, but cached prefixes of the former one could not be dropped.",
        )
    state = server_state(await workers.call("paceline_describe"))
    if not state.agree:
        raise Refused(500, "The workers have different policies: DELETE, then POST again.")
    return state


def server_state(workers: list[dict[str, Any]]) -> ServerState:
    """Return the state of a server from the `WorkerState` of its workers."""
    policies = {json.dumps([w["off"], w["policy"], w["policies"]]) for w in workers}
    return ServerState(**{**workers[0], "agree": len(policies) == 1, "workers": workers})


def recordings(workers: list[dict[str, Any] | None]) -> Recordings:
    """Return the traces that the workers record.

    Raises:
        Refused: 404 if none records one, 500 if one couldn't be finished.
    """
    traces = [worker for worker in workers if worker is not None]
    if not traces:
        raise Refused(404, "Nothing is recorded: start the server with --record FOLDER.")
    for trace in traces:
        if "error" in trace:
            raise Refused(500, f"The trace is cut off: {trace['error']}")
    return Recordings(traces=[Recording(**trace) for trace in traces])
