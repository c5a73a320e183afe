"""Identity of a model's MoE layers: names, sizes, and fingerprints of their weights.

Weights are compared as bfloat16, whatever they are loaded as, so that a calibration made in float32
on a CPU fits the same model in bfloat16 on a GPU; quantised weights are compared as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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


def _fingerprint(weights: Iterable[tuple[str, Tensor]]) -> str:
    seen = hashlib.sha256()
    for name, weight in weights:
        seen.update(f"{name}{list(weight.shape)}".encode())
        seen.update(_sums(weight).cpu().numpy().tobytes())
    return seen.hexdigest()[:_DIGITS]


def _sums(weight: Tensor) -> Tensor:
    """Sum bits over the last dimension, plain and weighted by index: [..., 2] int64, exact."""
    if weight.is_floating_point():
        weight = weight.bfloat16().contiguous().view(torch.int16)
    bits = weight.long()
    if bits.dim() == 0:
        return bits
    place = torch.arange(1, bits.shape[-1] + 1, device=bits.device)
    return torch.stack([bits.sum(-1), (bits * place).sum(-1)], -1)
