"""Cost model of a MoE layer on many devices: gate, dispatch, slowest device's experts, combine.

Shared experts, which every token runs through on its own device, come on top: no load changes them.

A device's experts take, one after the other: a launch; reading the weights of every expert that
gets a row (6 H I FLOP per row, 3 H I weights per expert); the FLOPs of its rows, each expert's
padded to whole tiles; and moving its rows' activations. Terms are added, not overlapped. Where few
rows get to an expert, reading weights dominates, and fewer rows save next to nothing: so a capacity
factor gains nothing in decode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.analysis.expert_map import ExpertMap, Loads, load_table
from paceline.analysis.hardware import BYTES, Hardware
from paceline.model_config import read_model_config

STAGES = ("gate", "shared", "dispatch", "experts", "combine")


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer of experts with gate, up and down projections.

    Attributes:
        expert_size: intermediate size I of one expert.
        precision: of weights and products: "bf16", "fp8", or "fp4" weights with 8-bit products;
            "fp32" on a CPU.
        shared: intermediate size of all shared experts together; 0: there are none.

    Raises:
        ValueError: if a size is below 1, or the precision is unknown.

    >>> LayerShape(hidden=2048, expert_size=1024, experts=64, k=8).expert_bytes / 2**20
    12.0
    """

    hidden: int
    expert_size: int
    experts: int
    k: int
    precision: str = "bf16"
    shared: int = 0

    def __post_init__(self) -> None:
        least = {"hidden": 1, "expert_size": 1, "experts": 1, "k": 1, "shared": 0}
        for name, size in least.items():
            if getattr(self, name) < size:
                raise ValueError(f"{name} must be at least {size}, got {getattr(self, name)}")
        if self.precision not in BYTES:
            raise ValueError(f"precision must be one of {', '.join(BYTES)}, got {self.precision!r}")

    @property
    def row_flops(self) -> int:
        """FLOPs of one row (one assignment)."""
        return 6 * self.hidden * self.expert_size

    @property
    def expert_bytes(self) -> float:
        """Bytes of the weights of one expert."""
        return 3 * self.hidden * self.expert_size * BYTES[self.precision]

    @property
    def row_bytes(self) -> float:
        """Bytes that the activations of one row move through memory.

        The row in and out, the gate and up projections out, their product in and out.
        """
        wide = BYTES["fp32"] if self.precision == "fp32" else BYTES["bf16"]
        return (2 * self.hidden + 4 * self.expert_size) * wide

    @property
    def token_bytes(self) -> float:
        """Bytes of one row as it is dispatched; a combine returns it in bfloat16."""
        return self.hidden * (1.0 if self.precision in ("fp8", "fp4") else self.combine_width)

    @property
    def combine_width(self) -> float:
        """Bytes of a value in a combine."""
        return BYTES["fp32"] if self.precision == "fp32" else BYTES["bf16"]


def layer_shape(path: Path, precision: str | None = None) -> LayerShape:
    """Read the sizes of a model's MoE layers from its config.json, or from its folder.

    Args:
        precision: of the weights; None: what the config states, else bf16.

    Raises:
        ValueError: if the config cannot be read or lacks a size.

    >>> from paceline.shipped import MODEL_FOLDER
    >>> layer_shape(MODEL_FOLDER).experts
    32
    """
    config = read_model_config(path)
    return LayerShape(
        hidden=config.require("hidden_size"),
        expert_size=config.require("expert_size"),
        experts=config.require("experts"),
        k=config.require("experts_per_token"),
        precision=precision or config.precision,
        shared=config.shared_size,
    )


@dataclass(frozen=True)
class LayerCost:
    """Seconds of each stage, and the bytes that it moved.

    Attributes:
        seconds: stage -> [batches] seconds; `STAGES` in turn make the layer.
        balanced: [batches] seconds of the layer if all devices had the mean's work: the ceiling.
        busiest_bytes: [batches] bytes that the device receiving most gets in a dispatch.
        bytes: [batches] bytes sent by all devices in dispatch and combine.
        active: [batches, devices] experts that get rows.
    """

    seconds: dict[str, Loads]
    balanced: Loads
    busiest_bytes: Loads
    bytes: Loads
    active: NDArray[np.int64]

    @property
    def total(self) -> Loads:
        """[batches] seconds of the layer."""
        return np.asarray(sum(self.seconds.values()))


