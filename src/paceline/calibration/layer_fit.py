"""Fit of one layer: the stand-ins of its experts, judged on texts that were left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.analysis.placement_search import PIECE_TOKENS, Shape, search_map
from paceline.calibration.fit import (
    ITERATIONS,
    Moments,
    StandInFit,
    fit,
    fit_log,
    merged,
    no_stand_in,
    without,
)
from paceline.calibration.rows import CAPS, ExpertRows, Rows, drop_weights
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.stand_ins.calibration_file import LayerCalibration

RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
"""Candidates, of which the best on rows that were left out is taken, one per layer."""

RIDGE_EXPERTS = 8
"""Experts of a layer, evenly spaced, on which ridges are compared."""

DEVICES = 8
"""Default number of devices for a per-device cap."""

FOLDS = 4
"""Parts that are left out in turn: whole texts, or parts of the only text."""

ROUGH_ROWS = 2048
"""Rows of an expert that the first of its fits sees, at most: it only guesses what caps drop."""

TIMES = 2
"""Fits per expert: the second one weighs rows by the caps' drops, which the first one predicts."""


def fit_layer(
    rows: Rows,
    rank: int,
    texts: int,
    devices: int | None,
    step: Callable[[], None],
    caps: Sequence[CapacityPolicy] = CAPS,
) -> LayerCalibration:
    """Fit a layer's stand-ins, and a placement if asked for.

    Args:
        rows: of the layer.
        rank: of a stand-in, at most.
        texts: number of texts.
        devices: to place experts on; None: no placement is searched.
        step: called `TIMES` times per expert.
        caps: that the stand-ins are for.
    """
    layer, hidden = rows.layer, rows.hidden
    count = layer.num_experts
    placement = () if devices is None else _placement(rows, devices)
    placements = [ExpertPlacement.contiguous(count, min(count, devices or DEVICES))]
    if placement:
        placements.append(ExpertPlacement.explicit(placement))
    rows.weight = drop_weights(rows.ids, rows.metric, rows.sizes, caps, placements)
    ridge = _best_ridge(rows, rank)
    metric = rows.combine.float() * _expected(rows, rank, ridge, step)
    rows.weight = drop_weights(rows.ids, metric, rows.sizes, caps, placements)
    bias, mean = torch.zeros(count, hidden), torch.zeros(count, hidden)
    up = torch.zeros(count, hidden, rank, dtype=torch.bfloat16)
    down = torch.zeros(count, rank, hidden, dtype=torch.bfloat16)
    ranks = torch.zeros(count, dtype=torch.int64)
    loads = torch.zeros(texts, count, dtype=torch.int64)
    norm, residual, log = torch.zeros(3, count)
    slope = torch.zeros(count, hidden, dtype=torch.bfloat16)
    # of the outputs, and of what is left after stand-ins that were fitted to other texts
    energy, left = torch.zeros(2, texts, count, dtype=torch.float64)
    for expert in range(count):
        seen = rows.of(expert)
        loads[:, expert] = torch.bincount(seen.text, minlength=texts)
        parts = _moments(seen)
        whole = merged(parts)
        energy[:, expert] = _by_text(seen.y, seen, texts)
        found = fit(whole, rank, ridge)
        for out, rest in _each_left_out(parts, whole):
            these, judged = _rows_of(seen, out), fit(rest, rank, ridge, exact=False)
            left[:, expert] += _by_text(_left(these, judged), these, texts)
        # a stand-in that leaves more of rows it hasn't seen than dropping does is none
        if found.rank == 0 or left[:, expert].sum() >= energy[:, expert].sum():
            left[:, expert], found = energy[:, expert], no_stand_in(hidden)
        if len(seen.x):
            of_found = _left(seen, found)
            norm[expert] = _mean_norm(seen.y, seen.weight)
            residual[expert] = _mean_norm(of_found, seen.weight)
            log[expert], slope[expert] = fit_log(whole, seen.x, of_found.norm(dim=1), seen.weight)
        bias[expert], mean[expert], ranks[expert] = found.bias, found.mean, found.rank
        up[expert, :, : found.rank], down[expert, : found.rank] = found.up, found.down
        step()
    return LayerCalibration(
        name=layer.name,
        k=layer.k,
        router=layer.router,
        experts=tuple(layer.experts[expert] for expert in range(count)),
        ridge=ridge,
        explained=float(_share(energy.sum(), left.sum())),
        explained_by_text=tuple(_share(energy.sum(1), left.sum(1)).tolist()),
        placement=placement,
        bias=bias,
        up=up,
        down=down,
        mean=mean,
        ranks=ranks,
        loads=loads,
        output_norm=norm,
        residual_norm=residual,
        residual_log=log,
        residual_slope=slope,
        explained_by_expert=_share(energy.sum(0), left.sum(0)).float(),
    )


