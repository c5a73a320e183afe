"""Run texts through a model and fit stand-ins of its experts, layer by layer.

A pass over the texts keeps the inputs of as many layers as fit into a given memory, and then runs
the experts of these layers one by one on the rows that were routed to them. Only inputs and outputs
of experts are looked at, so that any layer which `attach` handles can be calibrated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.analysis.observe import Sampling, make_batches
from paceline.calibration.file import Calibration, LayerCalibration
from paceline.calibration.fit import Regression, none
from paceline.calibration.identity import LayerIdentity
from paceline.evaluation.batches import Batch, check_length
from paceline.numbers import check_count

Progress = Callable[[int, int, str], None]

RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
"""Of which the best for rows that were left out is taken, one for a layer."""

FOLDS = 4
"""Parts that are left out in turn: whole texts, or parts of the only text."""

MEMORY = 1 << 30
"""Bytes for the inputs of layers, beside the model and one expert's rows."""


@dataclass(eq=False)
class _Seen:
    """What one layer was given in a pass.

    Attributes:
        run: the layer's experts, as `Pace.replace_experts` hands them.
        hidden: [rows, hidden] on the host, in parts.
        ids: [rows, k], likewise.
        weight: dtype of the combine weights.
        device: of the layer.
    """

    run: Any = None
    hidden: list[Tensor] = field(default_factory=list)
    ids: list[Tensor] = field(default_factory=list)
    weight: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009