def layer_cost(
    loads: ArrayLike,
    tokens: ArrayLike,
    layer: ExpertMap,
    shape: LayerShape,
    hardware: Hardware,
    received: ArrayLike | None = None,
) -> LayerCost:
    """Compute the seconds of a layer for every batch.

    Tokens are spread evenly over the devices, as data parallelism aims to.

    Args:
        loads: [batches, experts] rows of each expert, after a cap.
        tokens: [batches] tokens of each batch, over all devices.
        layer: map of the experts.
        received: [batches, devices] tokens that have an expert on each device: a dispatch sends a
            token once to a device. None: unknown, every row is sent.

    Raises:
        ValueError: if the shapes don't fit.

    >>> from paceline.analysis.hardware import PRESETS
    >>> flat = np.full((1, 8), 4096.0)
    >>> cost = layer_cost(flat, [16384], ExpertMap.contiguous(8, 8),
    ...                   LayerShape(4096, 14336, 8, 2), PRESETS["h100"])
    >>> max(cost.seconds, key=lambda stage: float(cost.seconds[stage][0]))
    'experts'
    """
    rows = load_table(loads)
    count = np.asarray(tokens, dtype=np.float64)
    if rows.shape[1] != layer.num_experts or shape.experts != layer.num_experts:
        raise ValueError(
            f"loads, map and shape must be of the same number of experts, got {rows.shape[1]}, "
            f"{layer.num_experts} and {shape.experts}"
        )
    if count.shape != (len(rows),):
        raise ValueError(
            f"tokens must be one number for each of the {len(rows)} batches, got shape "
            f"{list(count.shape)}"
        )
    per_device = layer.device_loads(rows)
    arriving = per_device if received is None else np.asarray(received, dtype=np.float64)
    if arriving.shape != per_device.shape:
        raise ValueError(
            f"received must be [batches, devices] {list(per_device.shape)}, got shape "
            f"{list(arriving.shape)}"
        )
    slot_rows = layer.slot_loads(rows)
    device_of = np.array(layer.device_of_slot)
    experts = np.stack(
        [
            device_seconds(slot_rows[:, device_of == device], shape, hardware)
            for device in range(layer.num_devices)
        ],
        axis=1,
    )
    active = np.stack(
        [(slot_rows[:, device_of == d] > 0).sum(1) for d in range(layer.num_devices)], axis=1
    )
    away = (layer.num_devices - 1) / layer.num_devices  # a token's own device needs no exchange
    widths = {"dispatch": shape.token_bytes, "combine": shape.hidden * shape.combine_width}
    gate = gate_seconds(count / layer.num_devices, shape, hardware)
    shared = shared_seconds(count / layer.num_devices, shape, hardware)

    def stages(received: Loads, computing: Loads) -> dict[str, Loads]:
        exchanged = {
            name: exchange_seconds(received * away * width, layer.num_devices, hardware)
            for name, width in widths.items()
        }
        return {"gate": gate, "shared": shared, "experts": computing, **exchanged}

    return LayerCost(
        seconds=stages(arriving.max(1), experts.max(1)),
        balanced=np.asarray(sum(stages(arriving.mean(1), experts.mean(1)).values())),
        busiest_bytes=arriving.max(1) * away * shape.token_bytes,
        bytes=arriving.sum(1) * away * sum(widths.values()),
        active=active,
    )


def device_seconds(rows: ArrayLike, shape: LayerShape, hardware: Hardware) -> Loads:
    """Compute the seconds of a device's experts, [batches, experts] rows -> [batches]."""
    each = np.asarray(rows, dtype=np.float64)
    active = each > 0
    padded = padded_rows(each, hardware.tile)
    flops = hardware.reachable(shape.precision)
    seconds = (active.sum(1) > 0) * hardware.launch
    seconds = seconds + active.sum(1) * (hardware.per_expert + shape.expert_bytes / hardware.memory)
    seconds = seconds + padded.sum(1) * shape.row_flops / flops
    if hardware.slow_rows and hardware.slow_flops:
        slow = np.minimum(padded, hardware.slow_rows).sum(1) * shape.row_flops
        seconds = seconds + slow * (1 / hardware.slow_flops - 1 / flops)
    moved = each.sum(1) * shape.row_bytes / (hardware.activations or hardware.memory)
    return np.asarray(seconds + moved)


def padded_rows(rows: Loads, tile: int) -> Loads:
    """Pad rows to whole tiles, smaller ones (16, 32, ...) for experts with few rows.

    >>> padded_rows(np.array([0.0, 1.0, 17.0, 129.0]), tile=128).tolist()
    [0.0, 16.0, 32.0, 256.0]
    """
    small = np.minimum(2.0 ** np.ceil(np.log2(np.maximum(rows, 16))), tile)
    step = np.where(rows < tile, np.minimum(small, tile), tile)
    return np.asarray(np.ceil(rows / step) * step)


def gate_seconds(tokens: Loads, shape: LayerShape, hardware: Hardware) -> Loads:
    """Compute the seconds of a device's router, [batches] tokens: a product and its input."""
    wide = BYTES["fp32"] if shape.precision == "fp32" else BYTES["bf16"]
    product = tokens * 2 * shape.hidden * shape.experts / hardware.flops
    return np.asarray(hardware.launch + product + tokens * shape.hidden * wide / hardware.memory)


def shared_seconds(tokens: Loads, shape: LayerShape, hardware: Hardware) -> Loads:
    """Compute the seconds of a device's shared experts, [batches] tokens, as one more expert's."""
    if not shape.shared:
        return np.zeros(len(tokens))
    alone = replace(shape, expert_size=shape.shared, shared=0)
    return device_seconds(tokens[:, None], alone, hardware)


def exchange_seconds(received: Loads, devices: int, hardware: Hardware) -> Loads:
    """Compute the seconds of a dispatch or combine, [batches] bytes to the busiest device.

    Bytes from devices of its own machine and from others arrive at the same time, over links of
    their own; the slower of the two counts.
    """
    if devices == 1:
        return np.zeros_like(received)
    near = min(devices, hardware.devices_per_node)
    far_share = (devices - near) / (devices - 1)
    seconds = np.maximum(
        received * (1 - far_share) / hardware.link, received * far_share / hardware.network
    )
    return np.asarray(hardware.exchange + seconds)
