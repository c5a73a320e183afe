"""The routes of `serving.control` in vLLM's server, and vLLM's workers behind them.

An ASGI middleware, given to vLLM as `--middleware paceline.engines.vllm.control.PolicyControl`,
adds the routes to vLLM's own app, so that its /openapi.json describes them. vLLM's check of the API
key does not cover them, so they check it themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from fastapi import Request

from paceline.engines.serving.control import Message, Refused, routes

Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]


class PolicyControl:
    """Middleware that adds the routes when the app is first called, which is at its start.

    Args:
        app: the application behind it, to which every call is passed on.
    """

    def __init__(self, app: App) -> None:
        self._app, self._added = app, False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if not self._added:
            self._added = True
            scope["app"].include_router(routes(workers_of, api_keys))
        await self._app(scope, receive, send)


def api_keys(request: Request) -> list[str]:
    """Return the keys that vLLM was started with, as its own middleware reads them."""
    given = getattr(getattr(request.app.state, "args", None), "api_key", None)
    if not given:
        from vllm import envs

        given = [envs.VLLM_API_KEY]
    return [key for key in given if key]


class VllmWorkers:
    """The workers of all engines that a server reaches.

    Args:
        client: vLLM's AsyncLLM.
        workers: number of those that must answer, None if it is unknown.
    """

    def __init__(self, client: Any, workers: int | None) -> None:
        self._client, self._workers = client, workers

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker of every engine, and return their answers.

        Raises:
            Refused: 501 if this server reaches only some of them, 503 if the engine does not
                answer.
        """
        try:
            engines = await self._client.engine_core.call_utility_all_async(
                "collective_rpc", method, None, args, None
            )
        except Exception as error:
            raise Refused(503, f"The engine does not answer: {type(error).__name__}.") from error
        answers = [answer for engine in engines for answer in engine]
        if self._workers is not None and len(answers) != self._workers:
            raise Refused(
                501,
                f"This server reaches {len(answers)} of {self._workers} workers: with data "
                "parallelism over several servers each would have another policy.",
            )
        return answers

    async def empty_cache(self) -> bool:
        """Empty the prefix cache; running requests compute their prompts again."""
        return bool(await self._client.reset_prefix_cache(reset_running_requests=True))


def workers_of(request: Request) -> VllmWorkers:
    """Return the workers of the server that a request came to.

    Raises:
        Refused: 503 before the engine is ready.
    """
    state = request.app.state
    client, config = getattr(state, "engine_client", None), getattr(state, "vllm_config", None)
    if client is None:
        raise Refused(503, "The engine is not ready yet.")
    if config is None:
        return VllmWorkers(client, None)
    parallel = config.parallel_config
    return VllmWorkers(client, int(parallel.world_size * parallel.data_parallel_size))
