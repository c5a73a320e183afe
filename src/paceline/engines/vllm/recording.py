"""Record what a worker's layers choose into a trace folder, with the recorder of every engine."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from paceline.engines.vllm.capped_layer import CappedLayer
from paceline.engines.vllm.capped_model import CappedModel
from paceline.engines.vllm.environment import RECORD, Recording
from paceline.facts import Facts
from paceline.routing import Assignment, RoutingInputs
from paceline.traces.record import Recorder


class Watched:
    """A worker's layers as a `Recorder` watches them.

    Args:
        model: the capped layers.
    """

    def __init__(self, model: CappedModel) -> None:
        self._model = model
        self._names: list[str] = []
        self._labels: dict[str, int] = {}  # of the running requests
        self._next = 0
        self.layers = [layer.name for layer in model.layers]
        # what decodes is known; whether a token is of a text or an image isn't
        self.context: Any = SimpleNamespace(modality_of=lambda rows, layer: None)

    def stats(self) -> Any:
        """Loads of all layers."""
        return SimpleNamespace(layers=self._model.stats())

    def watch(
        self, watcher: Callable[[str, RoutingInputs, Assignment], None], facts: Facts
    ) -> Callable[[], None]:
        """Have the watcher called on every forward with tokens, until the result is called."""

        def see(layer: CappedLayer, inputs: RoutingInputs, assignment: Assignment) -> None:
            watcher(layer.name, self._labelled(inputs), assignment)

        return self._model.watch(see, facts)

    def _labelled(self, inputs: RoutingInputs) -> RoutingInputs:
        """Inputs whose requests have the same label in every forward that they take part in."""
        if inputs.token_request is None:
            return inputs
        index = inputs.token_request
        names = self._model.request_ids()
        if names is None:
            names = [f"{self._next} {i}" for i in range(int(index.max()) + 1)]
        if names != self._names:
            before, self._labels = self._labels, {}
            for name in names:
                label = before.get(name)
                if label is None:
                    label, self._next = self._next, self._next + 1
                self._labels[name] = label
            self._names = names
        labels = torch.tensor([self._labels[name] for name in names])
        return replace(inputs, token_request=labels[index])


class WorkerRecording:
    """A worker's recording, finished when it is stopped or the worker ends.

    Args:
        model: the capped layers.
        asked: where and what.
        name: of the model.
        ranks: workers that record, each into a folder of its own.

    Raises:
        ValueError: if the layers run where no Python sees them, or the folder can't be made.
    """

    def __init__(self, model: CappedModel, asked: Recording, name: str, ranks: int) -> None:
        if model.layers[0].on_device is not None:
            raise ValueError(
                f"{RECORD} is not allowed on an accelerator, whose graphs run no Python: record "
                "the model in Transformers, or vLLM on a CPU."
            )
        folder = asked.folder
        if ranks > 1:
            folder = folder.with_name(f"{folder.name}-rank{model.rank}")
        self.folder = folder
        self._recorder: Recorder | None = Recorder(
            Watched(model), folder, asked.content, model=name, source="paceline in vLLM"
        )
        self._forwards = 0
        atexit.register(self.stop)

    def describe(self) -> dict[str, Any]:
        """Where it is, and whether it goes on, ready for JSON."""
        if self._recorder is not None:
            self._forwards = self._recorder.forwards
        return {
            "folder": str(self.folder),
            "recording": self._recorder is not None,
            "forwards": self._forwards,
        }

    def stop(self) -> dict[str, Any]:
        """Finish the trace; twice is once.

        Raises:
            TraceError: if something couldn't be written.
        """
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            try:
                recorder.close()
            finally:
                self._forwards = recorder.forwards
        return self.describe()


def recording_for(
    model: CappedModel, asked: Recording | None, name: str, parallel: Any, rank: int
) -> WorkerRecording | None:
    """A worker's recording; None where nothing is asked for, or another worker sees the same.

    Args:
        model: the capped layers.
        asked: by the environment.
        name: of the model.
        parallel: vLLM's configuration of parallelism.
        rank: of the worker within its data-parallel engine.
    """
    if asked is None or rank % parallel.tensor_parallel_size:
        return None
    ranks = parallel.pipeline_parallel_size * parallel.data_parallel_size
    return WorkerRecording(model, asked, name, ranks)
