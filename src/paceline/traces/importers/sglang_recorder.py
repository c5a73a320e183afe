"""SGLang's expert distribution recorder: .pt files in three modes; KTransformers reads such counts.

`torch.load(weights_only=True)` is still a pickle machine, if a restricted one, and holes in it were
closed in torch 2.6 and 2.10: with an older torch such a file is refused. Sizes are checked before.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.traces.format import PHASES, UNKNOWN, TraceError, seen
from paceline.traces.importers.source import Source, check_zip
from paceline.traces.importers.to_trace import from_choices, from_counts, layer_names
from paceline.traces.trace import Trace

Array = npt.NDArray[Any]

SAFE_TORCH = (2, 10)
_MAX_PICKLE_BYTES, _MAX_BYTES, _MAX_VALUES = 1 << 26, 1 << 30, 1 << 28
TENSOR_PARALLEL = (
    "under plain tensor parallelism every rank counts the same tokens: totals are then as many "
    "times too large (ratios are right), and --world-size says how many"
)
_MODES = {1: "prefill", 2: "decode", 5: "decode"}
"""SGLang's forward_mode: extend, decode, verify; 3 is mixed, 4 idle."""
_IDLE = 4


def matches(source: Source) -> bool:
    """Check for a file that torch saved, or a folder with some."""
    return any(_is_torch(file) for file in source.files)


def read(source: Source) -> Trace:
    """Read all ranks of one recording, whose mode its content tells.

    Raises:
        TraceError: if torch is too old, a file is none of the recorder's, or ranks don't fit.
    """
    paths = [file.path for file in source.files if _is_torch(file)]
    if source.path in paths:
        paths = _ranks_beside(source.path)
    loaded = [_load(path) for path in paths]
    _check_ranks(loaded, paths, source.where)
    if all("logical_count" in data for data in loaded):
        return _stat(loaded, source)
    if not all(isinstance(data.get("records"), list) and data["records"] for data in loaded):
        raise TraceError(
            f"{source.where} is no recording of SGLang: expected logical_count, or records (and "
            "files of one mode)."
        )
    if "topk_ids_of_layer" in _record(loaded[0]["records"][0], source.where):
        return _per_token(loaded, source)
    return _per_pass(loaded, source)


def _is_torch(file: Source) -> bool:
    return any(name.endswith("data.pkl") for name in file.zip_names)


def _check_ranks(loaded: list[dict[str, Any]], paths: Sequence[Path], where: str) -> None:
    """Refuse files that can't be the ranks of one recording."""
    of_rank: dict[int, Path] = {}
    for data, path in zip(loaded, paths, strict=True):
        records = data.get("records")
        holders = records if isinstance(records, list) else [data]
        ranks = {_whole(holder, "rank") for holder in holders if isinstance(holder, dict)}
        for rank in ranks:
            if rank in of_rank:
                raise TraceError(
                    f"{where}: {of_rank[rank].name} and {path.name} are both of rank {rank}, so "
                    "not of one recording."
                )
            of_rank[rank] = path


def _ranks_beside(path: Path) -> list[Path]:
    """Find the files of one recording, NAME_0.pt, NAME_1.pt, ..., by one of them."""
    match = re.fullmatch(r"(.*_)\d+\.pt", path.name)
    if match is None:
        return [path]
    ranks = [
        p for p in path.parent.iterdir() if re.fullmatch(re.escape(match[1]) + r"\d+\.pt", p.name)
    ]
    return sorted(ranks)


def _load(path: Path) -> dict[str, Any]:
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < SAFE_TORCH:
        raise TraceError(
            f"{path} is a .pt file, which torch {torch.__version__} doesn't read safely: allowed "
            "is torch 2.10 or newer."
        )
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            check_zip(members, str(path), _MAX_BYTES)
            for member in members:
                if member.filename.endswith(".pkl") and member.file_size > _MAX_PICKLE_BYTES:
                    raise TraceError(f"{path}: {member.filename!r} is too large.")
                if member.compress_type != zipfile.ZIP_STORED:
                    raise TraceError(
                        f"{path}: {member.filename!r} is compressed: torch never does."
                    )
        data = torch.load(path, map_location="cpu", weights_only=True)
    except TraceError:
        raise
    except Exception as error:  # what the restricted unpickler raises differs with the fault
        if isinstance(error, MemoryError | OSError):
            raise
        raise TraceError(
            f"{path} can't be read without running code from it (torch.load, weights_only): "
            f"{seen(str(error).splitlines()[:1] or type(error).__name__)}."
        ) from None
    if isinstance(data, Tensor):  # counts alone, which KTransformers takes too
        return {"logical_count": data}
    if not isinstance(data, dict):
        raise TraceError(f"{path} is no recording of SGLang: it holds a {type(data).__name__}.")
    return data


