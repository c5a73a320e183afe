"""Calibrations and their file: one safetensors file with a JSON header.

The header ties it to a model: architecture, MoE layers, experts, experts per token, and
fingerprints of router and expert weights. The file reveals how the calibration texts
are routed, so only its owner may read it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.files import atomic_file, save_tensors
from paceline.placement import ExpertPlacement
from paceline.plan import Plan
from paceline.stand_ins.identity import LayerIdentity, same_weights

FILE = "calibration.safetensors"
"""Name of the file in the folder of a calibration."""

SCHEMA = "paceline-calibration/3"
_HEADER = "paceline"

COVERED = 0.5
"""Ratio to the mean share explained below which a text is not covered by the other texts."""


class CalibrationError(ValueError):
    """A calibration that can't be read or doesn't fit a model: one sentence."""


@dataclass(frozen=True, eq=False)
class LayerCalibration:
    """Stand-ins and figures of one MoE layer with E experts.

    Attributes:
        name: of the layer.
        k: experts per token.
        router: fingerprint of the router's weights.
        experts: [E] fingerprints of the experts' weights.
        ridge: penalty of the stand-ins, relative to the mean variance of an input.
        explained: share of the energy of the experts' outputs that stand-ins explain on rows that
            they were not fitted to; 0 where there is no stand-in.
        explained_by_text: [texts] the same on each text's rows, while it was left out.
        placement: [E] device of each expert; empty if none was searched.
        bias: [E, hidden] float32 mean outputs.
        up: [E, hidden, rank] bfloat16, zeros beyond an expert's own rank.
        down: [E, rank, hidden] bfloat16, likewise.
        mean: [E, hidden] float32 mean inputs.
        ranks: [E] int64 rank of each stand-in; 0: none.
        loads: [texts, E] int64 rows of each text that were routed to each expert.
        output_norm: [E] float32 mean norm of the outputs, 0 without rows.
        residual_norm: [E] float32 mean norm of the difference from the stand-in.
        residual_log: [E] float32, and
        residual_slope: [E, hidden] bfloat16: the logarithm of that norm for an input x is about
            residual_log + residual_slope (x - mean); zeros without rows.
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
        """Return its tensors by name."""
        return {name: getattr(self, name) for name in _TENSORS}

    def fields(self) -> dict[str, Any]:
        """Return the other fields, ready for JSON."""
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


