"""What a file doesn't tell, said by the user or by the model's config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from paceline.model_config import read_model_config
from paceline.traces.format import MAX_EXPERTS, MAX_LAYERS, TraceError


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
        try:
            config = read_model_config(path)
            experts = self.experts or config.experts
            k = self.k or config.experts_per_token
            return replace(self, experts=experts, k=k, layers=self.layers or config.hidden_layers)
        except ValueError as error:
            raise TraceError(str(error)) from None

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
