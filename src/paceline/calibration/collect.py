"""Run texts through a model and fit stand-ins of its experts, layer by layer.

A pass over the texts keeps the inputs of as many layers as fit into memory, and then runs the
experts of these layers one by one on the rows that were routed to them. Only inputs and outputs of
experts are used, so that any layer which `attach` handles can be calibrated.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.batches import Batch, Sampling, check_length, make_batches, run_batch
from paceline.calibration.fit import ROWS_PER_RANK
from paceline.calibration.layer_fit import FOLDS, TIMES, fit_layer
from paceline.calibration.rows import CAPS, Rows, Seen
from paceline.facts import Facts
from paceline.numbers import check_count
from paceline.policy import CapacityPolicy
from paceline.progress import Progress
from paceline.routing import Assignment, RoutingInputs
from paceline.stand_ins.calibration_file import (
    SCHEMA,
    Calibration,
    CalibrationError,
    LayerCalibration,
)
from paceline.stand_ins.identity import LayerIdentity

MEMORY = 2 << 30
"""Bytes for the inputs of layers, beside the model and one expert's rows."""

FOLDER = "unfinished"
"""Folder of finished layers within that of a calibration, while it is made."""


def calibrate(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, str] | Sequence[Batch],
    *,
    rank: int = 16,
    devices: int | None = None,
    caps: Sequence[CapacityPolicy] = CAPS,
    sampling: Sampling | None = None,
    memory: int = MEMORY,
    unfinished: Path | None = None,
    started: Callable[[Unfinished, int], None] | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Learn stand-ins of a model's experts, their loads and mean norms from texts.

    Args:
        model: a Mixture-of-Experts model in evaluation mode; it is restored afterwards.
        tokenizer: its tokenizer, None with batches.
        texts: name -> text, or batches of the model's arguments, such as prompts with pictures.
            Rows of padding (attention_mask) are left out.
        rank: of a stand-in, at most.
        devices: to search a placement of every layer's experts for; None: none.
        caps: that the stand-ins are for: rows that these drop weigh most.
        sampling: which tokens of texts to run.
        memory: bytes for layers' inputs; with less, the texts are run more often.
        unfinished: folder of finished layers, from which an interrupted run of the same model,
            texts and settings continues.
        started: called before the work with these and how many of them there are; may raise.
        progress: called after every expert and every batch.

    Raises:
        ValueError: if the model can't be handled, a text is too short, or an argument is bad.
        OSError: if the folder can't be written.
    """
    from paceline.engines.transformers import attach

    check_count("rank", rank)
    check_count("memory", memory)
    if devices is not None:
        check_count("devices", devices)
    if isinstance(texts, Mapping):
        sampling = sampling or Sampling()
        check_length(model, sampling.sequence_length)
        batches, tokens = make_batches(tokenizer, texts, sampling)
    else:
        batches, tokens = list(texts), _tokens(texts)
    text_of_row, part_of_row = _parts(batches, list(tokens))
    sizes = torch.tensor([batch.ids.numel() for batch in batches])
    batch_of_row = torch.arange(len(batches)).repeat_interleave(sizes)
    held_out = "texts" if len(tokens) > 1 else "parts"
    with attach(model) as pace:
        identity = pace.identity()
        _check(identity, devices)

        def calibration(*layers: LayerCalibration) -> Calibration:
            names, counts = tuple(tokens), tuple(tokens.values())
            return Calibration(type(model).__name__, names, counts, held_out, layers)

        kept = None
        if unfinished is not None:
            policies = tuple(map(str, caps))
            settings = (type(model).__name__, identity, dict(tokens), rank, devices, policies)
            kept = Unfinished(unfinished, settings, [batch.ids for batch in batches], calibration)
        found = {} if kept is None else kept.found(len(identity))
        if kept is not None and started is not None:
            started(kept, len(found))
        experts = [layer.num_experts for layer in identity]
        done, total = (TIMES * sum(some) for some in ([experts[i] for i in found], experts))

        def report(label: str, more: int = 0) -> None:
            nonlocal done
            done += more
            if progress is not None:
                progress(done, total, label)

        while missing := [index for index in range(len(identity)) if index not in found]:
            names = [identity[index].name for index in missing]
            with _watching(pace, names, memory // len(text_of_row)) as seen:
                for number, batch in enumerate(batches, start=1):
                    report(f"batch {number} of {len(batches)}")
                    run_batch(model, batch)
            for index in missing:
                layer = identity[index]
                if layer.name not in seen:
                    if not seen and index == missing[0]:
                        raise ValueError(
                            f"layer {layer.name} must route tokens of the texts, got none"
                        )
                    break
                rows = Rows(seen.pop(layer.name), layer, text_of_row, part_of_row, batch_of_row)
                _check_enough(rows)
                fitted = partial(report, layer.name, 1)
                found[index] = fit_layer(rows, rank, len(tokens), devices, fitted, caps)
                if kept is not None:
                    kept.keep(index, found[index])
    return calibration(*(found[index] for index in range(len(identity))))


def _check(identity: Sequence[LayerIdentity], devices: int | None) -> None:
    for layer in identity:
        if len(layer.experts) < layer.num_experts:
            raise ValueError(
                f"the model must be in one process, got layer {layer.name} spread over ranks"
            )
        if devices is not None and devices > layer.num_experts:
            raise ValueError(
                f"devices must be at most {layer.num_experts}, the experts of layer {layer.name}, "
                f"got {devices}"
            )


def _check_enough(rows: Rows) -> None:
    """Check that half of a layer's experts can have a stand-in.

    Raises:
        ValueError: saying how much text would do.
    """
    experts, tokens = rows.layer.num_experts, len(rows.ids)
    chosen = rows.ids[(rows.ids >= 0) & (rows.ids < experts)].long()
    median = int(torch.bincount(chosen, minlength=experts).median())
    if median < ROWS_PER_RANK:
        raise ValueError(
            f"too little text: a stand-in needs {ROWS_PER_RANK} tokens, and half of the experts of "
            f"layer {rows.layer.name} got {median} or fewer of {tokens}; give about "
            f"{tokens * 2 * ROWS_PER_RANK // max(median, 1):,} tokens or more"
        )


def _real(batch: Batch) -> Tensor:
    """Return [rows, length] bool, False for padding."""
    return batch.given.get("attention_mask", torch.ones_like(batch.ids)) != 0


def _tokens(batches: Sequence[Batch]) -> dict[str, int]:
    """Count the tokens of each text, in order of appearance.

    Raises:
        ValueError: if there are none.
    """
    tokens: dict[str, int] = {}
    for batch in batches:
        for source, real in zip(batch.sources, _real(batch).sum(1).tolist(), strict=True):
            tokens[source] = tokens.get(source, 0) + real
    if not sum(tokens.values()):
        raise ValueError("batches must have at least one token, got none")
    return tokens


def _parts(batches: Sequence[Batch], texts: list[str]) -> tuple[Tensor, Tensor]:
    """Return [rows] each row's text, -1 for padding, and the part with which it is left out."""
    rows = [
        torch.tensor([texts.index(s) for s in b.sources]).unsqueeze(1).where(_real(b).cpu(), -1)
        for b in batches
    ]
    text = torch.cat([row.flatten() for row in rows])
    if len(texts) > 1:
        return text, text % FOLDS
    return text, torch.arange(len(text)) * FOLDS // len(text)


