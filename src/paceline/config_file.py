"""A model's config.json, as far as it can be read without the model's code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.files import MOST_SETTINGS, read_plain
from paceline.text import shortened


def read_config(file: Path) -> dict[str, Any]:
    """The content of a config.json.

    Raises:
        ValueError: naming the file, if it can't be read or is no JSON object.

    >>> from paceline.shipped import MODEL_FOLDER
    >>> read_config(MODEL_FOLDER / "config.json")["model_type"]
    'olmoe'
    """
    try:
        config = json.loads(read_plain(file, MOST_SETTINGS).decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} can't be read: {shortened(str(error), 200)}.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no config: it is a JSON object.")
    return config


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


def groups_of(config: Mapping[str, Any]) -> int:
    """Expert groups in which a model's router chooses, 1 where it has none.

    >>> groups_of({"n_group": 8}), groups_of({"n_group": 8, "topk_method": "greedy"})
    (8, 1)
    """
    if find(config, "topk_method") == "greedy":
        return 1
    found = find(config, "n_group", "num_expert_group", "num_expert_groups")
    return found if isinstance(found, int) and found > 1 else 1