def _expected(rows: Rows, rank: int, ridge: float, step: Callable[[], None]) -> Tensor:
    """Estimate the norm of output minus stand-in per assignment: [rows, k]."""
    expected = torch.zeros(rows.ids.shape)
    for expert in range(rows.layer.num_experts):
        seen = rows.of(expert, ROUGH_ROWS)
        whole = Moments.of(seen.x, seen.y, seen.weight)
        left = _left(seen, fit(whole, rank, ridge, exact=False)).norm(dim=1)
        constant, slope = fit_log(whole, seen.x, left, seen.weight)
        chosen, x = rows.ids == expert, rows.inputs(expert).float()
        norms = (constant + (x - whole.mean.float()) @ slope.float()).exp()
        own = torch.zeros(len(chosen)).masked_scatter(chosen.any(1), norms)
        expected = torch.where(chosen, own.unsqueeze(1), expected)
        step()
    return expected


def _best_ridge(rows: Rows, rank: int) -> float:
    count = rows.layer.num_experts
    some = min(count, RIDGE_EXPERTS)
    left = torch.zeros(len(RIDGES), dtype=torch.float64)
    for expert in (index * count // some for index in range(some)):
        seen = rows.of(expert)
        parts = _moments(seen)
        for out, rest in _each_left_out(parts, merged(parts)):
            these = _rows_of(seen, out)
            for index, ridge in enumerate(RIDGES):
                found = fit(rest, rank, ridge, ITERATIONS // 2, exact=False)
                left[index] += _by_text(_left(these, found), these, 1 << 16).sum()
    return RIDGES[int(left.argmin())]


def _moments(seen: ExpertRows) -> list[Moments]:
    """Return the moments of each part."""
    parts = (_rows_of(seen, number) for number in range(FOLDS))
    return [Moments.of(part.x, part.y, part.weight) for part in parts]


def _each_left_out(parts: list[Moments], whole: Moments) -> list[tuple[int, Moments]]:
    """Pair every part that has rows with the moments of all others."""
    return [
        (out, without(whole, own) or merged(parts[:out] + parts[out + 1 :]))
        for out, own in enumerate(parts)
        if own.rows
    ]


def _rows_of(seen: ExpertRows, part: int) -> ExpertRows:
    chosen = seen.part == part
    return ExpertRows(*(values[chosen] for values in seen))


def _left(seen: ExpertRows, found: StandInFit) -> Tensor:
    """Return the [rows, hidden] outputs minus the stand-in's."""
    x, y = seen.x.float(), seen.y.float()
    if found.rank == 0:
        return y
    mean, down, up, bias = (t.float() for t in (found.mean, found.down, found.up, found.bias))
    left: Tensor = y - (bias + (x - mean) @ down.T @ up.T)
    return left


def _by_text(values: Tensor, seen: ExpertRows, texts: int) -> Tensor:
    """Sum weighted |values|^2 [rows, hidden] by text: [texts]; rows not finite are left out."""
    squares = values.double().square().sum(1)
    squares = torch.where(torch.isfinite(squares), squares * seen.weight, 0)
    return torch.zeros(texts, dtype=torch.float64).index_add(0, seen.text, squares)


def _mean_norm(values: Tensor, weight: Tensor) -> float:
    norms = values.double().norm(dim=1)
    finite = torch.isfinite(norms)
    norms, weight = norms[finite], weight[finite].double()
    return float(norms @ weight / weight.sum()) if len(norms) else 0.0


def _share(energy: Tensor, left: Tensor) -> Tensor:
    """Return the share of the energy explained; negative where dropping would leave less."""
    return (energy - left) / energy.clamp(min=torch.finfo(torch.float64).tiny)


def _placement(rows: Rows, devices: int) -> tuple[int, ...]:
    """Search the device of each expert on pieces of the texts: [E]."""
    experts = rows.layer.num_experts
    piece = torch.arange(len(rows.ids)) // PIECE_TOKENS
    pieces = int(piece[-1]) + 1
    chosen = (rows.ids >= 0) & (rows.ids < experts)  # the others are no experts
    bins = torch.where(chosen, rows.ids.long() + experts * piece.unsqueeze(1), pieces * experts)
    loads = torch.bincount(bins.flatten(), minlength=pieces * experts + 1)[:-1]
    found = search_map(loads.view(pieces, experts).numpy(), Shape(experts, devices))
    return found.placement.expert_to_device