def calibrate(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, str] | Sequence[Batch],
    *,
    rank: int = 16,
    sampling: Sampling | None = None,
    memory: int = MEMORY,
    progress: Progress | None = None,
) -> Calibration:
    """Learn stand-ins of a model's experts, their loads and mean output norms from texts.

    Args:
        model: a Mixture-of-Experts model in evaluation mode; it is restored afterwards.
        tokenizer: its tokenizer, None with batches.
        texts: name -> text, or batches of the model's arguments: prompts with pictures, say. Rows
            of padding (attention_mask) teach nothing.
        rank: of a stand-in, at most.
        sampling: which tokens of texts to run.
        memory: bytes for layers' inputs; with less, the texts are run more often.
        progress: told after every layer.

    Raises:
        ValueError: if the model can't be handled, a text is too short, or an argument is bad.
    """
    from paceline.engines.transformers import attach

    check_count("rank", rank)
    check_count("memory", memory)
    if isinstance(texts, Mapping):
        sampling = sampling or Sampling()
        check_length(model, sampling.sequence_length)
        batches, tokens = make_batches(tokenizer, texts, sampling)
    else:
        batches, tokens = list(texts), _tokens(texts)
    text_of_row, part_of_row = _parts(batches, list(tokens))
    found: list[LayerCalibration] = []
    with attach(model) as pace:
        identity, at_once = pace.identity(), 1
        for layer in identity:
            if len(layer.experts) < layer.num_experts:
                raise ValueError(
                    f"layer {layer.name} is spread over ranks: allowed is a model in one process."
                )
        while len(found) < len(identity):
            group = identity[len(found) : len(found) + at_once]
            with _watching(pace, [layer.name for layer in group]) as seen:
                for batch in batches:
                    _run(model, batch)
            for layer in group:
                rows = _Rows(seen.pop(layer.name), layer, text_of_row, part_of_row)
                found.append(_fit_layer(rows, layer, rank, len(tokens)))
                if progress is not None:
                    progress(len(found), len(identity), layer.name)
            at_once = max(1, memory // (4 * found[-1].mean.shape[1] * len(text_of_row)))
    held_out = "texts" if len(tokens) > 1 else "parts"
    return Calibration(
        type(model).__name__, tuple(tokens), tuple(tokens.values()), held_out, tuple(found)
    )


def _real(batch: Batch) -> Tensor:
    """[rows, length] bool, False for padding."""
    return batch.given.get("attention_mask", torch.ones_like(batch.ids)) != 0


def _tokens(batches: Sequence[Batch]) -> dict[str, int]:
    """Tokens of each text, in order of appearance.

    Raises:
        ValueError: if there are none.
    """
    tokens: dict[str, int] = {}
    for batch in batches:
        for source, real in zip(batch.sources, _real(batch).sum(1).tolist(), strict=True):
            tokens[source] = tokens.get(source, 0) + real
    if not sum(tokens.values()):
        raise ValueError("batches have no token: allowed are one or more.")
    return tokens


def _parts(batches: Sequence[Batch], texts: list[str]) -> tuple[Tensor, Tensor]:
    """[rows] the text of each row, -1 for padding, and the part with which it is left out."""
    rows = [
        torch.tensor([texts.index(s) for s in b.sources]).unsqueeze(1).where(_real(b).cpu(), -1)
        for b in batches
    ]
    text = torch.cat([row.flatten() for row in rows])
    if len(texts) > 1:
        return text, text % FOLDS
    return text, torch.arange(len(text)) * FOLDS // len(text)


def _run(model: Any, batch: Batch) -> None:
    with torch.inference_mode():
        given = {"input_ids": batch.ids, **batch.given}
        model(**{name: value.to(model.device) for name, value in given.items()}, use_cache=False)


@contextmanager
def _watching(pace: Any, wanted: Sequence[str]) -> Iterator[dict[str, _Seen]]:
    """Keep what the wanted layers' experts are given."""
    seen = {name: _Seen() for name in wanted}

    def keep(name: str, run: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        layer = seen.get(name)
        if layer is not None:
            layer.run, layer.weight, layer.device = run, weights.dtype, hidden.device
            layer.hidden.append(hidden.reshape(-1, hidden.shape[-1]).to("cpu", copy=True))
            layer.ids.append(ids.to("cpu", copy=True))
        out: Tensor = run(hidden, ids, weights)
        return out

    undo = pace.replace_experts(keep)
    try:
        yield seen
    finally:
        undo()


class _Rows:
    """The rows that a layer saw, by expert.

    Args:
        seen: what it was given.
        layer: which it is.
        text: [rows] text of each row, -1 for padding.
        part: [rows] part with which it is left out.

    Raises:
        ValueError: if the layer saw other rows than the tokens of the texts.
    """

    def __init__(self, seen: _Seen, layer: LayerIdentity, text: Tensor, part: Tensor) -> None:
        self._seen, self._hidden, self._ids = seen, torch.cat(seen.hidden), torch.cat(seen.ids)
        seen.hidden, seen.ids = [], []
        self._text, self._part, self.hidden = text, part, self._hidden.shape[1]
        if len(self._hidden) != len(text):
            raise ValueError(
                f"layer {layer.name} saw {len(self._hidden)} rows of {len(text)} tokens: allowed "
                "is one a token."
            )

    def of(self, expert: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs and outputs [rows, hidden] of an expert, texts and parts [rows] of the rows."""
        rows = (self._ids == expert).any(1) & (self._text >= 0)
        x = self._hidden[rows]
        return x, self._outputs(x, expert), self._text[rows], self._part[rows]

    def _outputs(self, x: Tensor, expert: int) -> Tensor:
        if len(x) == 0:
            return x
        seen = self._seen
        with torch.inference_mode():
            ids = torch.full((len(x), 1), expert, dtype=torch.int64, device=seen.device)
            ones = torch.ones((len(x), 1), dtype=seen.weight, device=seen.device)
            out: Tensor = seen.run(x.to(seen.device), ids, ones)
        return out.reshape(x.shape).cpu()


def _fit_layer(rows: _Rows, layer: LayerIdentity, rank: int, texts: int) -> LayerCalibration:
    experts = layer.num_experts
    loads, norm = torch.zeros(texts, experts, dtype=torch.int64), torch.zeros(experts)
    # energy [experts] of outputs, and [experts, ridges] of what stand-ins leave of it, held out
    energy = torch.zeros(experts, dtype=torch.float64)
    left = torch.zeros(experts, len(RIDGES), dtype=torch.float64)
    for expert in range(experts):
        x, y, text, part = rows.of(expert)
        loads[:, expert] = torch.bincount(text, minlength=texts)
        if len(y):
            norm[expert] = y.double().norm(dim=1).mean()
        energy[expert], left[expert] = _held_out(x, y, part, rank)
    best = int(left.sum(0).argmin())
    # a stand-in that leaves more of rows it hasn't seen than dropping does is none
    helps = left[:, best] < energy
    saved = torch.where(helps, energy - left[:, best], 0)
    tiny = torch.finfo(torch.float64).tiny
    fits = [
        Regression(*rows.of(expert)[:2]).fit(rank, RIDGES[best]) if helps[expert] else None
        for expert in range(experts)
    ]
    made = [none(rows.hidden) if fit is None else fit for fit in fits]
    return LayerCalibration(
        name=layer.name,
        k=layer.k,
        router=layer.router,
        experts=tuple(layer.experts[expert] for expert in range(experts)),
        ridge=RIDGES[best],
        explained=float(saved.sum() / energy.sum().clamp(min=tiny)),
        bias=torch.stack([fit.bias for fit in made]).float(),
        up=torch.stack([_padded(fit.up, 1, rank) for fit in made]).float(),
        down=torch.stack([_padded(fit.down, 0, rank) for fit in made]).float(),
        mean=torch.stack([fit.mean for fit in made]).float(),
        ranks=torch.tensor([fit.rank for fit in made]),
        loads=loads,
        output_norm=norm,
        explained_by_expert=(saved / energy.clamp(min=tiny)).float(),
    )


def _padded(t: Tensor, dim: int, size: int) -> Tensor:
    """Zeros appended along a dimension, up to a size."""
    missing = list(t.shape)
    missing[dim] = size - missing[dim]
    return torch.cat([t, t.new_zeros(missing)], dim)


def _held_out(x: Tensor, y: Tensor, part: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Energy of an expert's outputs, and [ridges] what is left when each part is left out."""
    energy = y.double().square().sum()
    left = torch.zeros(len(RIDGES), dtype=torch.float64)
    for number in range(FOLDS):
        out = part == number
        if not bool(out.any()):
            continue
        rest = Regression(x[~out], y[~out])
        for index, ridge in enumerate(RIDGES):
            error = y[out].double() - rest.fit(rank, ridge)(x[out].double())
            left[index] += error.square().sum()
    return energy, left
