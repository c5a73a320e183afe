"""What a file doesn't tell, said by the user or by the model's config."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.text import shortened
from paceline.traces.format import MAX_EXPERTS, MAX_LAYERS, TraceError, read_bounded, seen

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_MAX_CONFIG_BYTES = 1 << 24


@dataclass(frozen=True)
class Asked:
    """Facts about the model and the run behind a file.

    Attributes:
        experts: routed experts of a layer.
        k: experts a token.
        layers: hidden layers of the model, dense ones included.
        world_size: how often every assignment was counted.
        physical: keep the engine's physical slots as experts, don't map them to logical ones.

    Raises:
        ValueError: if a number can't be, or k is more than experts.

    >>> Asked(experts=64, k=6).needed("k", "file.txt", "how many experts a token has")
    6
    """

    experts: int | None = None
    k: int | None = None
    layers: int | None = None
    world_size: int | None = None
    physical: bool = False

    def __post_init__(self) -> None:
        most = {
            "experts": MAX_EXPERTS,
            "k": MAX_EXPERTS,
            "layers": MAX_LAYERS,
            "world_size": 1 << 20,
        }
        for name, limit in most.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= limit:
                raise ValueError(f"{name}={value} is not allowed: it is from 1 to {limit}.")
        if self.k is not None and self.experts is not None and self.k > self.experts:
            raise ValueError(f"k={self.k} is not allowed: it is at most experts={self.experts}.")

    def with_config(self, path: Path) -> Asked:
        """What was not said, from the config.json of a model (a file, or the model's folder).

        Raises:
            TraceError: if it can't be read.
        """
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(read_bounded(path, _MAX_CONFIG_BYTES))
        except (ValueError, RecursionError) as error:
            if isinstance(error, TraceError):
                raise
            raise TraceError(f"{path} is not JSON: {shortened(str(error), 200)}.") from None
        if not isinstance(config, dict):
            raise TraceError(f"{path} is no model's config: expected is a JSON object.")
        inner = config.get("text_config")
        parts = [inner, config] if isinstance(inner, dict) else [config]
        return replace(
            self,
            experts=self.experts or _first(parts, _EXPERTS),
            k=self.k or _first(parts, _K),
            layers=self.layers or _first(parts, ("num_hidden_layers",)),
        )

    def needed(self, name: str, where: str, why: str) -> int:
        """A fact that the file needs.

        Raises:
            TraceError: if nobody said it.
        """
        value = getattr(self, name)
        if value is None:
            raise TraceError(
                f"{where} doesn't tell {why}: say --{name.replace('_', '-')}, or --model-config "
                "with the model's config.json."
            )
        return int(value)

    def agrees(self, name: str, found: int, where: str) -> int:
        """A fact that the file tells itself.

        Raises:
            TraceError: if the user said otherwise.
        """
        said = getattr(self, name)
        if said is not None and said != found:
            raise TraceError(f"{where} has {name}={found}, but {name}={said} was said.")
        return found


def _first(parts: list[dict[str, Any]], names: tuple[str, ...]) -> int | None:
    for part in parts:
        for name in names:
            value = part.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
            if value is not None and not isinstance(value, list):
                raise TraceError(f"the model's config has {name}={seen(value)}: expected is > 0.")
    return None
