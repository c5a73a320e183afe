"""Flags [rows] of a forward's tokens: joined, and found again where a layer sees only some."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def known_to_be_all(flags: Tensor) -> bool:
    """Whether all flags are set, where looking costs no wait: then layers needn't see them."""
    host = type(flags) is Tensor and flags.is_cpu and not torch.compiler.is_compiling()
    return host and bool(flags.all())


def both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """What both say; None says yes to all."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def subset_of(modality: Mapping[str, Tensor] | None, rows: int, layer: str) -> Tensor | None:
    """[rows] indices into the batch of a layer that sees only text, or only other, tokens.

    None where no such subset has that many rows.

    Args:
        modality: name -> [batch * length] bool; empty: all is text; None: nobody knows.
        rows: that the layer sees.
        layer: its name.
    """
    if not modality:
        return None
    other = torch.stack(list(modality.values())).any(0)
    named_other = any(word in layer for word in ("vision", "image", "visual"))
    for members in (other, ~other) if named_other else (~other, other):
        index = members.nonzero().flatten()
        if len(index) == rows:
            return index
    return None
