"""Forwards that a backward repeats in part: activation checkpointing.

A forward that is computed again is the same forward: it drops the same assignments and is not
counted. `route` gives the same answer for the same inputs, so it is enough to find the tokens that
a layer saw the first time. A backward runs the nodes of a graph, which autograd numbers in the
order in which they were made: the number of the running node tells the forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch.autograd.function import BackwardCFunction

from paceline.engines.transformers.tokens.context import ForwardContext


def is_recomputing() -> bool:
    """Return True while a backward runs in this thread."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class LayerCalls:
    """Calls of layers in one forward, kept as long as the autograd graph of its output."""

    def __init__(self) -> None:
        self._first = _get_sequence_nr()
        self._end: float = torch.inf
        self._calls: dict[int, list[tuple[Tensor, ForwardContext]]] = {}

    def note(self, layer: int, ids: Tensor, context: ForwardContext) -> None:
        """Remember the tokens of a layer's call by the experts chosen, ids [tokens, k]."""
        self._calls.setdefault(layer, []).append((ids, context))

    def finish(self, output: object) -> None:
        """End the forward; keep its calls until the graph that computed `output` is gone."""
        self._end = _get_sequence_nr()
        for calls in self._calls.values():
            for _, context in calls:
                context.calls = None  # no cycle: the record ends as soon as the graph does
        for tensor in _tensors(output):
            node: Any = tensor.grad_fn
            if node is not None:
                node.metadata["paceline"] = self

    def find(self, layer: int, ids: Tensor) -> ForwardContext | None:
        """Return the tokens of a layer's call that chose `ids`, None if there was none."""
        for seen, context in self._calls.get(layer, ()):
            if seen.shape == ids.shape and torch.equal(seen, ids):
                return context
        return None

    def began_before(self, number: int) -> bool:
        """Return True if the forward began before the node of this number was made."""
        return self._first <= number

    def made(self, number: int) -> bool:
        """Return True if the node of this number was made during the forward."""
        return self._first <= number < self._end


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from _tensors(part)
    elif isinstance(output, dict):
        yield from _tensors(tuple(output.values()))


class Recomputation:
    """The forwards of one model that a backward may repeat in part."""

    def __init__(self) -> None:
        self._forwards: WeakSet[LayerCalls] = WeakSet()

    def begin(self) -> LayerCalls | None:
        """Return an empty record for a new forward, None where no backward can follow it.

        It lasts as long as somebody holds it.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return None
        calls = LayerCalls()
        self._forwards.add(calls)
        return calls

    def find(self, layer: int, ids: Tensor) -> ForwardContext | None:
        """Return the tokens of the call that the running backward repeats, None if unknown.

        Args:
            layer: index of the layer.
            ids: [tokens, k] experts that it chose.
        """
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return None
        number, forwards = node._sequence_nr(), list(self._forwards)
        for calls in forwards:
            if calls.made(number) and (found := calls.find(layer, ids)) is not None:
                return found
        if isinstance(node, BackwardCFunction):
            return None  # reentrant: its first forward made no graph, and left no record
        # a node behind the model, in a checkpointed function that holds the whole of it
        earlier = [calls.find(layer, ids) for calls in forwards if calls.began_before(number)]
        contexts = [context for context in earlier if context is not None]
        return contexts[0] if len(contexts) == 1 else None
