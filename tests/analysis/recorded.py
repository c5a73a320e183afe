"""Recorded routing as load tables of pieces."""

from __future__ import annotations

import numpy as np
import real_traces

RECORDED = ("esft_v2lite_intent", "esft_v2lite_law", "gpt_oss_20b_decode")
_EXPERTS = {"esft_v2lite_intent": 64, "esft_v2lite_law": 64, "gpt_oss_20b_decode": 32}


def recorded(name: str) -> tuple[np.ndarray, int]:
    """([layers, tokens, k] choices, experts) of one recorded traffic.

    The sequences of the decode trace run side by side: a step of all of them is 64 tokens.
    """
    ids = real_traces.arrays(f"{name}.npz")["topk_ids"]
    if ids.ndim == 4:  # [layers, sequences, steps, k]
        ids = ids.transpose(0, 2, 1, 3).reshape(len(ids), -1, ids.shape[-1])
    return ids, _EXPERTS[name]


def piece_loads(ids: np.ndarray, experts: int, tokens: int) -> np.ndarray:
    """[layers, pieces, experts] assignments of every `tokens` tokens in turn, the rest left out."""
    pieces = ids.shape[1] // tokens
    cut = ids[:, : pieces * tokens].reshape(len(ids), pieces, -1)
    return np.stack([[np.bincount(piece, minlength=experts) for piece in layer] for layer in cut])
