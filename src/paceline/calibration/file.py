"""What a calibration found, and its file: one safetensors file with a JSON header.

The header binds it to a model: architecture, MoE layers, experts, experts a token, and fingerprints
of router and expert weights. The file tells of the text it was made from (how it is routed), so
only its owner may read it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.calibration.identity import LayerIdentity

FILE = "calibration.safetensors"
"""In the folder of a calibration."""

SCHEMA = "paceline-calibration/1"
_HEADER = "paceline"
_LAYER_FIELDS = ("name", "k", "router", "experts", "ridge", "explained")


class CalibrationError(ValueError):
    """A calibration that can't be read or doesn't fit a model: one sentence."""


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
        bias: [E, hidden] float32 mean outputs.
        up: [E, hidden, rank] float32, zeros beyond an expert's own rank.
        down: [E, rank, hidden] float32, likewise.
        mean: [E, hidden] float32 mean inputs.
        ranks: [E] int64 rank of each stand-in; 0: none.
        loads: [texts, E] int64 rows of each text that were routed to each expert.
        output_norm: [E] float32 mean norm of the outputs, 0 without rows.
        explained_by_expert: [E] float32, as `explained`.
    """

    name: str
    k: int
    router: str
    experts: tuple[str, ...]
    ridge: float
    explained: float
    bias: Tensor
    up: Tensor
    down: Tensor
    mean: Tensor
    ranks: Tensor
    loads: Tensor
    output_norm: Tensor
    explained_by_expert: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        return {name: getattr(self, name) for name in _TENSORS}


_TENSORS: Mapping[str, tuple[torch.dtype, tuple[str, ...]]] = {
    "bias": (torch.float32, ("experts", "hidden")),
    "up": (torch.float32, ("experts", "hidden", "rank")),
    "down": (torch.float32, ("experts", "rank", "hidden")),
    "mean": (torch.float32, ("experts", "hidden")),
    "ranks": (torch.int64, ("experts",)),
    "loads": (torch.int64, ("texts", "experts")),
    "output_norm": (torch.float32, ("experts",)),
    "explained_by_expert": (torch.float32, ("experts",)),
}


@dataclass(frozen=True, eq=False)
class Calibration:
    """What a calibration run found of a model.

    Attributes:
        architecture: class of the model.
        texts: names of the texts that were run.
        tokens: that were run, of each text.
        held_out: what was left out in turn to judge stand-ins: "texts", or "parts" of the only one.
        layers: one a MoE layer.
    """

    architecture: str
    texts: tuple[str, ...]
    tokens: tuple[int, ...]
    held_out: str
    layers: tuple[LayerCalibration, ...]

    def check_model(self, architecture: str, layers: Sequence[LayerIdentity]) -> None:
        """Refuse a model that the calibration wasn't made of.

        Args:
            architecture: class of the model.
            layers: its MoE layers.

        Raises:
            CalibrationError: naming what differs.

        >>> Calibration("Mixtral", (), (), "texts", ()).check_model("Mixtral", [])
        """
        if architecture != self.architecture:
            raise CalibrationError(
                f"the calibration is of a {self.architecture}, the model is a {architecture}."
            )
        if len(layers) != len(self.layers):
            raise CalibrationError(
                f"the calibration is of {len(self.layers)} MoE layers, the model has {len(layers)}."
            )
        for own, layer in zip(self.layers, layers, strict=True):
            sizes = (own.name, len(own.experts), own.k)
            if sizes != (layer.name, layer.num_experts, layer.k):
                raise CalibrationError(
                    f"the calibration is of layer {own.name} with {sizes[1]} experts and {own.k} a "
                    f"token, the model has {layer.name} with {layer.num_experts} and {layer.k}."
                )
            same = all(own.experts[e] == seen for e, seen in layer.experts.items())
            if own.router != layer.router or not same:
                what = "router" if same else "experts"
                raise CalibrationError(
                    f"the calibration is of other weights: those of the {what} of layer "
                    f"{layer.name} differ; calibrate this model."
                )

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the file into a folder, made if need be; whole or not at all, 0600.

        Returns:
            Where it is.

        Raises:
            OSError: if the folder can't be written.
        """
        path = Path(folder) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {
            "schema": SCHEMA,
            "architecture": self.architecture,
            "texts": list(self.texts),
            "tokens": list(self.tokens),
            "held_out": self.held_out,
            "layers": [{f: getattr(layer, f) for f in _LAYER_FIELDS} for layer in self.layers],
        }
        tensors = {
            f"{index}.{name}": tensor.contiguous()
            for index, layer in enumerate(self.layers)
            for name, tensor in layer.tensors().items()
        }
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{FILE}.")  # made 0600
        os.close(handle)
        try:
            save_file(tensors, temporary, {_HEADER: json.dumps(header)})
            os.chmod(temporary, 0o600)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        return path

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Calibration:
        """Read a calibration from its folder.

        Raises:
            CalibrationError: naming the file and what is wrong with it.
        """
        path = Path(folder) / FILE
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {})[_HEADER])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise CalibrationError(
                f"there is no calibration in {folder}: {FILE} is missing."
            ) from None
        except OSError as error:
            raise CalibrationError(f"{path} can't be read: {error.strerror or error}.") from None
        except (SafetensorError, KeyError, ValueError) as error:
            raise CalibrationError(f"{path} is no calibration: {_line(error)}.") from None
        if not isinstance(header, dict) or header.get("schema") != SCHEMA:
            raise CalibrationError(f"{path} is no calibration of the form {SCHEMA}.")
        try:
            return cls(
                architecture=str(header["architecture"]),
                texts=tuple(map(str, header["texts"])),
                tokens=tuple(map(int, header["tokens"])),
                held_out=str(header["held_out"]),
                layers=tuple(
                    _layer(fields, index, tensors, len(header["texts"]))
                    for index, fields in enumerate(header["layers"])
                ),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CalibrationError(f"{path} is damaged: {_line(error)}.") from None


def _layer(
    fields: Mapping[str, Any], index: int, tensors: Mapping[str, Tensor], texts: int
) -> LayerCalibration:
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
    return LayerCalibration(
        name=str(fields["name"]),
        k=int(fields["k"]),
        router=str(fields["router"]),
        experts=tuple(map(str, fields["experts"])),
        ridge=float(fields["ridge"]),
        explained=float(fields["explained"]),
        **own,
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
