"""Sizes of a model's MoE layers, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.analysis.cost import LayerShape
from paceline.config_file import find, groups_of, read_config
from paceline.traces import Asked

_HIDDEN = ("hidden_size", "d_model")
_EXPERT_SIZE = (
    "moe_intermediate_size",
    "expert_ffn_hidden_size",
    "ffn_hidden_size",
    "intermediate_size",
)
_SHARED_SIZE = ("shared_expert_intermediate_size", "shared_intermediate_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_QUANTISED = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "fp4", "awq": "fp4", "gptq": "fp4"}


def layer_shape(path: Path, precision: str | None = None) -> LayerShape:
    """Sizes of the layers of a model.

    Args:
        path: config.json, or the folder that holds it.
        precision: of the weights; None: what the config says, else bf16.

    Raises:
        ValueError: if the config can't be read or lacks a size.

    >>> from paceline.shipped import MODEL_FOLDER
    >>> layer_shape(MODEL_FOLDER).experts
    32
    """
    config, told = _read(path), Asked().with_config(path)
    expert_size = _size(config, _EXPERT_SIZE, path)
    return LayerShape(
        hidden=_size(config, _HIDDEN, path),
        expert_size=expert_size,
        experts=told.needed("experts", str(path), "how many experts a layer has"),
        k=told.needed("k", str(path), "how many experts a token gets"),
        precision=precision or _precision(config),
        shared=_shared(config, expert_size, path),
    )


def hidden_layers(path: Path) -> int | None:
    """Hidden layers of a model, dense ones included; None where its config doesn't say.

    Raises:
        ValueError: if the config can't be read.

    >>> from paceline.shipped import MODEL_FOLDER
    >>> hidden_layers(MODEL_FOLDER)
    4
    """
    return Asked().with_config(path).layers


def expert_groups(path: Path) -> int:
    """Groups in which a model's router chooses, 1 where it has none.

    Raises:
        ValueError: if the config can't be read.

    >>> from paceline.shipped import MODEL_FOLDER
    >>> expert_groups(MODEL_FOLDER)
    1
    """
    return groups_of(_read(path))


def _read(path: Path) -> dict[str, Any]:
    return read_config(path / "config.json" if path.is_dir() else path)


def _size(config: Mapping[str, Any], keys: Sequence[str], path: Path) -> int:
    found = find(config, *keys)
    if isinstance(found, list) and found:  # one a layer
        found = max(found)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ValueError(
            f"{path}: the config says {keys[0]}={found!r}: expected is a whole number above 0."
        )
    return found


def _shared(config: Mapping[str, Any], expert_size: int, path: Path) -> int:
    """Intermediate size of all shared experts together, 0 where there are none."""
    if find(config, *_SHARED_SIZE):
        return _size(config, _SHARED_SIZE, path)
    return expert_size * _size(config, _SHARED, path) if find(config, *_SHARED) else 0


def _precision(config: Mapping[str, Any]) -> str:
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    return _QUANTISED.get(str(method), "bf16")
