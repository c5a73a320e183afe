"""Write a checkpoint again with its experts in another order, one shard in memory at a time.

Engines place experts in order: the first E / P on the first device, and so on. So every engine
follows a planned placement once expert `slots[i]` has the number i: its tensors, its row of the
router and its entry in every bias move together, and the model computes the same.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from paceline.analysis.expert_map import ExpertMap
from paceline.checkpoint.expert_tensors import ExpertLayer, Kind, renamed
from paceline.checkpoint.folder import Checkpoint
from paceline.files import save_tensors
from paceline.placement import ExpertPlacement
from paceline.plan import Plan
from paceline.progress import Progress

ORDER_FILE = "expert_order.json"
"""File of a reordered checkpoint with the former expert of every place."""
_EXPERT_NUMBER = re.compile(r"experts\.(expert_)?\d")


def planned_maps(checkpoint: Checkpoint, plan: Plan) -> list[ExpertMap]:
    """Return the map of every layer with experts, from a plan's placements.

    Raises:
        ValueError: if the plan has no placement, is for another model, or one of its placements
            can't be reached by reordering experts.

    >>> from paceline.checkpoint.folder import open_checkpoint
    >>> from paceline.shipped import MODEL_FOLDER
    >>> len(planned_maps(open_checkpoint(MODEL_FOLDER), Plan(placements=(8,))))
    4
    """
    layers = checkpoint.layers()
    if not plan.placements:
        raise ValueError("the plan has no placements: there is nothing to reorder.")
    plan.check_layers(len(layers))
    maps = []
    for index, layer in enumerate(layers):
        placement = plan.placement_of(index)
        if isinstance(placement, int):
            placement = ExpertPlacement.contiguous(layer.num_experts, placement)
        if placement is None or placement.num_experts != layer.num_experts:
            raise ValueError(
                f"the plan places {placement and placement.num_experts} experts in {layer.name}, "
                f"which has {layer.num_experts}."
            )
        maps.append(ExpertMap.of_placement(placement))
    return maps


def reordered_plan(plan: Plan, maps: Sequence[ExpertMap]) -> Plan:
    """Return the plan for the reordered checkpoint, whose experts are on the devices in order.

    A calibration is of the original's experts, and is left out.

    >>> reordered_plan(Plan(placements=(2,)), [ExpertMap((1, 0), 2, 2)]).placements
    (2,)
    """
    devices = tuple(dict.fromkeys(layer.num_devices for layer in maps))
    placements = devices if len(devices) == 1 else tuple(layer.num_devices for layer in maps)
    return plan.replace(placements=placements, calibration=None)


def reorder(
    checkpoint: Checkpoint,
    maps: Sequence[ExpertMap],
    out: Path,
    progress: Progress | None = None,
    plan: Plan | None = None,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write the checkpoint with expert `maps[layer].slots[i]` in place i of each layer.

    Files beside the weights are copied; subfolders are not. The folder gets its name when it is
    complete; if anything fails nothing is left behind.

    Args:
        maps: of every layer with experts, in order, or one for all.
        out: folder to be made.
        progress: called with shards done, shards in all and the last one.
        plan: of the maps; its form for the new order is written beside the weights.
        check: called with the complete folder before it gets its name; may raise.

    Raises:
        ValueError: if the maps don't fit the checkpoint, or it can't be reordered.
        OSError: if the folder can't be written.

    >>> from tempfile import TemporaryDirectory
    >>> from paceline.checkpoint.folder import open_checkpoint
    >>> from paceline.shipped import MODEL_FOLDER
    >>> turned = ExpertMap(tuple(reversed(range(32))), num_experts=32, num_devices=8)
    >>> with TemporaryDirectory() as parent:
    ...     reorder(open_checkpoint(MODEL_FOLDER), [turned], Path(parent) / "turned")
    ...     print((Path(parent) / "turned" / ORDER_FILE).is_file())
    True
    """
    layers = checkpoint.layers()
    if len(maps) not in (1, len(layers)):
        raise ValueError(
            f"the plan places the experts of {len(maps)} layers, the checkpoint has {len(layers)} "
            "layers with experts."
        )
    map_of = list(zip(layers, maps if len(maps) > 1 else [*maps] * len(layers), strict=True))
    orders = _orders(checkpoint, map_of)
    if out.exists():
        raise ValueError(f"{out} exists: a checkpoint is written into a new folder.")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out} can't be made: there is no folder {out.parent}.")
    new_name = {
        name: renamed(name, order.argsort().tolist()) if kind == "rename" else name
        for name, (order, kind) in orders.items()
    }
    made = Path(tempfile.mkdtemp(dir=out.absolute().parent, prefix=f".{out.name}."))
    try:
        for done, (shard, names) in enumerate(checkpoint.shards.items(), 1):
            with safe_open(checkpoint.folder / shard, framework="pt") as stored:
                tensors = {
                    new_name.get(name, name): _moved(stored.get_tensor(name), orders.get(name))
                    for name in names
                }
                save_tensors(tensors, made / shard, stored.metadata() or {"format": "pt"})
            del tensors  # before the next shard is read
            if progress is not None:
                progress(done, len(checkpoint.shards), shard)
        _copy_beside(checkpoint, made, new_name)
        slots = {layer.name: list(planned.slots) for layer, planned in map_of}
        content = {"version": 1, "original_expert_of_place": slots}  # for tools that count experts
        (made / ORDER_FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")
        if plan is not None:
            reordered_plan(plan, maps).save(made / "plan.toml")
        if check is not None:
            check(made)
        made.chmod(0o755)
        made.rename(out)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _orders(
    checkpoint: Checkpoint, map_of: Sequence[tuple[ExpertLayer, ExpertMap]]
) -> dict[str, tuple[Tensor, Kind]]:
    """Return tensor name -> (old expert of every place, kind), where the order changes."""
    _check_config(checkpoint)
    out: dict[str, tuple[Tensor, Kind]] = {}
    for layer, planned in map_of:
        _check_map(layer, planned, checkpoint.config.expert_groups)
        if planned.slots == tuple(range(layer.num_experts)):
            continue
        order = torch.tensor(planned.slots)
        out |= {name: (order, kind) for name, kind in layer.tensors.items()}
    return out


def _check_map(layer: ExpertLayer, planned: ExpertMap, groups: int) -> None:
    if planned.replicas:
        raise ValueError(
            f"the plan has {planned.replicas} replicas: a checkpoint holds each expert once, so "
            "that replicas are for the engine to make."
        )
    if planned.num_experts != layer.num_experts:
        raise ValueError(
            f"the plan places {planned.num_experts} experts in {layer.name}, which has "
            f"{layer.num_experts}."
        )
    size = layer.num_experts // groups
    slots = planned.slots
    if any(
        len({expert // size for expert in slots[g * size : (g + 1) * size]}) > 1
        for g in range(groups)
    ):
        raise ValueError(
            f"the plan mixes experts of the {groups} groups in which the router of {layer.name} "
            f"chooses: an order must keep them whole (plan --groups {groups})."
        )


def _check_config(checkpoint: Checkpoint) -> None:
    if (checkpoint.folder / ORDER_FILE).exists():
        raise ValueError(
            f"{checkpoint.folder} was reordered before ({ORDER_FILE} is there): a plan is for the "
            "original."
        )
    if _EXPERT_NUMBER.search(json.dumps(checkpoint.config.fields)):
        raise ValueError(
            f"{checkpoint.folder / 'config.json'} names single experts (in its quantisation "
            "settings): such a checkpoint can't be reordered."
        )


def _moved(tensor: Tensor, change: tuple[Tensor, Kind] | None) -> Tensor:
    """Move a tensor's experts to their new places; the rest of it stays."""
    if change is None or change[1] == "rename":
        return tensor
    order, kind = change
    if kind == "values":
        return _mapped_ids(tensor, order.argsort())
    if tensor.element_size() == 1 and tensor.dtype is not torch.uint8:  # FP8 can't be indexed
        return _moved(tensor.view(torch.uint8), change).view(tensor.dtype)
    if kind == "columns":
        return _moved(tensor.T, (order, "rows")).T.contiguous()
    if kind == "blocks":
        return tensor.reshape(len(order), -1, *tensor.shape[1:])[order].flatten(0, 1)
    moved = tensor[order]
    rest = tensor[len(order) :]  # what the router scores beside experts
    return torch.cat([moved, rest]) if len(rest) else moved


def _mapped_ids(ids: Tensor, place_of: Tensor) -> Tensor:
    """Renumber expert ids; ids that are no expert stay."""
    inside = (ids >= 0) & (ids < len(place_of))
    safe = torch.where(inside, ids, torch.zeros_like(ids)).long()
    return torch.where(inside, place_of[safe].to(ids.dtype), ids)


def _copy_beside(checkpoint: Checkpoint, made: Path, new_name: Mapping[str, str]) -> None:
    """Copy everything beside the weights, and the index with the new names."""
    for file in sorted(checkpoint.folder.iterdir()):
        if file.name in checkpoint.shards or not file.is_file():
            continue
        if file.name.endswith(".safetensors.index.json"):
            try:
                index = dict(json.loads(file.read_text(encoding="utf-8")))
            except (ValueError, TypeError, RecursionError):
                raise ValueError(f"{file} is no index of a checkpoint.") from None
            index["weight_map"] = {
                new_name.get(name, name): shard
                for shard, names in checkpoint.shards.items()
                for name in names
            }
            (made / file.name).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        elif file.suffix not in (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"):
            shutil.copyfile(file, made / file.name)
