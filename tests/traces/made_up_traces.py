"""Traces made of random numbers, with every fact a trace can hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from paceline.traces import Trace
from paceline.traces.chunk import Chunk
from paceline.traces.format import UNKNOWN, Header, Layer


@st.composite
def traces(draw: Any, content: str | None = None, max_chunks: int = 3) -> Trace:
    """A trace of choices or scores: several layers and chunks, padding, odd ids, any facts."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    content = content or draw(st.sampled_from(["choices", "scores"]))
    layers, experts = int(rng.integers(1, 4)), int(rng.integers(2, 9))
    k = int(rng.integers(1, min(4, experts) + 1))
    facts = {name for name in FACTS if draw(st.booleans())}
    per_layer = draw(st.booleans())
    chunks = tuple(
        _chunk(rng, content, layers, experts, k, facts, per_layer)
        for _ in range(int(rng.integers(1, max_chunks + 1)))
    )
    header = Header(
        content=content,
        layers=tuple(Layer(name=f"layer {i}", experts=experts, k=k) for i in range(layers)),
        model="made up",
        notes=("a note",),
    )
    return Trace(header, chunks)


FACTS = ("valid", "phase", "modality", "request", "source", "priority")


def _chunk(
    rng: np.random.Generator, content: str, layers: int, experts: int, k: int, facts: set[str],
    per_layer: bool,
) -> Chunk:  # fmt: skip
    sizes = rng.integers(0, 12, size=int(rng.integers(1, 4)))
    tokens = int(sizes.sum())
    scores = rng.dirichlet(np.ones(experts), size=(layers, tokens)).astype(np.float32)
    ids = np.argsort(-scores, axis=2, kind="stable")[:, :, :k]
    weights = np.take_along_axis(scores, ids, 2)
    odd = rng.random(ids.shape) < 0.05
    ids = np.where(odd, experts, ids).astype(np.uint8)
    drawn = {
        "valid": lambda shape: rng.random(shape) < 0.8,
        "phase": lambda shape: rng.choice([0, 1, UNKNOWN], size=shape).astype(np.uint8),
        "modality": lambda shape: rng.choice([0, 1, 3, UNKNOWN], size=shape).astype(np.uint8),
        "request": lambda shape: rng.choice([-5, 0, 7, 10**12], size=shape),
        "source": lambda shape: rng.integers(0, 2, size=shape, dtype=np.int32),
        "priority": lambda shape: rng.integers(-2, 3, size=shape, dtype=np.int8),
    }
    tensors = {
        name: torch.from_numpy(draw((layers, tokens) if per_layer else (tokens,)))
        for name, draw in drawn.items()
        if name in facts
    }
    if content == "scores":
        tensors["scores"] = torch.from_numpy(scores)
    return Chunk(
        starts=torch.from_numpy(np.cumsum([0, *sizes])),
        ids=torch.from_numpy(ids),
        weights=torch.from_numpy(weights),
        topk_scores=torch.from_numpy(weights.copy()),
        **tensors,
    )


def count_trace(batches: int = 3, layers: int = 2, experts: int = 6, k: int = 2) -> Trace:
    """A trace of counts in two groups, prefill text and decode of unknown modality."""
    rng = np.random.default_rng(1)
    chunk = Chunk(
        starts=torch.arange(batches + 1),
        counts=torch.from_numpy(rng.integers(0, 50, (batches, layers, 2, experts))),
        group_codes=torch.tensor([[0, 0], [1, UNKNOWN]], dtype=torch.uint8),
        rows=torch.from_numpy(rng.integers(1, 50, (batches, layers, 2))),
    )
    named = tuple(Layer(name=f"layer {i}", experts=experts, k=k) for i in range(layers))
    return Trace(Header(content="counts", layers=named), (chunk,))
