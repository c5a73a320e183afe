"""Which expert every slot of a layer holds, and what its devices get of a traffic then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.placement import ExpertPlacement

Loads = NDArray[np.float64]


@dataclass(frozen=True)
class ExpertMap:
    """The slots of one layer: slots lie on the devices in order, as engines place them.

    Attributes:
        slots: [slots] expert of each slot; an expert in several slots is replicated.
        num_experts: experts of the layer; each has a slot.
        num_devices: devices; slots a device differ by at most one, larger first.

    Raises:
        ValueError: if an expert has no slot or there are fewer slots than devices.

    >>> ExpertMap((2, 0, 1, 0), num_experts=3, num_devices=2).copies
    (2, 1, 1)
    """

    slots: tuple[int, ...]
    num_experts: int
    num_devices: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_devices <= len(self.slots):
            raise ValueError(
                f"num_devices={self.num_devices} is not allowed: "
                f"{len(self.slots)} slots go on 1 to {len(self.slots)} devices."
            )
        if set(self.slots) != set(range(self.num_experts)):
            raise ValueError(
                f"slots={list(self.slots)} is not allowed: each of the {self.num_experts} experts "
                "has at least one slot, and there are no others."
            )

    @classmethod
    def contiguous(cls, num_experts: int, num_devices: int) -> ExpertMap:
        """Experts in order, what engines do where nobody says otherwise.

        >>> ExpertMap.contiguous(4, 2).slots
        (0, 1, 2, 3)
        """
        return cls(tuple(range(num_experts)), num_experts, num_devices)

    @classmethod
    def of_placement(cls, placement: ExpertPlacement) -> ExpertMap:
        """The slots of a placement: its devices one after the other, experts in order.

        Raises:
            ValueError: unless the sizes of the devices are those of slots in order.

        >>> ExpertMap.of_placement(ExpertPlacement.explicit([1, 0, 1, 0])).slots
        (1, 3, 0, 2)
        """
        wanted = ExpertPlacement.contiguous(placement.num_experts, placement.num_devices).sizes
        if placement.sizes != wanted:
            raise ValueError(
                f"a placement with {list(placement.sizes)} experts a device can't be had by "
                f"ordering experts: engines that place them in order put {list(wanted)} there."
            )
        slots = [e for device in range(placement.num_devices) for e in placement.experts_of(device)]
        return cls(tuple(slots), placement.num_experts, placement.num_devices)

    @property
    def copies(self) -> tuple[int, ...]:
        """[experts] slots of each expert."""
        counts = [0] * self.num_experts
        for expert in self.slots:
            counts[expert] += 1
        return tuple(counts)

    @property
    def replicas(self) -> int:
        """Slots beyond one an expert."""
        return len(self.slots) - self.num_experts

    @property
    def device_of_slot(self) -> tuple[int, ...]:
        """[slots] the device each slot lies on."""
        return ExpertPlacement.contiguous(len(self.slots), self.num_devices).expert_to_device

    @property
    def placement(self) -> ExpertPlacement:
        """Expert -> device.

        Raises:
            ValueError: where experts are replicated, and so live on several devices.
        """
        if self.replicas:
            raise ValueError(
                f"{self.replicas} replicated experts have no single device: a placement has one "
                "device an expert."
            )
        device = dict(zip(self.slots, self.device_of_slot, strict=True))
        return ExpertPlacement.explicit(device, self.num_devices)

    def device_loads(self, loads: ArrayLike) -> Loads:
        """Rows of each device, [batches, experts] -> [batches, devices].

        The load of a replicated expert is shared evenly by its slots.

        Raises:
            ValueError: if loads is not of that shape.

        >>> ExpertMap((2, 0, 1, 0), 3, 2).device_loads([[4, 1, 5]]).tolist()
        [[7.0, 3.0]]
        """
        table = load_table(loads)
        if table.shape[1] != self.num_experts:
            raise ValueError(
                f"loads of {table.shape[1]} experts don't fit a map of {self.num_experts} experts."
            )
        slot_loads = table[:, self.slots] / np.array(self.copies)[list(self.slots)]
        out = np.zeros((len(table), self.num_devices))
        np.add.at(out.T, list(self.device_of_slot), slot_loads.T)
        return out


def load_table(loads: ArrayLike) -> Loads:
    """[batches, experts] assignments as float64, checked.

    Raises:
        ValueError: unless it is such a table of finite numbers >= 0.

    >>> load_table([[1, 2]]).shape
    (1, 2)
    """
    table = np.asarray(loads, dtype=np.float64)
    if table.ndim != 2 or 0 in table.shape:
        raise ValueError(
            f"loads of shape {list(table.shape)} are not allowed: they are [batches, experts]."
        )
    if not np.isfinite(table).all() or table.min() < 0:
        raise ValueError("loads are not allowed to be negative, infinite or not a number.")
    return table


def busiest_mean(device_loads: Loads) -> float:
    """Mean over batches of the rows of the busiest device, [batches, devices] -> rows.

    >>> busiest_mean(np.array([[1.0, 3.0], [5.0, 1.0]]))
    4.0
    """
    return float(device_loads.max(1).mean())


def peak_to_mean(device_loads: Loads) -> float:
    """Rows of the busiest device, batch after batch, over the mean rows of a device.

    Sum over batches of the busiest device's rows / sum of the means: what a synchronous layer
    takes, relative to perfect balance. 1.0 where there is no load.

    >>> peak_to_mean(np.array([[1.0, 3.0], [5.0, 1.0]]))
    1.6
    """
    total = float(device_loads.sum())
    devices = device_loads.shape[1]
    return float(device_loads.max(1).sum()) * devices / total if total > 0 else 1.0


def replica_bytes(
    maps: Sequence[ExpertMap], hidden_size: int, expert_size: int, bytes_per_weight: float
) -> float:
    """Bytes of weights that replicas cost on the device that pays most, over all layers.

    An expert has 3 hidden_size x expert_size weights (gate, up and down projection).

    Args:
        maps: of each MoE layer.
        hidden_size: of the model.
        expert_size: intermediate size of one expert.
        bytes_per_weight: 2 for bfloat16, 1 for FP8, 0.5 for 4 bits.

    >>> replica_bytes([ExpertMap((0, 1, 0), 2, 1)], 1024, 512, 2)
    3145728.0
    """
    if not maps:
        return 0.0
    devices = maps[0].num_devices
    extra = np.zeros(devices)
    for layer in maps:
        slots = np.bincount(layer.device_of_slot, minlength=devices)
        extra += slots - np.array(
            ExpertPlacement.contiguous(layer.num_experts, layer.num_devices).sizes
        )
    return float(extra.max()) * 3 * hidden_size * expert_size * bytes_per_weight