@dataclass(frozen=True, eq=False)
class Calibration:
    """The result of a calibration run over a model.

    Attributes:
        architecture: class of the model.
        texts: names of the texts that were run.
        tokens: number run of each text.
        held_out: what was left out in turn to judge stand-ins: "texts", or "parts" of one text.
        layers: one per MoE layer.
    """

    architecture: str
    texts: tuple[str, ...]
    tokens: tuple[int, ...]
    held_out: str
    layers: tuple[LayerCalibration, ...]

    def check_model(self, architecture: str, layers: Sequence[LayerIdentity]) -> None:
        """Refuse a model that the calibration wasn't made for.

        Args:
            architecture: class of the model.
            layers: its MoE layers.

        Raises:
            CalibrationError: naming what differs.

        >>> Calibration("Mixtral", (), (), "texts", ()).check_model("Mixtral", [])
        """
        if architecture != self.architecture:
            raise CalibrationError(
                f"the model must be a {self.architecture} as in the calibration, got {architecture}"
            )
        if len(layers) != len(self.layers):
            raise CalibrationError(
                f"the model must have {len(self.layers)} MoE layers as in the calibration, got "
                f"{len(layers)}"
            )
        for own, layer in zip(self.layers, layers, strict=True):
            sizes = (len(own.experts), own.k)
            # a wrapper of the model puts its own name in front
            named = layer.name == own.name or layer.name.endswith(f".{own.name}")
            if not named or sizes != (layer.num_experts, layer.k):
                raise CalibrationError(
                    f"layer {own.name} must have {sizes[0]} experts, {own.k} per token, as in the "
                    f"calibration, got {layer.name} with {layer.num_experts}, {layer.k} per token"
                )
            same = all(same_weights(own.experts[e], seen) for e, seen in layer.experts.items())
            if not same or not same_weights(own.router, layer.router):
                part = "router" if same else "experts"
                raise CalibrationError(
                    f"the calibration is of other weights: those of the {part} of layer "
                    f"{layer.name} differ; calibrate this model"
                )

    def warnings(self) -> list[str]:
        """List what a user should know before relying on it, one sentence each.

        >>> Calibration("Mixtral", ("a",), (9,), "parts", ()).warnings()
        ['With one text only, parts of it were left out: use several texts.']
        """
        if self.held_out == "parts":
            return ["With one text only, parts of it were left out: use several texts."]
        sentences = []
        for index, name in enumerate(self.texts):
            own = sum(layer.explained_by_text[index] for layer in self.layers)
            mean = sum(layer.explained for layer in self.layers)
            if own < COVERED * mean:
                share = own / len(self.layers)
                sentences.append(
                    f"{name} is not covered by the other texts: stand-ins fitted to them explain "
                    f"{share:.0%} of it; use more text of each kind that the model will see."
                )
        return sentences

    def plan(self, calibration: str | None = None) -> Plan:
        """Return the plan of its placements, which names its folder.

        Args:
            calibration: its folder, relative to the plan's file.

        >>> Calibration("Mixtral", (), (), "texts", ()).plan().placements
        ()
        """
        sizes, ks = ({getattr(x, n) for x in self.layers} for n in ("experts", "k"))
        counts = {len(experts) for experts in sizes}
        return Plan(
            placements=tuple(
                ExpertPlacement.explicit(layer.placement)
                for layer in self.layers
                if layer.placement
            ),
            layers=len(self.layers) or None,
            experts=counts.pop() if len(counts) == 1 else None,
            k=ks.pop() if len(ks) == 1 else None,
            calibration=calibration,
        )

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the file into a folder, created if missing; atomically, mode 0600.

        Returns:
            The file's path.

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
            "layers": [layer.fields() for layer in self.layers],
        }
        tensors = {
            f"{index}.{name}": tensor.contiguous()
            for index, layer in enumerate(self.layers)
            for name, tensor in layer.tensors().items()
        }
        with atomic_file(path) as file:
            save_tensors(tensors, file, {_HEADER: json.dumps(header)})
        return path

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Calibration:
        """Read a calibration from its folder.

        Raises:
            CalibrationError: naming the file and what is wrong with it.
        """
        path = Path(folder) / FILE
        if path.exists() and not path.is_file():  # opening a pipe would wait for it
            raise CalibrationError(f"{path} is no plain file")
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {})[_HEADER])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise CalibrationError(
                f"there is no calibration in {folder}: {FILE} is missing"
            ) from None
        except OSError as error:
            raise CalibrationError(f"{path} can't be read: {error.strerror or error}") from None
        except (SafetensorError, KeyError, ValueError, RecursionError) as error:
            raise CalibrationError(f"{path} is no calibration: {_line(error)}") from None
        if not isinstance(header, dict) or header.get("schema") != SCHEMA:
            raise CalibrationError(f"{path} is no calibration of the form {SCHEMA}")
        try:
            return cls(
                architecture=str(header["architecture"]),
                texts=tuple(map(str, header["texts"])),
                tokens=tuple(map(int, header["tokens"])),
                held_out=str(header["held_out"]),
                layers=tuple(
                    _layer_from(fields, index, tensors, len(header["texts"]))
                    for index, fields in enumerate(header["layers"])
                ),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CalibrationError(f"{path} is damaged: {_line(error)}") from None


def _layer_from(
    fields: Mapping[str, Any], index: int, tensors: Mapping[str, Tensor], texts: int
) -> LayerCalibration:
    """Read a layer from its `fields` and from tensors named "index.name".

    Raises:
        KeyError: if something is missing.
        ValueError: if a tensor has a wrong dtype or shape.
    """
    own = {name: tensors[f"{index}.{name}"] for name in _TENSORS}
    sizes = {"texts": texts, "experts": len(fields["experts"])}
    for name, (dtype, shape) in _TENSORS.items():
        tensor = own[name]
        if tensor.dtype is not dtype or tensor.dim() != len(shape):
            raise ValueError(f"{index}.{name} is {tensor.dtype} {list(tensor.shape)}")
        for size, axis in zip(tensor.shape, shape, strict=True):
            if sizes.setdefault(axis, size) != size:
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


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
