"""A model folder as it lies on disk: its config, and which tensors its shards hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from paceline.checkpoint.expert_tensors import ExpertLayer, Shapes, find_expert_layers
from paceline.model_config import ModelConfig, read_model_config
from paceline.text import shortened


@dataclass(frozen=True)
class Checkpoint:
    """A model folder: its config and the shapes of its tensors, weights unread.

    Attributes:
        folder: where it lies.
        config: content of config.json.
        shards: file name -> names of its tensors.
        shapes: tensor name -> shape.
    """

    folder: Path
    config: ModelConfig
    shards: Mapping[str, tuple[str, ...]]
    shapes: Shapes

    def layers(self) -> list[ExpertLayer]:
        """The layers with experts, in order; those for multi-token prediction left out.

        Raises:
            ValueError: as `find_expert_layers` does.
        """
        return find_expert_layers(self.shapes, self.config.hidden_layers)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read what a checkpoint holds, without its weights.

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
