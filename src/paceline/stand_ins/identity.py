"""Identity of a model's MoE layers: names, sizes, and fingerprints of their weights.

One checkpoint may be loaded as float32, bfloat16 or float16. A fingerprint begins with a hash of
the weights as bfloat16, which float32 and bfloat16 have in common to the bit; quantised weights are
hashed as they are. float16 rounds otherwise, so a sketch follows: a few random projections of the
weights, which rounding moves by a known amount and other weights by more.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_DIGITS = 16  # hexadecimal, of a SHA-256: two agree by chance once in 2^64


@dataclass(frozen=True)
class LayerIdentity:
    """Identity of one MoE layer of a model.

    Attributes:
        name: of the layer.
        k: experts per token.
        num_experts: of the layer, over all ranks.
        router: fingerprint of the router's weights.
        experts: expert -> fingerprint, for those that this process holds.
    """

    name: str
    k: int
    num_experts: int
    router: str
    experts: Mapping[int, str]


def router_fingerprint(router: nn.Module) -> str:
    """Return the fingerprint of a router's weights."""
    return _fingerprint(_weights(router))


def expert_fingerprints(experts: nn.Module, count: int) -> list[str]:
    """Return the fingerprints of the `count` experts that a module holds, in its order.

    Where weights aren't stacked [experts, ...] or one module per expert, all experts have the same.
    """
    weights = _weights(experts)
    if all(t.dim() and t.shape[0] == count for _, t in weights):
        return [_fingerprint((name, t[e]) for name, t in weights) for e in range(count)]
    children = list(experts.children())
    if len(children) == count and not any(True for _ in experts.parameters(recurse=False)):
        return [_fingerprint(_weights(child)) for child in children]
    return [_fingerprint(weights)] * count


def plain_parts(name: str, t: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's part of a tensor by name; all parts of one that wraps others (torchao).

    >>> [name for name, _ in plain_parts("weight", torch.ones(2))]
    ['weight']
    """
    part: Any = _local(t)
    if not is_traceable_wrapper_subclass(part):
        yield name, part
        return
    inside, _ = part.__tensor_flatten__()
    for attribute in inside:
        yield from plain_parts(f"{name}.{attribute}", getattr(part, attribute))


def _weights(module: nn.Module) -> list[tuple[str, Tensor]]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return [part for name, t in named for part in plain_parts(name, t.detach())]


def _local(t: Tensor) -> Tensor:
    """Return this rank's part of a tensor that is spread over ranks."""
    part: Tensor = t.to_local() if hasattr(t, "to_local") else t
    return part


def same_weights(one: str, other: str) -> bool:
    """Return True if two fingerprints may be of one checkpoint, loaded in whatever precision.

    Exact unless one of the two was loaded as float16 and the other wasn't: then a change of the
    weights by less than about 0.4% (of their norm; 0.05% between float16 and float32) is not seen.

    >>> same_weights("0123456789abcdef", "0123456789abcdef")
    True
    """
    (hash_one, *rest), (hash_other, *others) = one.split(":"), other.split(":")
    if hash_one == hash_other:
        return True
    if len(rest) != 2 or len(others) != 2 or rest[0] == others[0] or "float16" not in (
        rest[0], others[0]
    ):  # fmt: skip
        return False
    try:
        far = _read_sketch(rest[1]) - _read_sketch(others[1])
        allowed = sum(_ROUNDING[dtype] ** 2 for dtype in (rest[0], others[0]))
    except (KeyError, ValueError, binascii.Error):
        return False
    return bool(np.mean(far**2) <= _SIGMAS**2 * allowed)


_ROUNDING = {"float32": 0.0, "bfloat16": 2**-8 / 12**0.5, "float16": 2**-11 / 12**0.5}
"""Dtype -> root mean square of the error that rounding to it makes, per weight, at most."""

_SIGMAS = 3.0  # of the mean over all projections: one checkpoint is refused once in 10^11
_PROJECTIONS = 8


def _fingerprint(weights: Iterable[tuple[str, Tensor]]) -> str:
    seen, weights = hashlib.sha256(), list(weights)
    for name, weight in weights:
        seen.update(f"{name}{list(weight.shape)}".encode())
        seen.update(_sums(weight).cpu().numpy().tobytes())
    digits = seen.hexdigest()[:_DIGITS]
    kinds = {str(weight.dtype).removeprefix("torch.") for _, weight in weights}
    if not kinds or not kinds <= _ROUNDING.keys():
        return digits
    # a router may keep a bias in float32 beside its weight
    coarsest = next(dtype for dtype in ("float16", "bfloat16", "float32") if dtype in kinds)
    return f"{digits}:{coarsest}:{_sketch(weight for _, weight in weights)}"


def _sketch(weights: Iterable[Tensor]) -> str:
    """Return random projections of weights over their norm, as base64 of float32."""
    total, square = np.zeros(_PROJECTIONS), 0.0
    for number, weight in enumerate(weights):
        rows = weight.detach().reshape(-1, weight.shape[-1] if weight.dim() else 1).double()
        across = _signs(number, rows.shape[1]).to(rows.device)
        down = _signs(number + 1, rows.shape[0]).to(rows.device)
        total += ((rows @ across) * down).sum(0).cpu().numpy()
        square += float(rows.square().sum())
    scaled = total / max(square, np.finfo(float).tiny) ** 0.5
    return base64.b64encode(scaled.astype("<f4").tobytes()).decode()


def _signs(number: int, size: int) -> Tensor:
    """Return [size, projections] float64 signs, the same on every machine."""
    drawn = np.random.PCG64(number).random_raw(size)
    bits = drawn[:, None] >> np.arange(1, _PROJECTIONS + 1, dtype=np.uint64)
    return torch.from_numpy(1.0 - 2 * (bits & np.uint64(1)).astype(float))


def _read_sketch(text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(base64.b64decode(text, validate=True), "<f4", _PROJECTIONS)


def _sums(weight: Tensor) -> Tensor:
    """Sum bits over the last dimension, plain and weighted by index: [..., 2] int64, exact."""
    if weight.is_floating_point():
        weight = weight.bfloat16().contiguous().view(torch.int16)
    bits = weight.long()
    if bits.dim() == 0:
        return bits
    place = torch.arange(1, bits.shape[-1] + 1, device=bits.device)
    return torch.stack([bits.sum(-1), (bits * place).sum(-1)], -1)
