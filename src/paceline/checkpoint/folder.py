"""A model folder as it lies on disk: its config, and which tensors its shards hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from paceline.checkpoint.expert_tensors import ExpertLayer, Shapes, find_expert_layers

_MAX_CONFIG = 1 << 24  # bytes


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
    config: Mapping[str, Any]
    shards: Mapping[str, tuple[str, ...]]
    shapes: Shapes

    def layers(self) -> list[ExpertLayer]:
        """The layers with experts, in order; those for multi-token prediction left out.

        Raises:
            ValueError: as `find_expert_layers` does.
        """
        return find_expert_layers(self.shapes, _hidden_layers(self.config))

    def groups(self) -> int:
        """Expert groups of a group-limited router, 1 where it has none."""
        return groups_of(self.config)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read what a checkpoint holds, without its weights.

    Raises:
        ValueError: naming the file, if config.json or a shard can't be read, or there is none.

    >>> from paceline.demo.assets import MODEL_FOLDER
    >>> open_checkpoint(MODEL_FOLDER).layers()[0].num_experts
    32
    """
    config = read_config(folder / "config.json")
    shards: dict[str, tuple[str, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as stored:
                shards[file.name] = tuple(stored.keys())
                for name in shards[file.name]:
                    if name in shapes:
                        raise ValueError(f"{file} holds {name}, which another shard holds too.")
                    shapes[name] = tuple(stored.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} is no safetensors file: {error}.") from None
    if not shards:
        raise ValueError(f"{folder} has no .safetensors files: weights in other forms are refused.")
    return Checkpoint(folder, config, shards, shapes)


def read_config(file: Path) -> dict[str, Any]:
    """The content of a config.json.

    Raises:
        ValueError: naming the file, if it can't be read or is no JSON object.

    >>> from paceline.demo.assets import MODEL_FOLDER
    >>> read_config(MODEL_FOLDER / "config.json")["model_type"]
    'olmoe'
    """
    try:
        if file.stat().st_size > _MAX_CONFIG:
            raise ValueError(f"it is larger than {_MAX_CONFIG} bytes")
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} can't be read: {error}.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no config: it is a JSON object.")
    return config


def _hidden_layers(config: Mapping[str, Any]) -> int | None:
    found = find(config, "num_hidden_layers", "n_layers", "num_layers")
    return found if isinstance(found, int) else None


def groups_of(config: Mapping[str, Any]) -> int:
    """Expert groups in which a model's router chooses, 1 where it has none.

    >>> groups_of({"n_group": 8}), groups_of({"n_group": 8, "topk_method": "greedy"})
    (8, 1)
    """
    if find(config, "topk_method") == "greedy":
        return 1
    found = find(config, "n_group", "num_expert_group", "num_expert_groups")
    return found if isinstance(found, int) and found > 1 else 1


def find(config: Mapping[str, Any], *keys: str) -> Any:
    """The value of the first of some keys, in the language model's part where there is one.

    >>> find({"text_config": {"n_group": 8}, "n_group": 1}, "n_group")
    8
    """
    for name in ("thinker_config", "text_config", "llm_config"):
        part = config.get(name)
        if isinstance(part, dict):
            found = find(part, *keys)
            if found is not None:
                return found
    return next((config[key] for key in keys if config.get(key) is not None), None)
