"""Routing recorded from a model, read from an .npz file and checked, as a benchmark's workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.bench.workload import Shape, Workload, softmax_gate
from paceline.routing import RoutingInputs

Array = npt.NDArray[Any]


def trace_workload(path: Path, shape: Shape, layer: int, tokens: int, offset: int = 0) -> Workload:
    """Routing recorded from a model: an .npz with topk_ids and topk_weights [layers, tokens, k].

    An id of -1 is no assignment, and a row of nothing else is padding, as vLLM and SGLang write
    it. The file may name the request of each token, token_request [tokens].

    Args:
        path: of the file.
        shape: sizes of the experts to run; experts and k must be those of the trace.
        layer: which of the trace.
        tokens: how many rows, padding included, repeated where the trace has fewer.
        offset: row to start at, so that devices differ.

    Raises:
        ValueError: if the file is no such trace or doesn't fit the shape.
    """
    ids, weights, request = _read(path, shape, layer)
    place = np.arange(tokens) + offset
    rows = place % len(ids)
    chosen = torch.from_numpy(ids[rows])
    kept = chosen >= 0
    scores = torch.from_numpy(weights[rows]).masked_fill(~kept, 0)
    given = RoutingInputs(
        topk_ids=torch.where(kept, chosen, shape.experts),
        topk_weights=scores,
        topk_scores=scores,
        valid=None if bool(kept.all()) else kept.any(1),
        token_request=None if request is None else torch.from_numpy(request[rows]),
        num_experts=shape.experts,
        layer=layer,
    )
    weight = torch.zeros((shape.experts, shape.hidden))
    compute = softmax_gate(weight, torch.zeros(shape.experts), shape.k)

    def gate(hidden: Tensor) -> RoutingInputs:
        compute(hidden)  # costs what a gate costs; the choice is the recorded one
        return given

    return Workload(
        label=f"{shape.name}, {path.name} layer {layer}",
        hidden=torch.randn((tokens, shape.hidden), generator=torch.Generator().manual_seed(0)),
        gate=gate,
        shape=shape,
        origin=f"recorded routing, {path.name}, layer {layer}",
    )


def _read(path: Path, shape: Shape, layer: int) -> tuple[Array, Array, Array | None]:
    """One layer's ids [tokens, k] int64 and weights [tokens, k] float32, and requests [tokens]."""
    try:
        arrays = np.load(path, allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise ValueError("it is one array")
        with arrays:
            ids, weights = arrays["topk_ids"], arrays["topk_weights"]
            request = arrays.get("token_request")
    except (KeyError, ValueError, OSError, EOFError, BadZipFile, TypeError) as error:
        reason = str(error).strip("'\"")
        raise ValueError(f"trace {path} holds no topk_ids and topk_weights: {reason}") from None
    if ids.ndim != 3 or ids.shape != weights.shape or not 0 <= layer < ids.shape[0]:
        raise ValueError(
            f"trace {path} has ids {list(ids.shape)} and weights {list(weights.shape)}: allowed is "
            f"[layers, tokens, k] for both, with more layers than layer={layer}."
        )
    if ids.shape[1] == 0:
        raise ValueError(f"trace {path} has no tokens.")
    if ids.dtype.kind not in "iu":
        raise ValueError(f"trace {path}: topk_ids are {ids.dtype}: allowed is an integer dtype.")
    if weights.dtype.kind != "f":
        raise ValueError(f"trace {path}: topk_weights are {weights.dtype}: allowed are floats.")
    if request is not None and (request.shape != ids.shape[1:2] or request.dtype.kind not in "iu"):
        raise ValueError(
            f"trace {path}: token_request is {request.dtype} {list(request.shape)}: allowed is a "
            f"whole number for each of the {ids.shape[1]} tokens."
        )
    ids, weights = ids[layer], weights[layer].astype(np.float32)
    if ids.shape[1] != shape.k or int(ids.max()) >= shape.experts:
        raise ValueError(
            f"trace {path} has k={ids.shape[1]} and expert {int(ids.max())}: shape "
            f"{shape.name} has k={shape.k} and {shape.experts} experts."
        )
    if int(ids.min()) < -1:
        raise ValueError(
            f"trace {path} has expert {int(ids.min())}: allowed is -1, for padding, and 0 to "
            f"{shape.experts - 1}."
        )
    ids = ids.astype(np.int64)
    ordered = np.sort(ids, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    if twice.any():
        token = int(twice.argmax())
        raise ValueError(
            f"trace {path} names an expert twice for token {token} of layer {layer}, "
            f"{ids[token].tolist()}: a MoE layer never does, so it is dense or was not recorded."
        )
    bad = ~np.isfinite(weights) & (ids >= 0)
    if bad.any():
        token = int(bad.any(1).argmax())
        raise ValueError(
            f"trace {path}: topk_weights of token {token} of layer {layer} are "
            f"{weights[token].tolist()}: allowed is a finite number for each expert."
        )
    if not (ids >= 0).any():
        raise ValueError(f"trace {path} holds nothing but padding in layer {layer}.")
    return ids, weights, None if request is None else request.astype(np.int64)
