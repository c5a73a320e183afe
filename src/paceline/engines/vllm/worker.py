"""What the plugin adds to vLLM's workers: the cap after loading, and methods to be called."""

from __future__ import annotations

import logging
from functools import wraps
from typing import Any

from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase

from paceline.engines.vllm import capped_model as model
from paceline.engines.vllm import runners as runner
from paceline.engines.vllm.environment import wanted
from paceline.engines.vllm.metrics import publisher_for
from paceline.engines.vllm.recording import recording_for
from paceline.traces.format import TraceError

logger = logging.getLogger("vllm.paceline")


def install() -> None:
    """Cap every model that a worker loads from now on, as the environment asks then."""
    load = Worker.load_model

    @wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        asked = wanted()
        if asked is not None:
            self.paceline = model.CappedModel(
                self.model_runner, self.vllm_config, asked, _rank(self)
            )
            self.paceline_publisher = publisher_for(self.paceline)
            self.paceline_recording = recording_for(
                self.paceline, asked.recording, self.model_config.model, self.parallel_config,
                self.rank,
            )  # fmt: skip

    warm_up = Worker.compile_or_warm_up_model

    @wraps(warm_up)
    def compile_or_warm_up_model(self: Any) -> Any:
        took = warm_up(self)
        if getattr(self, "paceline", None) is not None:
            self.paceline.reset_stats()  # an accelerator counts made-up batches too
        return took

    shutdown = Worker.shutdown

    @wraps(shutdown)
    def finish_and_shutdown(self: Any) -> Any:
        if getattr(self, "paceline_recording", None) is not None:
            self.paceline_recording.stop()
        return shutdown(self)

    Worker.shutdown = finish_and_shutdown
    Worker.load_model = load_model
    Worker.compile_or_warm_up_model = compile_or_warm_up_model
    WorkerBase.paceline_describe = paceline_describe
    WorkerBase.paceline_check = paceline_check
    WorkerBase.paceline_set = paceline_set
    WorkerBase.paceline_recorded = paceline_recorded
    WorkerBase.paceline_stop_recording = paceline_stop_recording


def slots_of(moe_runner: Any) -> int:
    """Ids a token that a layer needs room for, 0 where nothing may expand."""
    asked = wanted()
    return 0 if asked is None else runner.slots_of(moe_runner, asked)


def _rank(worker: Any) -> int:
    """The worker's number among all workers of all data-parallel engines."""
    parallel = worker.parallel_config
    return int(parallel.data_parallel_index * parallel.world_size + worker.rank)


def paceline_describe(self: Any) -> dict[str, Any]:
    """What is in force in this worker, and what it did."""
    return self.paceline.describe()  # type: ignore[no-any-return]


def paceline_check(self: Any, text: str | None) -> str | None:
    """Why this worker can't follow a policy, None where it can."""
    capped = self.paceline
    try:
        capped.check_policies(capped.read(text))
    except ValueError as error:
        return str(error)
    return None


def paceline_set(self: Any, text: str | None) -> dict[str, Any]:
    """Follow a policy that every worker can follow; what is in force then."""
    capped = self.paceline
    capped.set_policies(capped.read(text))
    logger.info("paceline: policy %s", text)
    return self.paceline_describe()  # type: ignore[no-any-return]


def paceline_recorded(self: Any) -> dict[str, Any] | None:
    """What this worker records, None where it doesn't."""
    recording = self.paceline_recording
    return None if recording is None else recording.describe()


def paceline_stop_recording(self: Any) -> dict[str, Any] | None:
    """Finish this worker's trace, where it records one; an error is said in the answer."""
    recording = self.paceline_recording
    if recording is None:
        return None
    try:
        return recording.stop()  # type: ignore[no-any-return]
    except TraceError as error:
        return {**recording.describe(), "error": str(error)}
