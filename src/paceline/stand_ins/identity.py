"""Which layers a calibration is of: names, sizes, and fingerprints of their weights.

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

_DIGITS = 16  # hexadecimal, of a SHA-256: by chance two are alike once in 2^64


@dataclass(frozen=True)
class LayerIdentity:
    """One MoE layer of a model, as a calibration knows it.

    Attributes:
        name: of the layer.
        k: experts a token.
        num_experts: of the layer, over all ranks.
        router: fingerprint of its weights.
        experts: expert -> fingerprint, of those that this process holds.
    """

    name: str
    k: int
    num_experts: int
    router: str
    experts: Mapping[int, str]


def of_router(router: nn.Module) -> str:
    """Of all weights of a router."""
    return _of(_weights(router))


def of_experts(experts: nn.Module, count: int) -> list[str]:
    """Of each of the experts that a module holds, in its order.

    Where weights aren't stacked [experts, ...] or one module an expert, all experts have the same.

    Args:
        experts: module.
        count: of the experts that it holds.
    """
    weights = _weights(experts)
    if all(t.dim() and t.shape[0] == count for _, t in weights):
        return [_of((name, t[e]) for name, t in weights) for e in range(count)]
    children = list(experts.children())
    if len(children) == count and not any(True for _ in experts.parameters(recurse=False)):
        return [_of(_weights(child)) for child in children]
    return [_of(weights)] * count


def plain(name: str, t: Tensor) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of a tensor by name; all parts of one that wraps others, as torchao's do.

    >>> [name for name, _ in plain("weight", torch.ones(2))]
    ['weight']
    """
    part: Any = _local(t)
    if not is_traceable_wrapper_subclass(part):
        yield name, part
        return
    inside, _ = part.__tensor_flatten__()
    for attribute in inside:
        yield from plain(f"{name}.{attribute}", getattr(part, attribute))


def _weights(module: nn.Module) -> list[tuple[str, Tensor]]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return [part for name, t in named for part in plain(name, t.detach())]


def _local(t: Tensor) -> Tensor:
    """This rank's part of a tensor that is spread over ranks."""
    part: Tensor = t.to_local() if hasattr(t, "to_local") else t
    return part


def _of(weights: Iterable[tuple[str, Tensor]]) -> str:
    seen = hashlib.sha256()
    for name, weight in weights:
        seen.update(f"{name}{list(weight.shape)}".encode())
        seen.update(_sums(weight).cpu().numpy().tobytes())
    return seen.hexdigest()[:_DIGITS]


def _sums(weight: Tensor) -> Tensor:
    """[..., 2] int64 sums over the last dimension of the bits, plain and by place: exact."""
    if weight.is_floating_point():
        weight = weight.bfloat16().contiguous().view(torch.int16)
    bits = weight.long()
    if bits.dim() == 0:
        return bits
    place = torch.arange(1, bits.shape[-1] + 1, device=bits.device)
    return torch.stack([bits.sum(-1), (bits * place).sum(-1)], -1)
