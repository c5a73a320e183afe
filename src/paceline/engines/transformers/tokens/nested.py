"""A forward inside another one: the same tokens in another form, or tokens of its own.

A language model inside another model mostly gets the same tokens. But a module may run it twice, on
other tokens or under another mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.engines.transformers.tokens.arguments import is_padding_mask, tokens_of
from paceline.engines.transformers.tokens.context import ForwardContext


def arguments_inside(
    outer: ForwardContext, arguments: dict[str, Any], module: int
) -> dict[str, Any] | None:
    """What is known of the tokens of a forward inside `outer`, called with `arguments`.

    Args:
        outer: of the forward around it.
        arguments: of the inner forward.
        module: a number of its own for each inner module.

    Returns:
        None where `outer` says it, else the arguments of a context that does.
    """
    calls = outer.inner_calls.get(module, 0)
    outer.inner_calls[module] = calls + 1
    tokens, mask = tokens_of(arguments), arguments.get("attention_mask")
    own = outer.arguments.get("attention_mask")
    if outer.tokens is None:
        return arguments
    if tokens is outer.tokens and mask is own:
        return None
    if tokens is None or outer.shape is None:
        return None
    if tokens.shape[:2] != outer.shape:
        return arguments
    if not tokens.is_floating_point() and not _same_ids(outer.tokens, tokens):
        return arguments
    if is_padding_mask(mask):
        if mask is own:
            return None
        given = {name: value for name, value in arguments.items() if value is not None}
        return {**outer.arguments, **given}
    if calls == 0 or tokens is outer.tokens:
        return None
    # the same module once more, on embeddings of its own: only what it is given now counts
    known = mask is not None or own is None
    return arguments if known else {}


def _same_ids(own: Tensor, ids: Tensor) -> bool:
    """Whether these are the outer forward's ids, itself or a view of them."""
    if ids is own:
        return True
    if own.is_floating_point() or torch.compiler.is_compiling():
        return False
    return ids.data_ptr() == own.data_ptr() and ids.stride() == own.stride()
