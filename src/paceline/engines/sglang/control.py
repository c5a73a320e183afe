"""The routes of `serving.control` in SGLang's server, and its workers behind them.

SGLang brings numbers alone to all of its workers (set_internal_state). What is asked, and what each
worker answers, lies in a folder that this server made for it, under the number that is sent.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import shutil
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

from paceline.engines.serving.worker import METHODS
from paceline.files import write_text

KEY = "paceline"
"""Name of the number among those that SGLang sends."""
FOLDER = "PACELINE_CONTROL"
"""Variable that names the folder to the workers; set by the server, not by users."""
_PATIENCE = 60.0  # seconds until every worker must have answered
_numbers = count()


def make_folder() -> None:
    """Make the folder, readable by its owner alone and removed with this process."""
    folder, owner = tempfile.mkdtemp(prefix="paceline-control-"), os.getpid()
    os.environ[FOLDER] = folder

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


def answer(worker: Any, number: float) -> bool:
    """Answer what is asked under a number, in a file of this worker's own.

    Args:
        worker: SGLang's ModelRunner, with `paceline` and `paceline_recording`.

    Returns:
        False if the worker failed, or nothing is asked: anybody may send a number to SGLang.
    """
    folder = Path(os.environ.get(FOLDER, ""))
    try:
        asked = json.loads((folder / f"{int(number)}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, OverflowError):
        return False
    method = next(method for method in METHODS if method.__name__ == asked["method"])
    try:
        found = {"answer": method(worker, *asked["args"])}
    except Exception as error:  # it would end the server
        found = {"failed": f"{type(error).__name__}: {error}"}
    write_text(folder / f"{int(number)}-{os.getpid()}.json", json.dumps(found), private=True)
    return "answer" in found


class SglangWorkers:
    """The workers of one server.

    Args:
        manager: SGLang's TokenizerManager.
        workers: number of them.
    """

    def __init__(self, manager: Any, workers: int) -> None:
        self._manager, self._workers = manager, workers

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker, and return their answers.

        Raises:
            Refused: 503 if one doesn't answer, or fails.
        """
        from sglang.srt.managers.io_struct import SetInternalStateReq

        from paceline.engines.serving.control import Refused

        folder, number = Path(os.environ[FOLDER]), next(_numbers)
        text = json.dumps({"method": method, "args": args})
        write_text(folder / f"{number}.json", text, private=True)
        until = time.monotonic() + _PATIENCE
        try:
            await asyncio.wait_for(
                self._manager.set_internal_state(SetInternalStateReq(server_args={KEY: number})),
                _PATIENCE,
            )
            while len(files := sorted(folder.glob(f"{number}-*.json"))) < self._workers:
                if time.monotonic() > until:
                    raise TimeoutError
                await asyncio.sleep(0.01)
            answers = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        except (TimeoutError, asyncio.TimeoutError):
            raise Refused(503, "The workers do not answer.") from None
        for file in (*files, folder / f"{number}.json"):
            file.unlink(missing_ok=True)
        for each in answers:
            if "failed" in each:
                raise Refused(503, f"A worker failed: {each['failed']}.")
        answers = [each["answer"] for each in answers]
        if method == "paceline_describe":
            answers.sort(key=lambda state: state["rank"])
        return answers

    async def empty_cache(self) -> bool:
        """Empty the radix cache, which SGLang does while no request runs."""
        return bool((await self._manager.flush_cache(timeout_s=5.0)).success)


def add_routes(server: Any) -> None:
    """Add the routes to SGLang's app, under the keys that guard its own settings.

    Args:
        server: SGLang's module of its HTTP server.
    """
    from sglang.srt.utils.auth import AuthLevel

    from paceline.engines.serving.control import Refused, routes

    def workers_of(_request: Any) -> SglangWorkers:
        state = server.get_global_state()
        if state is None:
            raise Refused(503, "The engine is not ready yet.")
        args = state.tokenizer_manager.server_args
        return SglangWorkers(state.tokenizer_manager, args.tp_size * args.dp_size)

    made = routes(workers_of, lambda request: [])  # SGLang checks its keys before every route
    for route in made.routes:
        route.endpoint._auth_level = AuthLevel.ADMIN_OPTIONAL  # type: ignore[attr-defined]
    server.app.include_router(made)
