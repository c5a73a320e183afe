"""Write expert maps in the forms that serving engines read.

vLLM 0.32 and 0.33 read no map from a file; what is written for it is the list that its proposed
`initial_expert_map_path` takes and that its own `physical_to_logical_map` holds. A reordered
checkpoint (`paceline reorder`) needs no file at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paceline.analysis.expert_map import ExpertMap
from paceline.files import atomic_file


def vllm(maps: Mapping[int, ExpertMap], hidden_layers: int) -> str:
    """JSON list [MoE layers][slots] of experts, the form of vLLM's physical_to_logical_map.

    >>> vllm({1: ExpertMap.contiguous(2, 1)}, hidden_layers=3)
    '[[0, 1]]\\n'
    """
    return json.dumps([list(layer.slots) for _, layer in _ordered(maps)]) + "\n"


def vllm_ascend(maps: Mapping[int, ExpertMap], hidden_layers: int) -> str:
    """JSON of vLLM Ascend's expert_map_path: per MoE layer and device, its experts.

    >>> vllm_ascend({1: ExpertMap.contiguous(2, 1)}, hidden_layers=3)[:60]
    '{"moe_layer_count": 1, "layer_list": [{"layer_id": 0, "devic'
    """
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
    """JSON of SGLang's --init-expert-location: physical_to_logical_map [hidden layers][slots].

    Every hidden layer has a row; dense ones get experts in order, repeated, as SGLang's own
    trivial map has them.

    >>> sglang({1: ExpertMap((1, 0), 2, 1)}, hidden_layers=2)
    '{"physical_to_logical_map": [[0, 1], [1, 0]]}\\n'
    """
    any_layer = next(iter(maps.values()))
    trivial = [slot % any_layer.num_experts for slot in range(len(any_layer.slots))]
    rows = [list(maps[layer].slots) if layer in maps else trivial for layer in range(hidden_layers)]
    return json.dumps({"physical_to_logical_map": rows}) + "\n"


def tensorrt_llm(maps: Mapping[int, ExpertMap], hidden_layers: int) -> str:
    """YAML of TensorRT-LLM's moe_load_balancer: the expert of every slot, by hidden layer.

    >>> print(tensorrt_llm({1: ExpertMap((1, 0), 2, 1)}, hidden_layers=2))
    initial_global_assignments:
      1: [1, 0]
    layer_updates_per_iter: 0
    num_slots: 2
    <BLANKLINE>
    """
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
    """The (file name, text) of maps in an engine's form.

    Args:
        form: a name in `FORMS`.
        maps: hidden layer -> its map; all with equally many slots, experts and devices.
        hidden_layers: of the model, dense ones included.

    Raises:
        ValueError: if there is no such form, or the maps can't be said in one.

    >>> write_form("vllm", {0: ExpertMap.contiguous(2, 1)}, hidden_layers=1)[0]
    'vllm_expert_map.json'
    """
    if form not in FORMS:
        raise ValueError(f"form={form!r} is not allowed: it is one of {', '.join(FORMS)}.")
    kinds = {(len(m.slots), m.num_experts, m.num_devices) for m in maps.values()}
    if len(kinds) != 1:
        raise ValueError(
            f"layers with {sorted(kinds)} slots, experts and devices can't be written for {form}: "
            "they are alike in all layers."
        )
    if min(maps) < 0 or max(maps) >= hidden_layers:
        raise ValueError(
            f"hidden_layers={hidden_layers} is not allowed: layer {max(maps)} has experts."
        )
    name, write = FORMS[form]
    return name, write(maps, hidden_layers)


def write_maps(
    maps: Sequence[ExpertMap], names: Sequence[str], hidden_layers: int | None, folder: Path
) -> list[Path]:
    """Write maps in every form into a folder, made if need be.

    Args:
        maps: of each MoE layer.
        names: of the layers, which say what hidden layer each is.
        hidden_layers: of the model; None: none follows the last one with experts.
        folder: for the files.

    Raises:
        ValueError: as `write_form` and `layer_numbers` do.
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
    """The hidden layer of each MoE layer: the first component of its name that is a number, else
    the first number.

    Raises:
        ValueError: if a name has none, or two have the same.

    >>> layer_numbers(["model.layers.1.mlp", "model.layers.2.mlp"])
    [1, 2]
    """
    numbers = []
    for name in names:
        found = re.search(r"(?<![^.])\d+(?![^.])", name) or re.search(r"\d+", name)
        if found is None:
            raise ValueError(f"layer {name!r} has no number: which hidden layer it is is unknown.")
        numbers.append(int(found.group()))
    if len(set(numbers)) != len(numbers):
        raise ValueError(
            f"layers {list(names)} don't differ by their numbers: which hidden layer each is is "
            "unknown."
        )
    return numbers


def _ordered(maps: Mapping[int, ExpertMap]) -> list[tuple[int, ExpertMap]]:
    return sorted(maps.items())
