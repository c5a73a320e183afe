"""Recorded routing, where there is some: what the fixture `traces_dir` finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

RECORDED = ("esft_v2lite_intent", "esft_v2lite_law", "gpt_oss_20b_decode")
_EXPERTS = {"esft_v2lite_intent": 64, "esft_v2lite_law": 64, "gpt_oss_20b_decode": 32}


def recorded(folder: Path, name: str) -> tuple[np.ndarray, int]:
    """([layers, tokens, k] choices, experts) of one recorded traffic.

    The sequences of the decode trace run side by side: a step of all of them is 64 tokens.
    """
    ids = np.load(folder / f"{name}.npz")["topk_ids"]
    if ids.ndim == 4:  # [layers, sequences, steps, k]
        ids = ids.transpose(0, 2, 1, 3).reshape(len(ids), -1, ids.shape[-1])
    return ids, _EXPERTS[name]


def piece_loads(ids: np.ndarray, experts: int, tokens: int) -> np.ndarray:
    """[layers, pieces, experts] assignments of every `tokens` tokens in turn, the rest left out."""
    pieces = ids.shape[1] // tokens
    cut = ids[:, : pieces * tokens].reshape(len(ids), pieces, -1)
    return np.stack([[np.bincount(piece, minlength=experts) for piece in layer] for layer in cut])