def _stat(loaded: list[dict[str, Any]], source: Source) -> Trace:
    """Read logical_count [steps, hidden layers, experts]; unused steps are zero, order may wrap."""
    where = source.where
    parts = [_array(data["logical_count"], 3, "logical_count", where) for data in loaded]
    if len({part.shape for part in parts}) > 1:
        raise TraceError(f"{where}: ranks differ in the shape of logical_count.")
    counts: Array = np.sum(parts, axis=0)
    source.agree("experts", counts.shape[2])
    used = np.asarray(counts.any((1, 2)))
    notes = [] if source.options.world_size else [TENSOR_PARALLEL]
    if len(parts) > 1:
        notes.append(f"the sum of {len(parts)} ranks")
    if not used.all():
        notes.append(f"{int((~used).sum())} of {len(used)} steps are unused: left out")
    notes.append("the recorder's buffer may have wrapped: the order of steps isn't known")
    return from_counts(
        source, counts[used], layer_names(range(counts.shape[1])), program="SGLang stat",
        batches="forward", notes=notes,
    )  # fmt: skip


def _per_pass(loaded: list[dict[str, Any]], source: Source) -> Trace:
    """Read global_physical_count [layers, slots] of every pass, add up the ranks, then map."""
    where = source.where
    total: dict[int, Array] = {}
    ranks = set()
    for data in loaded:
        for record in data["records"]:
            record = _record(record, where)
            counts = _array(record.get("global_physical_count"), 2, "global_physical_count", where)
            number = record.get("forward_pass_id")
            if type(number) is not int:
                raise TraceError(f"{where}: forward_pass_id={seen(number)} is no whole number.")
            ranks.add(record.get("rank"))
            if any(other.shape != counts.shape for other in total.values()):
                raise TraceError(f"{where}: passes or ranks differ in layers or slots.")
            total[number] = total.get(number, 0) + counts
    physical = np.stack([total[number] for number in sorted(total)])
    slots = _map(loaded, physical.shape[1:], where)
    alone = "one rank's file: where there are several, all must lie beside it"
    notes = [f"the sum of {len(ranks)} ranks" if len(ranks) > 1 else alone]
    if source.options.physical:
        notes.append("physical slots are kept as experts")
        counts = physical
    else:
        notes.append("physical slots mapped to experts by last_physical_to_logical_map")
        counts = np.zeros((*physical.shape[:2], int(slots.max()) + 1), dtype=np.int64)
        for layer, experts in enumerate(slots):
            for slot, expert in enumerate(experts.tolist()):
                counts[:, layer, expert] += physical[:, layer, slot]
    source.agree("experts", counts.shape[2])
    return from_counts(
        source, counts, layer_names(range(counts.shape[1])), program="SGLang per_pass",
        batches="forward", notes=notes,
    )  # fmt: skip


