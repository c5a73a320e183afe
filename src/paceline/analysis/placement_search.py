"""Search for a placement whose busiest device has the fewest rows, batch after batch.

A synchronous layer waits for the busiest device of *each* batch, so the objective is the mean over
batches of the busiest device's rows, not the balance of the sums. Heaviest first into the lightest
device with a free slot gives a start; then swaps of two slots that lower the objective, until there
is none. Nothing is random: the same loads give the same placement. A device holds an expert at most
once wherever there are devices enough: a second copy there takes memory and balances nothing.

What makes it carry over to traffic not seen yet: cut the traffic into many small pieces (64 tokens
did best on recorded routing; a decode step is one piece) and damp what a piece deviates from the
mean, since part of that is chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.analysis.eplb import replicate
from paceline.analysis.expert_map import ExpertMap, Loads, load_table
from paceline.placement import ExpertPlacement

PIECE_TOKENS = 64
"""Tokens of a piece of traffic to fit on, where it can be cut."""

DAMPING = 0.25
"""Share of a piece's deviation from the mean that counts as chance. From 0 to 0.75 the held-out
result moves by 0.2% to 1.3%; 0.25 was within 0.6% of the best on each recorded traffic."""

MAX_PIECES = 512
"""More pieces are merged with their neighbours: the time of a search is bounded."""

_GAIN = 1e-9  # relative; a swap below it is rounding

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """Requirements on the map of one layer.

    Attributes:
        num_devices: devices that share the slots, in order; sizes differ by at most one.
        replicas: slots beyond one per expert.
        groups: expert groups of a group-limited router, consecutive experts.
        nodes: machines that share the devices equally; each hosts whole groups. None: groups stay
            whole on consecutive devices, so that a checkpoint can be put into this order.

    Raises:
        ValueError: if there is no such map.

    >>> Shape(num_experts=8, num_devices=4, groups=2).cells
    2
    """

    num_experts: int
    num_devices: int
    replicas: int = 0
    groups: int = 1
    nodes: int | None = None

    def __post_init__(self) -> None:
        experts, devices = self.num_experts, self.num_devices
        if self.replicas < 0:
            raise ValueError(f"replicas must be at least 0, got {self.replicas}")
        if not 1 <= devices <= experts + self.replicas:
            raise ValueError(
                f"num_devices must be from 1 to {experts + self.replicas} ({experts} experts and "
                f"{self.replicas} replicas), got {devices}"
            )
        if self.groups < 1 or experts % self.groups:
            raise ValueError(f"groups must divide the {experts} experts, got {self.groups}")
        if self.nodes is not None and (self.nodes < 1 or devices % self.nodes):
            raise ValueError(f"nodes must divide the {devices} devices, got {self.nodes}")
        cells = self.cells
        if devices % cells or self.groups % cells:
            raise ValueError(
                f"groups must divide evenly among {devices} devices on {self.nodes or 1} nodes, "
                f"got {self.groups}"
            )
        if cells > 1 and (experts + self.replicas) % devices:
            raise ValueError(
                f"num_devices must divide the {experts} experts and {self.replicas} replicas of a "
                f"router with groups, got {devices}"
            )

    @property
    def cells(self) -> int:
        """Sets of consecutive devices between which no single expert moves, only whole groups.

        Machines; or, where groups must stay whole in order, as many as there are groups, at most
        one per device.
        """
        if self.groups == 1:
            return 1
        return min(self.groups, self.num_devices) if self.nodes is None else self.nodes


def search_map(loads: ArrayLike, shape: Shape) -> ExpertMap:
    """Search the map of one layer with the lowest mean over pieces of the busiest device's rows.

    Args:
        loads: [pieces, experts] assignments of each piece of the traffic.

    Raises:
        ValueError: if loads is not such a table.

    >>> search_map([[5, 1, 1, 5]], Shape(num_experts=4, num_devices=2)).placement.expert_to_device
    (0, 0, 1, 1)
    """
    pieces = fit_pieces(loads)
    experts = _experts_by_cell(pieces, shape)
    slots = _replicated(pieces.sum(0), experts, shape)
    copies = np.bincount(slots, minlength=shape.num_experts)
    items = pieces[:, slots] / copies[slots]  # [pieces, slots] load of each slot
    devices = ExpertPlacement.contiguous(len(slots), shape.num_devices)
    cell_of_device = np.repeat(np.arange(shape.cells), shape.num_devices // shape.cells)
    cell_of_slot = np.repeat(np.arange(shape.cells), len(slots) // shape.cells)
    device_of = np.empty(len(slots), np.int64)
    for cell in range(shape.cells):
        inside, here = cell_of_slot == cell, np.flatnonzero(cell_of_device == cell)
        sizes = [devices.sizes[d] for d in here]
        sums = items[:, inside].sum(0)
        if shape.replicas:
            spread = spread_copies(sums, sizes, slots[inside])
        else:
            spread = heaviest_first(sums, sizes)
        device_of[inside] = here[spread]
    device_of = improve(items, device_of, cell_of_device, slots if shape.replicas else None)
    order = np.lexsort((slots, device_of))
    return ExpertMap(tuple(slots[order].tolist()), shape.num_experts, shape.num_devices)


def greedy_map(loads: ArrayLike, num_devices: int) -> ExpertMap:
    """Place heaviest first alone, by the sums over all batches: where swaps start from.

    Raises:
        ValueError: if loads is not a table [batches, experts].
    """
    table = load_table(loads)
    sizes = ExpertPlacement.contiguous(table.shape[1], num_devices).sizes
    placed = heaviest_first(table.sum(0), sizes)
    order = np.lexsort((np.arange(len(placed)), placed))
    return ExpertMap(tuple(order.tolist()), len(placed), num_devices)


def fit_pieces(loads: ArrayLike) -> Loads:
    """Merge to at most MAX_PIECES pieces and damp them, [pieces, experts]."""
    table = load_table(loads)
    if len(table) > MAX_PIECES:
        starts = np.arange(MAX_PIECES) * len(table) // MAX_PIECES
        table = np.add.reduceat(table, starts, axis=0)
    rows = table.sum(1, keepdims=True)
    # the mean mix of experts, at the size of each piece
    mean = table.sum(0, keepdims=True) * rows / max(float(rows.sum()), 1e-300)
    damped: Loads = (1 - DAMPING) * table + DAMPING * mean
    return damped


def heaviest_first(weights: Loads, sizes: Sequence[int]) -> Ids:
    """Put each item into the lightest bin with a free place, heaviest first, [items] -> [items].

    Ties go to the smaller item and the smaller bin.

    >>> heaviest_first(np.array([1.0, 9.0, 5.0, 5.0]), sizes=[2, 2]).tolist()
    [0, 0, 1, 1]
    """
    free, sums = list(sizes), [0.0] * len(sizes)
    bins = np.empty(len(weights), np.int64)
    for item in np.argsort(-weights, kind="stable"):
        lightest = min((b for b in range(len(free)) if free[b]), key=sums.__getitem__)
        bins[item] = lightest
        free[lightest] -= 1
        sums[lightest] += float(weights[item])
    return bins


def spread_copies(weights: Loads, sizes: Sequence[int], expert_of: Ids) -> Ids:
    """Put slots heaviest first into bins, copies of one expert apart, [slots] -> [slots].

    Where the last places are in bins that hold the expert already, slots are swapped: while an
    expert with at most one slot per bin is twice in one, some swap leaves fewer of such doubles.

    >>> spread_copies(np.array([4.0, 4.0, 1.0, 1.0]), [2, 2], np.array([0, 0, 1, 1])).tolist()
    [0, 1, 0, 1]
    """
    free, sums = list(sizes), np.zeros(len(sizes))
    held = np.zeros((len(sizes), int(expert_of.max()) + 1), np.int64)  # [bins, experts] slots
    bins = np.empty(len(weights), np.int64)
    for item in np.argsort(-weights, kind="stable"):
        places = [b for b in range(len(free)) if free[b]]
        apart = [b for b in places if not held[b, expert_of[item]]]
        lightest = min(apart or places, key=sums.__getitem__)
        bins[item] = lightest
        free[lightest] -= 1
        sums[lightest] += weights[item]
        held[lightest, expert_of[item]] += 1
    doubled = np.flatnonzero(held[bins, expert_of] > 1).tolist()
    while doubled:
        item = doubled.pop()
        here, expert = bins[item], expert_of[item]
        if held[here, expert] < 2:
            continue
        # of each slot: is its expert here as well (1 more double), is it doubled there (1 fewer)
        doubles = (held[here, expert_of] > 0) * 1 - (held[bins, expert_of] > 1)
        swaps = np.flatnonzero((held[bins, expert] == 0) & (doubles <= 0))
        if not len(swaps):
            continue
        moved = weights[swaps] - weights[item]
        busier = np.maximum(sums[here] + moved, sums[bins[swaps]] - moved)
        other = swaps[busier.argmin()]
        there = bins[other]
        for bin_, sign in ((here, 1), (there, -1)):
            sums[bin_] += sign * (weights[other] - weights[item])
            held[bin_, expert_of[other]] += sign
            held[bin_, expert] -= sign
        bins[item], bins[other] = there, here
        doubled.append(int(other))
    return bins


def improve(items: Loads, bin_of: Ids, cell_of_bin: Ids, expert_of: Ids | None = None) -> Ids:
    """Swap pairs of items in bins of one cell while the mean of the fullest bin falls.

    Args:
        items: [pieces, items] load of each item.
        bin_of: [items] where each starts.
        cell_of_bin: [bins] items are swapped inside a cell only.
        expert_of: [items] no swap brings an expert into a bin that has it; None: all differ.
    """
    bin_of = bin_of.copy()
    bins = len(cell_of_bin)
    sums = np.stack([items[:, bin_of == b].sum(1) for b in range(bins)])  # [bins, pieces]
    pairs = [
        (a, b) for a in range(bins) for b in range(a + 1, bins) if cell_of_bin[a] == cell_of_bin[b]
    ]
    current, unchanged = float(sums.max(0).mean()), 0
    while pairs and unchanged < len(pairs):
        for a, b in pairs:
            swap = _best_swap(items, bin_of, sums, a, b, current * (1 - _GAIN), expert_of)
            unchanged += 1
            if swap is not None:
                current, first, second = swap
                moved = items[:, second] - items[:, first]
                sums[a] += moved
                sums[b] -= moved
                bin_of[first], bin_of[second] = b, a
                unchanged = 0
            if unchanged == len(pairs):
                break
    return bin_of


def _best_swap(
    items: Loads,
    bin_of: Ids,
    sums: Loads,
    a: int,
    b: int,
    below: float,
    expert_of: Ids | None,
) -> tuple[float, int, int] | None:
    """Find the best swap below a bound: (objective, item of a, item of b), or None."""
    others = np.delete(sums, [a, b], 0)
    rest = others.max(0) if len(others) else np.zeros(sums.shape[1])
    busy = np.maximum(sums[a], sums[b]) > rest  # only where one of the two is the fullest
    # what no swap of the two can go below: the rest, or both even
    floor = np.maximum(rest, (sums[a] + sums[b]) / 2).mean()
    if not busy.any() or floor >= below:
        return None
    of_a, of_b = np.flatnonzero(bin_of == a), np.flatnonzero(bin_of == b)
    moved = items[:, None, of_b] - items[:, of_a, None]  # [pieces, in a, in b]
    fuller = np.maximum(sums[a, :, None, None] + moved, sums[b, :, None, None] - moved)
    objective = np.maximum(fuller, rest[:, None, None]).mean(0)
    if expert_of is not None:
        same = expert_of[of_a][:, None] == expert_of[of_b]
        objective[same.any(1)[:, None] | same.any(0)] = np.inf
    best = int(objective.argmin())
    if objective.flat[best] >= below:
        return None
    first, second = divmod(best, len(of_b))
    return float(objective.flat[best]), int(of_a[first]), int(of_b[second])


def _experts_by_cell(pieces: Loads, shape: Shape) -> Ids:
    """Divide whole groups among cells, balanced like experts, [cells, experts per cell]."""
    if shape.cells == 1:
        return np.arange(shape.num_experts)[None]
    members = np.arange(shape.num_experts).reshape(shape.groups, -1)
    sums = pieces[:, members].sum(2)  # [pieces, groups]
    sizes = [shape.groups // shape.cells] * shape.cells
    start = heaviest_first(sums.sum(0), sizes)
    cell_of = improve(sums, start, np.zeros(shape.cells, np.int64))
    return np.stack([members[cell_of == cell].ravel() for cell in range(shape.cells)])


def _replicated(sums: Loads, experts: Ids, shape: Shape) -> Ids:
    """Replicate the heaviest experts, as EPLB does, but at most once per device of a cell.

    Returns:
        [slots] experts, cell after cell.
    """
    slots = (shape.num_experts + shape.replicas) // shape.cells
    most = shape.num_devices // shape.cells
    chosen = [here[replicate(sums[here].astype(np.float32), slots, most)[0]] for here in experts]
    return np.concatenate(chosen)
