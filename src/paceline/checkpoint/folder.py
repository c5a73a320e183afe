"""A model folder: its config and the tensors of its shards, and whether two compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.checkpoint.expert_tensors import ExpertLayer, Shapes, find_expert_layers
from paceline.model_config import ModelConfig, read_model_config
from paceline.text import shortened

TOLERANCE = 1e-5
"""Largest difference of two outputs that compute the same, in float32, relative to the largest
output (or to 1, if that is larger): experts are summed up in another order."""
_ROWS, _LENGTH = 2, 64


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its config and the shapes of its tensors, weights unread.

    Attributes:
        config: content of config.json.
        shards: file name -> names of its tensors.
        shapes: tensor name -> shape.
    """

    folder: Path
    config: ModelConfig
    shards: Mapping[str, tuple[str, ...]]
    shapes: Shapes

    def layers(self) -> list[ExpertLayer]:
        """Find the layers with experts, in order; those for multi-token prediction are left out.

        Raises:
            ValueError: as `find_expert_layers` does.
        """
        return find_expert_layers(self.shapes, self.config.hidden_layers)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint without its weights.

    Raises:
        ValueError: naming the file, if config.json or a shard can't be read, or there is none.

    >>> from paceline.shipped import MODEL_FOLDER
    >>> open_checkpoint(MODEL_FOLDER).layers()[0].num_experts
    32
    """
    config = read_model_config(folder / "config.json")
    shards: dict[str, tuple[str, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if not file.is_file():  # opening a pipe would wait for it
            raise ValueError(f"{file} is no plain file.")
        try:
            with safe_open(file, framework="pt") as stored:
                shards[file.name] = tuple(stored.keys())
                for name in shards[file.name]:
                    if name in shapes:
                        raise ValueError(f"{file} holds {name}, which another shard holds too.")
                    shapes[name] = tuple(stored.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{file} is no safetensors file: {shortened(str(error), 200)}."
            ) from None
    if not shards:
        raise ValueError(f"{folder} has no .safetensors files: weights in other forms are refused.")
    return Checkpoint(folder, config, shards, shapes)


def output_difference(before: Path, after: Path, trust_remote_code: bool = False) -> float:
    """Return the largest difference of two models' outputs on random tokens, as in `TOLERANCE`.

    One model is in memory at a time, in float32.

    Raises:
        ValueError: if one can't be loaded, or can't be run on token ids alone.

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
