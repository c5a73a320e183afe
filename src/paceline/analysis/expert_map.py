"""Expert maps: the expert that each slot of a layer holds, the loads of devices, and engine files.

vLLM 0.32 and 0.33 read no map from a file: its form here is the list that its proposed
`initial_expert_map_path` takes and that its own `physical_to_logical_map` holds. A reordered
checkpoint (`paceline reorder`) needs no file at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.balance import unit_matrix
from paceline.files import atomic_file
from paceline.placement import ExpertPlacement

Loads = NDArray[np.float64]


@dataclass(frozen=True)
class ExpertMap:
    """Slots of one layer: they are on the devices in order, as engines place them.

    Attributes:
        slots: [slots] expert of each slot; an expert in several slots is replicated.
        num_experts: experts of the layer; each has a slot.
        num_devices: devices; their numbers of slots differ by at most one, larger first.

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
                f"num_devices must be from 1 to {len(self.slots)}, the number of slots, got "
                f"{self.num_devices}"
            )
        if set(self.slots) != set(range(self.num_experts)):
            raise ValueError(
                f"slots must name each of the {self.num_experts} experts and no others, got "
                f"{list(self.slots)}"
            )

    @classmethod
    def contiguous(cls, num_experts: int, num_devices: int) -> ExpertMap:
        """Put experts in order, the default of engines."""
        return cls(tuple(range(num_experts)), num_experts, num_devices)

    @classmethod
    def of_placement(cls, placement: ExpertPlacement) -> ExpertMap:
        """Make the map of a placement: its devices one after the other, experts in order.

        Raises:
            ValueError: unless the sizes of the devices are those of slots in order.

        >>> ExpertMap.of_placement(ExpertPlacement.explicit([1, 0, 1, 0])).slots
        (1, 3, 0, 2)
        """
        sizes = ExpertPlacement.contiguous(placement.num_experts, placement.num_devices).sizes
        if placement.sizes != sizes:
            raise ValueError(
                f"experts per device must be {list(sizes)}, as engines place experts in order, got "
                f"{list(placement.sizes)}"
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
        """Slots beyond one per expert."""
        return len(self.slots) - self.num_experts

    @property
    def device_of_slot(self) -> tuple[int, ...]:
        """[slots] the device each slot is on."""
        return ExpertPlacement.contiguous(len(self.slots), self.num_devices).expert_to_device

    @property
    def placement(self) -> ExpertPlacement:
        """Device of each expert.

        Raises:
            ValueError: if experts are replicated, and so are on several devices.
        """
        if self.replicas:
            raise ValueError(
                f"a placement must have one device per expert, got {self.replicas} replicas"
            )
        device = dict(zip(self.slots, self.device_of_slot, strict=True))
        return ExpertPlacement.explicit(device, self.num_devices)

    def device_loads(self, loads: ArrayLike) -> Loads:
        """Add up the rows of each device, [batches, experts] -> [batches, devices].

        The load of a replicated expert is shared evenly by its slots.

        Raises:
            ValueError: if loads is not of that shape.

        >>> ExpertMap((2, 0, 1, 0), 3, 2).device_loads([[4, 1, 5]]).tolist()
        [[7.0, 3.0]]
        """
        table = load_table(loads)
        if table.shape[1] != self.num_experts:
            raise ValueError(f"loads must be of {self.num_experts} experts, got {table.shape[1]}")
        return np.asarray(table @ self.hosts)

    @property
    def hosts(self) -> Loads:
        """[experts, devices] share of each expert's rows that each device computes."""
        slots = unit_matrix(self.slots, self.num_experts).T / np.array(self.copies)[:, None]
        return np.asarray(slots @ unit_matrix(self.device_of_slot, self.num_devices))

    def slot_loads(self, table: Loads) -> Loads:
        """Share the rows of each expert among its slots, [batches, experts] -> [batches, slots]."""
        return np.asarray(table[:, self.slots] / np.array(self.copies)[list(self.slots)])


def maps_in_order(maps: Sequence[ExpertMap]) -> list[ExpertMap]:
    """Put as many experts on as many devices in order."""
    return [ExpertMap.contiguous(own.num_experts, own.num_devices) for own in maps]


def load_table(loads: ArrayLike) -> Loads:
    """Check a table of assignments, [batches, experts], and return it as float64.

    Raises:
        ValueError: unless it is such a table of finite numbers >= 0.
    """
    table = np.asarray(loads, dtype=np.float64)
    if table.ndim != 2 or 0 in table.shape:
        raise ValueError(f"loads must be [batches, experts], got shape {list(table.shape)}")
    if not np.isfinite(table).all() or table.min() < 0:
        raise ValueError("loads must be finite numbers >= 0")
    return table


def replica_bytes(
    maps: Sequence[ExpertMap], hidden_size: int, expert_size: int, bytes_per_weight: float
) -> float:
    """Return the bytes of replicas' weights on the device with the most, over all layers.

    An expert has 3 hidden_size x expert_size weights (gate, up and down projection).

    Args:
        expert_size: intermediate size of one expert.
        bytes_per_weight: 2 for bfloat16, 1 for FP8, 0.5 for 4 bits.

    >>> replica_bytes([ExpertMap((0, 1, 0), 2, 1)], 1024, 512, 2)
    3145728.0
    """
    if not maps:
        return 0.0
    devices = maps[0].num_devices
    extra = np.zeros(devices)
    for own, alone in zip(maps, maps_in_order(maps), strict=True):
        extra += np.bincount(own.device_of_slot, minlength=devices)
        extra -= np.bincount(alone.device_of_slot, minlength=devices)
    return float(extra.max()) * 3 * hidden_size * expert_size * bytes_per_weight


def vllm(maps: Mapping[int, ExpertMap], hidden_layers: int) -> str:
    """Write the JSON list [MoE layers][slots] of vLLM's physical_to_logical_map."""
    return json.dumps([list(layer.slots) for _, layer in _ordered(maps)]) + "\n"


def vllm_ascend(maps: Mapping[int, ExpertMap], hidden_layers: int) -> str:
    """Write the JSON of vLLM Ascend's expert_map_path: experts by MoE layer and device."""
    layers = []
    for index, (_, layer) in enumerate(_ordered(maps)):
        hosted: list[list[int]] = [[] for _ in range(layer.num_devices)]
        for expert, device in zip(layer.slots, layer.device_of_slot, strict=True):
            hosted[device].append(expert)
        devices = [{"device_id": d, "device_expert": experts} for d, experts in enumerate(hosted)]
        layers.append(
            {"layer_id": index, "device_count": layer.num_devices, "device_list": devices}
        )
    return json.dumps({"moe_layer_count": len(layers), "layer_list": layers}) + "\n"


def sglang(maps: Mapping[int, ExpertMap], hidden_layers: int) -> str:
    """Write the JSON of SGLang's --init-expert-location: a map [hidden layers][slots].

    Every hidden layer has a row; dense ones get experts in order, repeated, as in SGLang's own
    trivial map.
    """
    any_layer = next(iter(maps.values()))
    trivial = [slot % any_layer.num_experts for slot in range(len(any_layer.slots))]
    rows = [list(maps[layer].slots) if layer in maps else trivial for layer in range(hidden_layers)]
    return json.dumps({"physical_to_logical_map": rows}) + "\n"


def tensorrt_llm(maps: Mapping[int, ExpertMap], hidden_layers: int) -> str:
    """Write the YAML of TensorRT-LLM's moe_load_balancer: experts of slots, by hidden layer."""
    lines = [f"  {number}: {list(layer.slots)}" for number, layer in _ordered(maps)]
    slots = len(next(iter(maps.values())).slots)
    return "\n".join(
        [
            "initial_global_assignments:",
            *lines,
            "layer_updates_per_iter: 0",
            f"num_slots: {slots}",
            "",
        ]
    )


FORMS: dict[str, tuple[str, Callable[[Mapping[int, ExpertMap], int], str]]] = {
    "vllm": ("vllm_expert_map.json", vllm),
    "vllm-ascend": ("vllm_ascend_expert_map.json", vllm_ascend),
    "sglang": ("sglang_expert_location.json", sglang),
    "tensorrt-llm": ("tensorrt_llm_load_balancer.yaml", tensorrt_llm),
}
"""Engine -> (file name, writer)."""


def write_form(form: str, maps: Mapping[int, ExpertMap], hidden_layers: int) -> tuple[str, str]:
    """Return the (file name, text) of maps in an engine's form.

    Args:
        form: a name in `FORMS`.
        maps: hidden layer -> its map; all with equally many slots, experts and devices.
        hidden_layers: of the model, dense ones included.

    Raises:
        ValueError: if the form is unknown, or can't express the maps.

    >>> write_form("vllm", {0: ExpertMap.contiguous(2, 1)}, hidden_layers=1)[0]
    'vllm_expert_map.json'
    """
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    kinds = {(len(m.slots), m.num_experts, m.num_devices) for m in maps.values()}
    if len(kinds) != 1:
        raise ValueError(
            f"all layers must have the same number of slots, experts and devices for {form}, got "
            f"{sorted(kinds)}"
        )
    if min(maps) < 0 or max(maps) >= hidden_layers:
        raise ValueError(
            f"hidden_layers must be above {max(maps)}, the last layer with experts, got "
            f"{hidden_layers}"
        )
    name, write = FORMS[form]
    return name, write(maps, hidden_layers)


def write_maps(
    maps: Sequence[ExpertMap], names: Sequence[str], hidden_layers: int | None, folder: Path
) -> list[Path]:
    """Write maps in every form into a folder, made if need be.

    Args:
        names: of the layers, with the number of the hidden layer.
        hidden_layers: of the model; None: the last one with experts is the last of all.

    Raises:
        ValueError: if the maps can't be written, or a name has no number of its own.
        OSError: if the folder can't be written.
    """
    named = dict(zip(layer_numbers(names), maps, strict=True))
    texts = [write_form(form, named, hidden_layers or max(named) + 1) for form in FORMS]
    folder.mkdir(exist_ok=True)
    for name, text in texts:
        with atomic_file(folder / name, private=False) as file:
            file.write_text(text, encoding="utf-8")
    return [folder / name for name, _ in texts]


def layer_numbers(names: Sequence[str]) -> list[int]:
    """Read the hidden layer of each MoE layer from its name.

    It is the first component of the name that is a number, else the first number.

    Raises:
        ValueError: if a name has none, or two have the same.

    >>> layer_numbers(["model.layers.1.mlp", "model.layers.2.mlp"])
    [1, 2]
    """
    numbers = []
    for name in names:
        found = re.search(r"(?<![^.])\d+(?![^.])", name) or re.search(r"\d+", name)
        if found is None:
            raise ValueError(f"the name of a layer must have its number, got {name!r}")
        numbers.append(int(found.group()))
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"names of layers must differ by their numbers, got {list(names)}")
    return numbers


def _ordered(maps: Mapping[int, ExpertMap]) -> list[tuple[int, ExpertMap]]:
    return sorted(maps.items())