@contextmanager
def _watching(pace: Any, layers: Sequence[str], room: int) -> Iterator[dict[str, Seen]]:
    """Keep the inputs of the first of these layers' experts, `room` bytes per token in all."""
    seen: dict[str, Seen] = {}
    free, ranked = room, dict[str, Tensor]()

    def keep(name: str, run: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        nonlocal free
        if name in layers:
            flat = hidden.reshape(-1, hidden.shape[-1])
            if name not in seen and layers[len(seen) :][:1] == [name]:
                size = flat.shape[1] * flat.element_size() + ids.shape[1] * ids.element_size()
                if size <= free or not seen:
                    free -= size
                    seen[name] = Seen(run, [], [], [], [], hidden.device)
            if name in seen:
                seen[name].hidden.append(flat.to("cpu", copy=True))
                seen[name].ids.append(ids.to("cpu", copy=True))
                seen[name].metric.append(ranked[name])
                seen[name].combine.append(weights.to("cpu", copy=True))
        out: Tensor = run(hidden, ids, weights)
        return out

    def rank(name: str, inputs: RoutingInputs, _: Assignment) -> None:
        """Note the ranking before the experts run."""
        scores, ids = inputs.scores, inputs.topk_ids
        if scores is None:
            metric = inputs.topk_weights if inputs.topk_scores is None else inputs.topk_scores
        else:
            metric = scores.gather(1, ids.long().clamp(0, scores.shape[1] - 1))
        ranked[name] = metric.float().to("cpu", copy=True)

    undo, unwatch = pace.replace_experts(keep), pace.watch(rank, Facts(scores=True))
    try:
        yield seen
    finally:
        unwatch()
        undo()


class Unfinished:
    """Finished layers of one run, a calibration file each, in a folder named after the run.

    Args:
        folder: that holds the runs' folders.
        settings: all that the result depends on besides the tokens.
        tokens: [rows, length] of every batch.
        calibration: makes a calibration of some layers.
    """

    def __init__(
        self,
        folder: Path,
        settings: Any,
        tokens: Iterable[Tensor],
        calibration: Callable[..., Calibration],
    ) -> None:
        seen = hashlib.sha256(f"{SCHEMA}{settings!r}".encode())
        for ids in tokens:
            seen.update(f"{list(ids.shape)}".encode() + ids.numpy().tobytes())
        self._folder, self._calibration = folder / seen.hexdigest()[:16], calibration

    def found(self, layers: int) -> dict[int, LayerCalibration]:
        """Read the finished layers, of `layers` in all."""
        found: dict[int, LayerCalibration] = {}
        for index in range(layers):
            with suppress(CalibrationError):
                (found[index],) = Calibration.load(self._folder / str(index)).layers
        return found

    def keep(self, index: int, layer: LayerCalibration) -> None:
        """Write a layer atomically."""
        self._calibration(layer).save(self._folder / str(index))

    def remove(self) -> None:
        """Remove the finished layers of this run; those of other runs stay."""
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):  # others are in it
            self._folder.parent.rmdir()
