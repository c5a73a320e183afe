"""Floats and hashes as integer keys, where a smaller key is kept first.

Integers make the order total and the same on every backend, where comparisons of floats differ for
NaN and -0.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KEY_BITS = 32
"""Keys lie in [0, 2 ** KEY_BITS)."""


def descending_key(values: Tensor) -> Tensor:
    """Map floats to integers in [0, 2 ** 32) that are smaller where the float is larger.

    -0.0 equals 0.0, and NaN comes last, after -inf.

    Args:
        values: any shape, any float dtype; compared as float32.

    Returns:
        int64, of the same shape.
    """
    values = values.float()
    bits = values.view(torch.int32)
    bits = torch.where(bits == -(1 << 31), 0, bits)  # -0.0; a compiler may drop "+ 0.0"
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # two's complement order is the float order
    key = 0x7FFFFFFF - ascending.long()
    return torch.where(values.isnan(), (1 << KEY_BITS) - 1, key)


def random_hash(seed: int, layer: int, step: int | Tensor, rank: Tensor, expert: Tensor) -> Tensor:
    """Hash the five values to int64 in [0, 2 ** 32), identically on every backend.

    The mixing step is lowbias32 (Ellis and Wellons, "hash-prospector").
    """
    mask = 0xFFFFFFFF
    state: Tensor = _mix(seed & mask)  # a number until the first tensor
    for value in (layer, step, rank, expert):
        word = value.long() if isinstance(value, Tensor) else value
        state = _mix(state ^ (((word & mask) * 0x9E3779B9) & mask))
    return state


def _mix(x: Any) -> Any:
    mask = 0xFFFFFFFF
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & mask  # int64 products wrap; the low 32 bits are right
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & mask
    return x ^ (x >> 16)
