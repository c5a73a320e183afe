"""Which tokens of a forward are of an image, a video or a sound, and when nobody can tell."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.engines.transformers.tokens.arguments import is_padding_mask, tokens_of

MODALITY_OF_TYPE = {"image": 1, "video": 2, "audio": 3}
"""Values of Transformers' mm_token_type_ids; 0 is text."""

_TOKEN_TYPES = ("mm_token_type_ids", "moe_mm_token_type_ids")
_IDS_BESIDE = "talker_input_ids"
"""What embeddings were made of: Qwen3-Omni's talker is given the thinker's, these ids beside."""
_TOWERS = {
    "pixel_values_videos": "video",
    "pixel_values": "image",
    "input_features": "audio",
    "input_values": "audio",
}


def modality_tokens(config: Any) -> dict[str, int]:
    """Modality -> id of the placeholder token that a config names for it."""
    found = {}
    parts = [config, getattr(config, "thinker_config", None)]
    for modality in MODALITY_OF_TYPE:
        for part in parts:
            for ending in ("token_id", "token_index"):
                token = getattr(part, f"{modality}_{ending}", None)
                if isinstance(token, int) and modality not in found:
                    found[modality] = token
    return found


def told_apart(types: Tensor) -> dict[str, Tensor]:
    """Name -> [rows] bool of every modality, from codes [rows] as in MODALITY_OF_TYPE."""
    return {modality: types == value for modality, value in MODALITY_OF_TYPE.items()}


def modality_of(arguments: dict[str, Any], config: Any, decoding: bool) -> dict[str, Tensor] | None:
    """What a forward's arguments say of its tokens.

    Args:
        arguments: of the forward, by name.
        config: of the model that runs, for its placeholder tokens.
        decoding: whether it is known that all tokens are generated, and so text.

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
        # a prompt's types that decode steps still carry say nothing of the new token
        if isinstance(types, Tensor) and types.dim() == 2 and types.shape[1] in lengths:
            return told_apart(types[:, -length:].reshape(-1))
    placeholders = modality_tokens(config)
    ids = arguments.get(_IDS_BESIDE) if tokens.is_floating_point() else tokens
    if isinstance(ids, Tensor) and ids.shape == tokens.shape[:2]:
        return {m: ids.reshape(-1) == token for m, token in placeholders.items()}
    return None if placeholders else {}


def tower_modality(arguments: dict[str, Any], around: dict[str, Any]) -> str | None:
    """What a tower's forward reads, which has no tokens of a text; None: it is no tower's.

    Args:
        arguments: of the forward, by name.
        around: of the model's forward: a tower that reads pictures may be given videos as such.
    """
    if tokens_of(arguments) is not None:
        return None
    for name, modality in _TOWERS.items():
        read = arguments.get(name)
        if read is not None:
            known = (m for n, m in _TOWERS.items() if around.get(n) is read)
            return next(known, modality)
    return None
