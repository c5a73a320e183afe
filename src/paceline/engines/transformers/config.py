"""A policy in a model's config: it survives saving and loading, and switches nothing on."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from paceline.policy import CapacityPolicy

CONFIG_KEY = "capacity_policy"
_VERSION = 1


def save_policy(model: nn.Module, policy: CapacityPolicy | None) -> None:
    """Keep `policy` in `model.config`, which `save_pretrained` writes; None takes it out.

    Raises:
        ValueError: if the model has no config.
    """
    config = _config(model)
    if policy is not None:
        setattr(config, CONFIG_KEY, {"version": _VERSION, **json.loads(policy.to_json())})
    elif hasattr(config, CONFIG_KEY):
        delattr(config, CONFIG_KEY)


def load_policy(model: nn.Module) -> CapacityPolicy | None:
    """Return the policy kept in `model.config`, None if there is none. It is not attached.

    Raises:
        ValueError: if it is of another version, or not a policy.
    """
    kept = getattr(_config(model), CONFIG_KEY, None)
    if kept is None:
        return None
    if not isinstance(kept, dict) or kept.get("version") != _VERSION:
        version = kept.get("version") if isinstance(kept, dict) else kept
        raise ValueError(
            f"the version of {CONFIG_KEY} in the config must be {_VERSION}, got {version!r}."
        )
    return CapacityPolicy.from_json(json.dumps({k: v for k, v in kept.items() if k != "version"}))


def _config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if config is None:
        raise ValueError(f"{type(model).__name__} has no config to keep a policy in.")
    return config
