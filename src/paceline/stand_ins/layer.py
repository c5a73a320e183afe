"""What a calibration found of one MoE layer, and its form in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LayerCalibration:
    """What was found of one MoE layer with E experts.

    Attributes:
        name: of the layer.
        k: experts a token.
        router: fingerprint of its weights.
        experts: [E] fingerprints of theirs.
        ridge: penalty of the stand-ins, relative to the mean variance of an input.
        explained: share of the energy of the experts' outputs that stand-ins explain on rows that
            they were not fitted to; 0 where there is none.
        explained_by_text: [texts] the same of each text's rows, while it was left out.
        placement: [E] device of each expert, or empty: none was searched.
        bias: [E, hidden] float32 mean outputs.
        up: [E, hidden, rank] bfloat16, zeros beyond an expert's own rank.
        down: [E, rank, hidden] bfloat16, likewise.
        mean: [E, hidden] float32 mean inputs.
        ranks: [E] int64 rank of each stand-in; 0: none.
        loads: [texts, E] int64 rows of each text that were routed to each expert.
        output_norm: [E] float32 mean norm of the outputs, 0 without rows.
        residual_norm: [E] float32 mean norm of what a stand-in leaves of them.
        residual_log: [E] float32, and
        residual_slope: [E, hidden] bfloat16: the logarithm of that norm for an input x is expected
            to be residual_log + residual_slope (x - mean); zeros without rows.
        explained_by_expert: [E] float32, as `explained`.
    """

    name: str
    k: int
    router: str
    experts: tuple[str, ...]
    ridge: float
    explained: float
    explained_by_text: tuple[float, ...]
    placement: tuple[int, ...]
    bias: Tensor
    up: Tensor
    down: Tensor
    mean: Tensor
    ranks: Tensor
    loads: Tensor
    output_norm: Tensor
    residual_norm: Tensor
    residual_log: Tensor
    residual_slope: Tensor
    explained_by_expert: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        return {name: getattr(self, name) for name in _TENSORS}

    def fields(self) -> dict[str, Any]:
        """The rest, JSON-able."""
        return {name: getattr(self, name) for name in _FIELDS}


_TENSORS: Mapping[str, tuple[torch.dtype, tuple[str, ...]]] = {
    "bias": (torch.float32, ("experts", "hidden")),
    "up": (torch.bfloat16, ("experts", "hidden", "rank")),
    "down": (torch.bfloat16, ("experts", "rank", "hidden")),
    "mean": (torch.float32, ("experts", "hidden")),
    "ranks": (torch.int64, ("experts",)),
    "loads": (torch.int64, ("texts", "experts")),
    "output_norm": (torch.float32, ("experts",)),
    "residual_norm": (torch.float32, ("experts",)),
    "residual_log": (torch.float32, ("experts",)),
    "residual_slope": (torch.bfloat16, ("experts", "hidden")),
    "explained_by_expert": (torch.float32, ("experts",)),
}
_FIELDS = (
    "name",
    "k",
    "router",
    "experts",
    "ridge",
    "explained",
    "explained_by_text",
    "placement",
)


def layer_from(
    fields: Mapping[str, Any], index: int, tensors: Mapping[str, Tensor], texts: int
) -> LayerCalibration:
    """A layer as it was written.

    Args:
        fields: as `LayerCalibration.fields` gives them.
        index: of the layer.
        tensors: "index.name" -> tensor.
        texts: of the calibration.

    Raises:
        KeyError: if something is missing.
        ValueError: if a tensor has another form than it must have.
    """
    own = {name: tensors[f"{index}.{name}"] for name in _TENSORS}
    sizes = {"texts": texts, "experts": len(fields["experts"])}
    for name, (dtype, shape) in _TENSORS.items():
        tensor = own[name]
        if tensor.dtype is not dtype or tensor.dim() != len(shape):
            raise ValueError(f"{index}.{name} is {tensor.dtype} {list(tensor.shape)}")
        for size, said in zip(tensor.shape, shape, strict=True):
            if sizes.setdefault(said, size) != size:
                raise ValueError(f"{index}.{name} has shape {list(tensor.shape)}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{index}.{name} has values that are not finite")
    placement = tuple(map(int, fields["placement"]))
    if placement and len(placement) != sizes["experts"]:
        raise ValueError(f"{index}.placement is of {len(placement)} experts")
    return LayerCalibration(
        name=str(fields["name"]),
        k=int(fields["k"]),
        router=str(fields["router"]),
        experts=tuple(map(str, fields["experts"])),
        ridge=float(fields["ridge"]),
        explained=float(fields["explained"]),
        explained_by_text=tuple(map(float, fields["explained_by_text"])),
        placement=placement,
        **own,
    )
