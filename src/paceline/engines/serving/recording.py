"""Recording of a worker's routing into a trace folder, with the recorder that all engines share."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from paceline.engines.serving.capped_layer import CappedLayer
from paceline.engines.serving.capped_model import CappedModel
from paceline.engines.serving.environment import RECORD, Settings
from paceline.facts import Facts
from paceline.routing import Assignment, RoutingInputs
from paceline.traces.record import Recorder
from paceline.traces.record import Recording as Content


class WatchedModel:
    """A worker's layers in the form that `Recorder` watches."""

    def __init__(self, model: CappedModel) -> None:
        self._model = model
        self._names: list[str] = []
        self._labels: dict[str, int] = {}  # label of each running request
        self._next = 0
        self.layers = [layer.name for layer in model.layers]
        # which tokens decode is known, but not which belong to an image
        self.context: Any = SimpleNamespace(modality_of=lambda rows, layer: None)

    def stats(self) -> Any:
        """Return the statistics of all layers."""
        return SimpleNamespace(layers=self._model.stats())

    def watch(
        self, watcher: Callable[[str, RoutingInputs, Assignment], None], facts: Facts
    ) -> Callable[[], None]:
        """Call the watcher on every forward with tokens, until the returned function is called."""

        def pass_on(layer: CappedLayer, inputs: RoutingInputs, assignment: Assignment) -> None:
            watcher(layer.name, self._label(inputs), assignment)

        return self._model.watch(pass_on, facts)

    def _label(self, inputs: RoutingInputs) -> RoutingInputs:
        """Return inputs in which a request has the same label in all of its forwards."""
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
    """Recording of one worker, finished when it is stopped or the worker ends.

    Args:
        folder: of the trace; if several workers record, with the worker's number.
        content: counts, choices or scores.
        ranks: number of workers that record, each into a folder of its own.

    Raises:
        ValueError: if the layers run on an accelerator.
        TraceError: if the folder can't be made.
    """

    def __init__(
        self, model: CappedModel, folder: Path, content: Content, name: str, ranks: int
    ) -> None:
        if model.layers[0].graphed:
            raise ValueError(
                f"{RECORD} is not allowed on an accelerator, whose graphs run no Python: record "
                "the model in Transformers, or serve it on a CPU."
            )
        if ranks > 1:
            folder = folder.with_name(f"{folder.name}-rank{model.rank}")
        self.folder = folder
        self._recorder: Recorder | None = Recorder(
            WatchedModel(model), folder, content, model=name, source=model.engine
        )
        self._forwards = 0
        atexit.register(self.stop)

    def describe(self) -> dict[str, Any]:
        """Return the state of the recording, as `control.Recording`."""
        if self._recorder is not None:
            self._forwards = self._recorder.forwards
        return {
            "folder": str(self.folder),
            "recording": self._recorder is not None,
            "forwards": self._forwards,
        }

    def stop(self) -> dict[str, Any]:
        """Finish the trace. Idempotent.

        Raises:
            TraceError: if a file can't be written.
        """
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            try:
                recorder.close()
            finally:
                self._forwards = recorder.forwards
        return self.describe()


def recording_for(
    model: CappedModel, settings: Settings, name: str, parallel: Any, rank: int
) -> WorkerRecording | None:
    """Start a worker's recording; None without settings, or if another worker sees the same.

    Args:
        rank: of the worker within its data-parallel engine.
    """
    if settings.record is None or rank % parallel.tensor_parallel_size:
        return None
    ranks = parallel.pipeline_parallel_size * parallel.data_parallel_size
    return WorkerRecording(model, settings.record, settings.record_content, name, ranks)
