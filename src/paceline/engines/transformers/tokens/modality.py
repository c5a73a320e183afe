"""Modalities of a forward's tokens: text, image, video or audio, and when they are unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.engines.rules import ALL_MODALITIES
from paceline.engines.transformers.tokens.arguments import (
    argument_names,
    is_padding_mask,
    tokens_of,
)

MODALITY_OF_TYPE = {"image": 1, "video": 2, "audio": 3}
"""Values of Transformers' mm_token_type_ids; 0 is text."""

_TOKEN_TYPES = ("mm_token_type_ids", "moe_mm_token_type_ids")
_IDS_BESIDE = "talker_input_ids"
"""Ids that embeddings were made of: Qwen3-Omni's talker gets the thinker's embeddings with them."""
_TOWERS = {
    "pixel_values_videos": "video",
    "pixel_values": "image",
    "input_features": "audio",
    "input_values": "audio",
}


def placeholder_tokens(config: Any) -> dict[str, int]:
    """Return the id of the placeholder token that a config names for each modality."""
    found = {}
    parts = [config, getattr(config, "thinker_config", None)]
    for modality in MODALITY_OF_TYPE:
        for part in parts:
            for ending in ("token_id", "token_index"):
                token = getattr(part, f"{modality}_{ending}", None)
                if isinstance(token, int) and modality not in found:
                    found[modality] = token
    return found


def known_modalities(model: nn.Module) -> frozenset[str]:
    """Return the modalities that a model's forward tells apart; none if it reads text alone."""
    if any("token_type_ids" in name for name in argument_names(model.forward)):
        return ALL_MODALITIES
    return frozenset(placeholder_tokens(getattr(model, "config", None)))


def by_modality(types: Tensor) -> dict[str, Tensor]:
    """Return a [rows] bool per modality, from codes [rows] as in MODALITY_OF_TYPE."""
    return {modality: types == value for modality, value in MODALITY_OF_TYPE.items()}


def read_modality(
    arguments: dict[str, Any], config: Any, decoding: bool
) -> dict[str, Tensor] | None:
    """Return the modality of each token, from a forward's arguments.

    Args:
        arguments: of the forward, by name.
        config: of the model that runs, for its placeholder tokens.
        decoding: whether all tokens are known to be generated, and so text.

    Returns:
        Name -> [batch * length] bool for image, video and audio; empty where everything is text;
        None where the forward has embeddings alone, which may be of anything.
    """
    tokens, mask = tokens_of(arguments), arguments.get("attention_mask")
    if tokens is None or decoding:
        return {}
    length = tokens.shape[1]
    lengths = (length, mask.shape[1]) if is_padding_mask(mask) else (length,)  # type: ignore[union-attr]
    for name in _TOKEN_TYPES:
        types = arguments.get(name)
        # a decode step may still be given the types of its prompt, which are not its token's
        if isinstance(types, Tensor) and types.dim() == 2 and types.shape[1] in lengths:
            return by_modality(types[:, -length:].reshape(-1))
    placeholders = placeholder_tokens(config)
    ids = arguments.get(_IDS_BESIDE) if tokens.is_floating_point() else tokens
    if isinstance(ids, Tensor) and ids.shape == tokens.shape[:2]:
        return {m: ids.reshape(-1) == token for m, token in placeholders.items()}
    return None if placeholders else {}


def tower_modality(arguments: dict[str, Any], around: dict[str, Any]) -> str | None:
    """Return the modality that a tower's forward reads, None if it isn't a tower's.

    `around` are the arguments of the model's forward: a tower that reads images may be given
    videos under that name.
    """
    if tokens_of(arguments) is not None:
        return None
    for name, modality in _TOWERS.items():
        read = arguments.get(name)
        if read is not None:
            known = (m for n, m in _TOWERS.items() if around.get(n) is read)
            return next(known, modality)
    return None


def rows_of_modality(modality: Mapping[str, Tensor] | None, rows: int, layer: str) -> Tensor | None:
    """Return [rows] indices into the batch for a layer that sees only text, or only other, tokens.

    None where no such subset has that many rows. `modality` is as of `ForwardContext`.
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