def _per_token(loaded: list[dict[str, Any]], source: Source) -> Trace:
    """Read topk_ids_of_layer [layers, tokens, k] of every pass: physical ids, -1 for none.

    The ids of the tokens themselves, which these files hold too, are not taken over.
    """
    where = source.where
    records = [_record(record, where) for data in loaded for record in data["records"]]
    records = [record for record in records if record.get("forward_mode") != _IDLE]
    if not records:
        raise TraceError(f"{where} has idle passes alone.")
    records.sort(key=lambda record: (_whole(record, "forward_pass_id"), _whole(record, "rank")))
    parts: list[Array] = []
    facts: dict[str, list[Array]] = {"phase": [], "request": [], "source": []}
    starts, notes, last_pass = [0], [], -1
    sequences = repeated = 0
    for record in records:
        ids = _array(record.get("topk_ids_of_layer"), 3, "topk_ids_of_layer", where)
        if parts and (ids.shape[0], ids.shape[2]) != (parts[0].shape[0], parts[0].shape[2]):
            raise TraceError(f"{where}: passes differ in layers or k.")
        number, tokens, end = _whole(record, "forward_pass_id"), ids.shape[1], starts[-1]
        if number == last_pass:
            if np.array_equal(ids, parts[-1]):  # tensor parallelism: all ranks see all tokens
                repeated += 1
                continue
            starts.pop()
        last_pass = number
        mode = _MODES.get(record.get("forward_mode") or 0)
        lengths = record.get("extend_seq_lens")
        if (
            not isinstance(lengths, list)
            or not all(type(n) is int and 0 <= n <= tokens for n in lengths)
            or sum(lengths) != tokens
        ):
            lengths = [1] * tokens if mode == "decode" else [tokens]
        phase = PHASES.index(mode) if mode else UNKNOWN
        facts["phase"].append(np.full(tokens, phase, dtype=np.uint8))
        facts["request"].append(np.repeat(np.arange(len(lengths)) + sequences, lengths))
        facts["source"].append(np.full(tokens, _whole(record, "rank"), dtype=np.int32))
        sequences += len(lengths)
        parts.append(ids)
        starts.append(end + tokens)
    if repeated:
        notes.append(f"{repeated} records repeat those of another rank: counted once")
    table = np.concatenate(parts, 1)
    physical = [record.get("global_physical_count") for record in records]
    width = max(count.shape[-1] if isinstance(count, Tensor) else 0 for count in physical)
    slots = _map(loaded, (table.shape[0], width), where) if width else None
    if source.options.physical or slots is None:
        experts = width or source.require("experts")
        notes.append("physical slots are kept as experts")
    else:
        experts = int(slots.max()) + 1
        notes.append("physical slots mapped to experts by last_physical_to_logical_map")
        if int(table.max()) >= slots.shape[1]:
            raise TraceError(f"{where} names slot {int(table.max())} of {slots.shape[1]}.")
        mapped = np.take_along_axis(
            slots[:, None, :], np.maximum(table, 0).reshape(len(table), 1, -1), 2
        ).reshape(table.shape)
        table = np.where(table < 0, -1, mapped)
    source.agree("experts", experts)
    return from_choices(
        source, table, layer_names(range(len(table))), program="SGLang per_token",
        experts=experts, starts=np.array(starts), batches="forward",
        facts={name: np.concatenate(values) for name, values in facts.items()},
        notes=[*notes, "no weights"],
    )  # fmt: skip


def _map(loaded: list[dict[str, Any]], shape: tuple[int, ...], where: str) -> Array:
    """Read the expert in each slot [layers, slots], the same on all ranks."""
    maps = [
        _array(data.get("last_physical_to_logical_map"), 2, "the map", where) for data in loaded
    ]
    first = maps[0]
    if first.shape != shape or any(not np.array_equal(first, other) for other in maps):
        raise TraceError(
            f"{where}: last_physical_to_logical_map has shape {list(first.shape)}: expected "
            f"{list(shape)}, the same on all ranks."
        )
    if first.min() < 0 or first.max() >= 1 << 20:
        raise TraceError(f"{where}: last_physical_to_logical_map names expert {first.max()}.")
    return first


def _record(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise TraceError(f"{where}: records hold a {type(record).__name__}: expected dicts.")
    return record


def _whole(record: dict[str, Any], field: str) -> int:
    value = record.get(field)
    return value if type(value) is int and 0 <= value < 1 << 31 else 0


def _array(value: Any, axes: int, field: str, where: str) -> Array:
    """Convert a tensor of whole numbers to int64."""
    if not isinstance(value, Tensor) or value.dim() != axes or value.is_floating_point():
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise TraceError(f"{where}: {field} is {shape}: expected whole numbers, {axes} axes.")
    # strides may repeat a few bytes into terabytes
    size = value.untyped_storage().nbytes() // value.element_size()
    if not 0 < value.numel() <= min(size, _MAX_VALUES) or value.layout is not torch.strided:
        raise TraceError(f"{where}: {field} has shape {list(value.shape)} over {size} values.")
    return np.array(value.contiguous().numpy(), dtype=np.int64)
