"""Sizes of a Mixture-of-Experts model, read from its config.json without the model's code."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.files import MOST_SETTINGS, read_plain
from paceline.text import shortened

# Where a multimodal config keeps its language model, and how deep such parts are nested.
_LANGUAGE_PARTS = ("thinker_config", "text_config", "llm_config", "language_config")
_MAX_DEPTH = 4
_MAX_LAYERS = 1 << 16

_HIDDEN_LAYERS = ("num_hidden_layers", "n_layers", "num_layers")
_REQUIRED = {
    "experts": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "experts_per_token": (
        "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k",
        "top_k_experts",
    ),
    "hidden_size": ("moe_hidden_size", "moe_latent_size", "hidden_size", "d_model"),
    "expert_size": (
        "moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size", "intermediate_size",
    ),
}  # fmt: skip
_SHARED_SIZE = (
    "shared_expert_intermediate_size", "shared_experts_intermediate_size",
    "moe_shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim",
)  # fmt: skip
_SHARED_EXPERTS = (
    "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert",
)  # fmt: skip
_QUANTISED = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "fp4", "awq": "fp4", "gptq": "fp4"}


@dataclass(frozen=True)
class ModelConfig:
    """The content of a config.json; a size is checked when it is asked for.

    Attributes:
        where: name of the file, for errors.
        fields: decoded JSON.

    Raises:
        ValueError: by every property, if the size that it reads is no whole number above 0.

    >>> text = {"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48}
    >>> omni = ModelConfig("config.json", {"thinker_config": {"text_config": text}})
    >>> omni.experts, omni.experts_per_token, omni.moe_layers
    (128, 8, 48)
    """

    where: str
    fields: Mapping[str, Any]

    @property
    def experts(self) -> int | None:
        """Routed experts per layer, None if the config does not state them."""
        return self._number(*_REQUIRED["experts"])

    @property
    def experts_per_token(self) -> int | None:
        """Experts that a router chooses per token, None if the config does not state them."""
        return self._number(*_REQUIRED["experts_per_token"])

    @property
    def hidden_layers(self) -> int | None:
        """Hidden layers, dense ones included, None if the config does not state them."""
        kinds = self.find("layers_block_type")
        layers = len(kinds) if isinstance(kinds, list) else self._number(*_HIDDEN_LAYERS)
        if layers is not None and layers > _MAX_LAYERS:
            raise ValueError(f"{self.where} must have at most {_MAX_LAYERS} layers, got {layers}.")
        return layers

    @property
    def moe_layers(self) -> int | None:
        """Hidden layers with routed experts, None if the config does not state them."""
        kinds = self.find("mlp_layer_types")
        if isinstance(kinds, list):
            return len([kind for kind in kinds if kind != "dense"])
        kinds = self.find("layers_block_type", "hybrid_override_pattern")
        if isinstance(kinds, list | str):
            return len([kind for kind in kinds if kind in ("moe", "E")])
        if isinstance(chosen := self.find("moe_layers"), list):
            return len(chosen)
        if isinstance(flags := self.find("moe_layer_freq"), list):
            return sum(map(bool, flags))
        layers = self.hidden_layers
        return None if layers is None else sum(self._is_moe(i, layers) for i in range(layers))

    @property
    def hidden_size(self) -> int | None:
        """Width of an expert's input, the latent one where experts work in a latent space."""
        return self._number(*_REQUIRED["hidden_size"])

    @property
    def expert_size(self) -> int | None:
        """Intermediate size of one routed expert, the largest where layers differ."""
        return self._number(*_REQUIRED["expert_size"])

    @property
    def shared_size(self) -> int:
        """Intermediate size of all shared experts of a layer together, 0 if there are none."""
        if self.find(*_SHARED_SIZE):
            return self._number(*_SHARED_SIZE) or 0
        shared = self._number(*_SHARED_EXPERTS) if self.find(*_SHARED_EXPERTS) else None
        return shared * self.require("expert_size") if shared else 0

    @property
    def expert_groups(self) -> int:
        """Expert groups from which a router chooses, 1 without group-limited routing."""
        if self.find("topk_method") == "greedy":
            return 1
        groups = self.find("n_group", "num_expert_group", "num_expert_groups")
        return groups if isinstance(groups, int) and groups > 1 else 1

    @property
    def precision(self) -> str:
        """Precision of the weights: "fp8" or "fp4" where they are quantised so, else "bf16"."""
        quantised = self.fields.get("quantization_config")
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        return _QUANTISED.get(str(method), "bf16")

    def require(self, size: str) -> int:
        """Return "experts", "experts_per_token", "hidden_size" or "expert_size".

        Raises:
            ValueError: if the config does not state it.

        >>> ModelConfig("config.json", {}).require("experts")
        Traceback (most recent call last):
        ...
        ValueError: config.json must state num_experts, n_routed_experts, num_local_experts or \
moe_num_experts.
        """
        value: int | None = getattr(self, size)
        if value is None:
            *keys, last = _REQUIRED[size]
            raise ValueError(f"{self.where} must state {', '.join(keys)} or {last}.")
        return value

    def find(self, *keys: str) -> Any:
        """Return the value of the first of some keys that is there, the language model's first."""
        return self._find(*keys)[1]

    def _find(self, *keys: str) -> tuple[str, Any]:
        for part in _parts(self.fields):
            for key in keys:
                if part.get(key) is not None:
                    return key, part[key]
        return keys[0], None

    def _number(self, *keys: str) -> int | None:
        key, value = self._find(*keys)
        values = value if isinstance(value, list) and value else [value]  # a list has one per layer
        if value is None:
            return None
        if not all(type(number) is int and number > 0 for number in values):
            got = shortened(repr(value))
            raise ValueError(f"{self.where}: {key} must be a whole number above 0, got {got}.")
        return int(max(values))

    def _is_moe(self, layer: int, layers: int) -> bool:
        """Check one layer by the rules that configs without a list of layers have."""
        first = self._index("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
        last = self._index("moe_layer_end_index", default=layers - 1)
        dense = self.find("mlp_only_layers")
        if not first <= layer <= last or (isinstance(dense, list) and layer in dense):
            return False
        period = self._number("expert_layer_period", "moe_layer_freq")
        if period is not None:
            return layer % period == self._index("expert_layer_offset")
        step = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
        return (layer + 1) % (self._number(*step) or 1) == 0

    def _index(self, *keys: str, default: int = 0) -> int:
        value = self.find(*keys)
        return value if type(value) is int and value >= 0 else default


def read_model_config(path: Path) -> ModelConfig:
    """Read a config.json, or the one in a model's folder.

    Raises:
        ValueError: naming the file, if it cannot be read or is no JSON object.

    >>> from paceline.shipped import MODEL_FOLDER
    >>> read_model_config(MODEL_FOLDER).experts
    32
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(read_plain(file, MOST_SETTINGS).decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} can't be read: {shortened(str(error), 200)}.") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(fields).__name__}.")
    return ModelConfig(str(file), fields)


def _parts(fields: Mapping[str, Any], depth: int = _MAX_DEPTH) -> Iterator[Mapping[str, Any]]:
    """Iterate over the parts that may state a size, the most specific first."""
    for name in _LANGUAGE_PARTS if depth else ():
        if isinstance(part := fields.get(name), dict):
            yield from _parts(part, depth - 1)
    yield fields
    if isinstance(part := fields.get("ffn_config"), dict):  # DBRX keeps its experts apart
        yield part
