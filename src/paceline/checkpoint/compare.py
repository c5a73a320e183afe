"""Whether two checkpoints compute the same: both are loaded and run on the same random tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-5
"""Largest difference of two outputs that compute the same, in float32, relative to the largest
output (or to 1, if that is larger): experts are summed up in another order."""

_ROWS, _LENGTH = 2, 64


def output_difference(before: Path, after: Path, trust_remote_code: bool = False) -> float:
    """Largest difference of the outputs on random tokens, relative as `TOLERANCE` says.

    One model is in memory at a time, in float32.

    Raises:
        ValueError: if one can't be loaded, or not be run on token ids alone.

    >>> from paceline.shipped import MODEL_FOLDER
    >>> output_difference(MODEL_FOLDER, MODEL_FOLDER)
    0.0
    """
    first = _output(before, trust_remote_code)
    second = _output(after, trust_remote_code)
    scale = max(1.0, float(first.abs().max()))
    return float((first - second).abs().max()) / scale


def _output(folder: Path, trust_remote_code: bool) -> Tensor:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
        names = getattr(config, "architectures", None) or ["AutoModelForCausalLM"]
        kind: Any = getattr(transformers, names[0], transformers.AutoModelForCausalLM)
        options: Mapping[str, Any] = {"dtype": torch.float32, "use_safetensors": True}
        if kind is transformers.AutoModelForCausalLM:
            options = {**options, "trust_remote_code": trust_remote_code}
        model = kind.from_pretrained(folder, **options).eval()
        vocabulary = model.get_input_embeddings().num_embeddings
        ids = torch.randint(
            0, vocabulary, (_ROWS, _LENGTH), generator=torch.Generator().manual_seed(0)
        )
        with torch.inference_mode():
            out: Tensor = model(input_ids=ids)[0]
    except Exception as error:  # what is raised for a model that can't be run differs with it
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{folder} can't be run on token ids: {reason}") from error
    return out.float()
