"""Arguments of a forward, under whichever names architectures and versions give them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_CACHES = ("cache", "past_key_values", "cache_params")  # renamed in Transformers 5.2x


def argument_names(forward: Callable[..., Any]) -> list[str]:
    """Return the names of a forward's parameters, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(forward).parameters.values() if p.kind in kinds]


def cache_name(forward: Callable[..., Any]) -> str:
    """Return the name under which a forward takes the cache of the tokens before.

    Raises:
        ValueError: if it takes none.
    """
    names = argument_names(forward)
    found = next((name for name in _CACHES if name in names), None)
    if found is None:
        raise ValueError("model must take a cache of the tokens before to decode, it takes none.")
    return found


def positional(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return all arguments of a call in order, those passed by name included."""
    return (*args, *(kwargs[n] for n in names[len(args) :] if n in kwargs)) if kwargs else args


def named(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs} if args else kwargs


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first argument of a call, by name or not."""
    return args[0] if args else next(iter(kwargs.values()))


# -- in the arguments of a model's forward, by name ------------------------------------------------


def tokens_of(arguments: dict[str, Any]) -> Tensor | None:
    """Return the ids [batch, length] or embeddings [batch, length, hidden] of a forward, if any.

    Hidden states are tokens where a mask beside them says which are padding: a part of a model
    that is run on its own (a pipeline stage) gets these.
    """
    for name in ("input_ids", "inputs_embeds", "decoder_input_ids"):
        tokens = arguments.get(name)
        if isinstance(tokens, Tensor) and tokens.dim() >= 2:
            return tokens
    hidden, mask = arguments.get("hidden_states"), arguments.get("attention_mask")
    if isinstance(hidden, Tensor) and hidden.dim() == 3 and is_padding_mask(mask):
        return hidden
    return None


def is_padding_mask(mask: Any) -> bool:
    """Return True for a mask [batch, tokens so far], which any attention implementation takes."""
    return isinstance(mask, Tensor) and mask.dim() == 2


def real_rows(mask: Any, batch: int, length: int, past: int | Tensor) -> Tensor:
    """Return [batch * length] bool, False for padding, from an attention mask.

    Args:
        mask: [batch, tokens so far] or [batch, 1, length, tokens so far].
        batch: rows of the tokens.
        past: tokens that were cached before.

    Raises:
        ValueError: if the mask can't be read.
    """
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= length:
        own: Tensor = mask[:, -1] if length == 1 else mask[:, -length:].reshape(-1)
        return own != 0
    if isinstance(mask, Tensor) and mask.dim() == 4:
        # a token is real where it may attend to itself
        mask = mask if mask.dtype is torch.bool else mask == 0
        own = mask[:, 0].diagonal(int(past), 1, 2)
        if own.shape in ((batch, length), (1, length)):
            return own.expand(batch, length).reshape(-1)
    shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    raise ValueError(
        "attention_mask must be [batch, tokens so far] or [batch, 1, length, tokens so far] for "
        f"padding to be read from it, got {shape}."
    )


def positions_of(arguments: dict[str, Any]) -> Tensor | None:
    """Return the [batch or 1, length] positions in the text that a forward is given, if any.

    Models that read images take [4, batch, length]: the first are those of the text, the others
    time, height and width. Three of these alone don't give positions in the text.
    """
    positions = arguments.get("position_ids")
    if not isinstance(positions, Tensor):
        return None
    if positions.dim() == 3 and positions.shape[0] == 4:
        return positions[0]
    return positions if positions.dim() == 2 else None


def cache_of(arguments: dict[str, Any]) -> Any:
    """Return the cache that a forward is given, None without one."""
    for name in _CACHES:
        cache = arguments.get(name)
        if cache is not None:
            return cache
    return None


def cached_tokens(arguments: dict[str, Any]) -> int | Tensor:
    """Return the number of tokens in a forward's cache; a tensor where a device counts them."""
    cache = cache_of(arguments)
    if not hasattr(cache, "get_seq_length"):
        return 0
    try:
        length = cache.get_seq_length()
    except ValueError:  # a cache of linear attention layers alone counts no tokens
        return int(bool(getattr(cache, "has_previous_state", lambda: False)()))
    return length.clone() if isinstance(length, Tensor) else int(length)
