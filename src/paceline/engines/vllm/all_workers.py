"""All workers of a running server: asked, told what to follow, and compared."""

from __future__ import annotations

import json
from typing import Any


class Refused(Exception):
    """An answer other than 200: its status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


async def change(client: Any, workers: int | None, text: str | None) -> dict[str, Any]:
    """Have every worker follow a policy, or none of them.

    Args:
        client: vLLM's.
        workers: that must answer, None if it isn't known.
        text: the short form; "start": as the server began; None: neither cap nor count.

    Raises:
        Refused: 400 if a worker can't follow it, 500 if the workers don't agree afterwards.
    """
    reasons = [r for r in await everyone(client, workers, "paceline_check", text) if r is not None]
    if reasons:
        raise Refused(400, reasons[0])
    await everyone(client, workers, "paceline_set", text)
    # what the cache holds was computed under the old policy; running requests compute it again
    if not await client.reset_prefix_cache(reset_running_requests=True):
        raise Refused(500, "The policy is in force, but the prefix cache could not be reset.")
    found = await everyone(client, workers, "paceline_describe")
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


def expected_workers(config: Any) -> int | None:
    """Workers of all data-parallel engines, None where the configuration isn't known."""
    if config is None:
        return None
    parallel = config.parallel_config
    return int(parallel.world_size * parallel.data_parallel_size)


async def everyone(client: Any, workers: int | None, method: str, *args: Any) -> list[Any]:
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
