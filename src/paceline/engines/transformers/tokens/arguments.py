"""Reading a forward's arguments, under whichever names architectures and versions give them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.engines.transformers.patching import argument_names

_CACHES = ("cache", "past_key_values", "cache_params")  # renamed in Transformers 5.2x


def tokens_of(arguments: dict[str, Any]) -> Tensor | None:
    """Ids [batch, length] or embeddings [batch, length, hidden] a forward is given, if any.

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
    """Whether it is a mask [batch, tokens so far], which can be read whatever the attention."""
    return isinstance(mask, Tensor) and mask.dim() == 2


def real_rows(mask: Any, batch: int, length: int, past: int | Tensor) -> Tensor:
    """[batch * length] bool, False for padding, as an attention mask says.

    Args:
        mask: [batch, tokens so far] or [batch, 1, length, tokens so far].
        batch: rows of the tokens.
        length: of each.
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
        f"attention_mask {shape} can't be read as padding: allowed is [batch, tokens so far] or "
        "[batch, 1, length, tokens so far]."
    )


def positions_of(arguments: dict[str, Any]) -> Tensor | None:
    """[batch or 1, length] positions in the text that a forward is given, if any.

    Models that read images take [4, batch, length]: the first are those of the text, the others
    time, height and width; with three of these alone, nothing is said of the text.
    """
    positions = arguments.get("position_ids")
    if not isinstance(positions, Tensor):
        return None
    if positions.dim() == 3 and positions.shape[0] == 4:
        return positions[0]
    return positions if positions.dim() == 2 else None


def cache_of(arguments: dict[str, Any]) -> Any:
    """The cache a forward is given, None without one."""
    return next((c for name in _CACHES if (c := arguments.get(name)) is not None), None)


def cached_tokens(arguments: dict[str, Any]) -> int | Tensor:
    """Tokens in a forward's cache; where a device counts them, no host waits for it."""
    cache = cache_of(arguments)
    if not hasattr(cache, "get_seq_length"):
        return 0
    try:
        length = cache.get_seq_length()
    except ValueError:  # a cache of linear attention layers alone counts no tokens
        return int(bool(getattr(cache, "has_previous_state", lambda: False)()))
    return length.clone() if isinstance(length, Tensor) else int(length)


def parameter_names(module: nn.Module) -> list[str]:
    """Names of a module's forward parameters, in order."""
    return argument_names(module.forward)
