"""The placement search against brute force, naive swaps and recorded routing."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest
import real_traces
from hypothesis import given
from hypothesis import strategies as st

from paceline.analysis.eplb import eplb_map
from paceline.analysis.expert_map import ExpertMap
from paceline.analysis.placement_search import (
    MAX_PIECES,
    Shape,
    fit_pieces,
    greedy_map,
    improve,
    search_map,
    spread_copies,
)
from paceline.balance import peaks

FULL = [pytest.param(tokens, marks=pytest.mark.full) for tokens in (64, 1024)]
RECORDED = ("esft_v2lite_intent", "esft_v2lite_law", "gpt_oss_20b_decode")
_EXPERTS = {"esft_v2lite_intent": 64, "esft_v2lite_law": 64, "gpt_oss_20b_decode": 32}


def recorded(name: str) -> tuple[np.ndarray, int]:
    """([layers, tokens, k] choices, experts) of one recorded traffic.

    The sequences of the decode trace run side by side: a step of all of them is 64 tokens.
    """
    ids = real_traces.arrays(f"{name}.npz")["topk_ids"]
    if ids.ndim == 4:  # [layers, sequences, steps, k]
        ids = ids.transpose(0, 2, 1, 3).reshape(len(ids), -1, ids.shape[-1])
    return ids, _EXPERTS[name]


def piece_loads(ids: np.ndarray, experts: int, tokens: int) -> np.ndarray:
    """[layers, pieces, experts] assignments of every `tokens` tokens in turn, the rest left out."""
    pieces = ids.shape[1] // tokens
    cut = ids[:, : pieces * tokens].reshape(len(ids), pieces, -1)
    return np.stack([[np.bincount(piece, minlength=experts) for piece in layer] for layer in cut])


@st.composite
def tables(draw: st.DrawFn, experts: int) -> np.ndarray:
    batches = draw(st.integers(1, 4))
    cells = st.lists(st.integers(0, 9), min_size=experts, max_size=experts)
    return np.array(draw(st.lists(cells, min_size=batches, max_size=batches)))


def objective(loads: np.ndarray, slots: tuple[int, ...], sizes: list[int]) -> float:
    """Mean over batches of the busiest device, one loop after the other."""
    total = 0.0
    for batch in loads:
        start, busiest = 0, 0.0
        for size in sizes:
            busiest = max(busiest, sum(batch[e] / slots.count(e) for e in slots[start:][:size]))
            start += size
        total += busiest
    return total / len(loads)


def sizes_of(slots: int, devices: int) -> list[int]:
    return [slots // devices + (d < slots % devices) for d in range(devices)]


@given(st.integers(1, 7), st.data())
def test_no_swap_helps_and_the_start_was_not_better(experts: int, data: st.DataObject) -> None:
    loads = data.draw(tables(experts))
    devices = data.draw(st.integers(1, experts))
    found = search_map(loads, Shape(experts, devices))
    assert sorted(found.slots) == list(range(experts))
    sizes, fitted = sizes_of(experts, devices), fit_pieces(loads)
    reached = objective(fitted, found.slots, sizes)
    greedy = objective(fitted, greedy_map(loads, devices).slots, sizes)
    assert reached <= greedy + 1e-9
    for a, b in combinations(range(experts), 2):
        other = list(found.slots)
        other[a], other[b] = other[b], other[a]
        assert objective(fitted, tuple(other), sizes) >= reached - 1e-6


def test_near_the_best_of_all_placements_on_small_cases() -> None:
    """Against every placement of 6 experts on 3 devices: swaps end in a local optimum."""
    rng = np.random.default_rng(0)
    gaps, greedy_gaps = [], []
    for _ in range(40):
        loads = rng.multinomial(60, rng.dirichlet(np.full(6, 0.7)), size=3)
        fitted = fit_pieces(loads)
        best = min(objective(fitted, p, [2, 2, 2]) for p in _pairings(6))
        gaps.append(objective(fitted, search_map(loads, Shape(6, 3)).slots, [2] * 3) / best - 1)
        greedy_gaps.append(objective(fitted, greedy_map(loads, 3).slots, [2] * 3) / best - 1)
    assert min(gaps) >= -1e-9
    assert np.mean(gaps) <= 0.01
    assert np.mean(gaps) < np.mean(greedy_gaps) / 2


def _pairings(experts: int) -> list[tuple[int, ...]]:
    """Every way to split experts into pairs, as slots."""
    return [p for p in permutations(range(experts)) if all(p[i] < p[i + 1] for i in (0, 2, 4))]


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.data())
def test_groups_stay_whole(cells: int, groups_a_cell: int, size: int, data: st.DataObject) -> None:
    groups = cells * groups_a_cell
    experts = groups * size * 2
    devices = cells * data.draw(st.sampled_from([1, 2]))
    loads = data.draw(tables(experts))
    on_nodes = search_map(loads, Shape(experts, devices, groups=groups, nodes=cells))
    node_of_group: dict[int, set[int]] = {}
    for expert, device in zip(on_nodes.slots, on_nodes.device_of_slot, strict=True):
        group = expert // (experts // groups)
        node_of_group.setdefault(group, set()).add(device * cells // devices)
    assert all(len(nodes) == 1 for nodes in node_of_group.values())
    wide = min(groups, devices)
    if devices % wide or groups % wide:
        return
    # without nodes the order itself keeps groups together, so that a router can be put into it
    ordered = search_map(loads, Shape(experts, devices, groups=groups))
    blocks = np.array(ordered.slots).reshape(groups, -1) // (experts // groups)
    assert (blocks == blocks[:, :1]).all()


@given(st.integers(2, 6), st.integers(1, 4), st.data())
def test_replicas_have_slots_and_share_the_load(
    experts: int, replicas: int, data: st.DataObject
) -> None:
    loads = data.draw(tables(experts))
    devices = data.draw(st.integers(1, experts + replicas))
    found = search_map(loads, Shape(experts, devices, replicas))
    assert found.replicas == replicas
    assert len(found.slots) == experts + replicas
    assert set(found.slots) == set(range(experts))
    sizes = sizes_of(experts + replicas, devices)
    busiest = found.device_loads(loads).max(1).mean()
    assert busiest == pytest.approx(objective(loads, found.slots, sizes))
    assert found.device_loads(loads).sum() == pytest.approx(loads.sum())


def doubles(found: ExpertMap) -> int:
    """Slots whose expert has an earlier slot on the same device."""
    return len(found.slots) - len(set(zip(found.slots, found.device_of_slot, strict=True)))


@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.data())
def test_an_expert_is_on_a_device_once_wherever_there_are_devices_enough(
    size: int, cells: int, per_cell: int, data: st.DataObject
) -> None:
    experts, devices = size * cells, per_cell * cells
    loads = data.draw(tables(experts))
    step = devices if cells > 1 else 1  # with groups each device has as many slots
    least = -experts % devices if cells > 1 else max(0, devices - experts)
    replicas = data.draw(st.integers(0, experts)) * step + least
    found = search_map(loads, Shape(experts, devices, replicas, groups=cells, nodes=cells))
    places = experts // cells * devices  # each expert on each device of its cell
    assert doubles(found) == max(0, len(found.slots) - places)
    if not doubles(found):  # and no swap that keeps it so helps
        sizes, fitted = sizes_of(len(found.slots), devices), fit_pieces(loads)
        reached = objective(fitted, found.slots, sizes)
        cell = [device * cells // devices for device in found.device_of_slot]
        for a, b in combinations(range(len(found.slots)), 2):
            other = list(found.slots)
            other[a], other[b] = other[b], other[a]
            swapped = ExpertMap(tuple(other), experts, devices)
            if cell[a] == cell[b] and not doubles(swapped):
                assert objective(fitted, tuple(other), sizes) >= reached - 1e-6


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_copies_are_parted_however_heavy_they_are(
    experts: int, devices: int, data: st.DataObject
) -> None:
    counts = st.lists(st.integers(1, devices), min_size=experts, max_size=experts)
    expert_of = np.repeat(np.arange(experts), data.draw(counts))
    weights = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(expert_of),
                                          max_size=len(expert_of))), float)  # fmt: skip
    sizes = sizes_of(len(expert_of), devices)
    bins = spread_copies(weights, sizes, expert_of)
    assert np.bincount(bins, minlength=devices).tolist() == sizes
    assert len(set(zip(expert_of, bins, strict=True))) == len(expert_of)


def test_no_double_in_deepseek_v3s_shape() -> None:
    """256 experts on 32 devices of 9 slots; EPLB as published has doubles here."""
    loads = np.random.default_rng(0).lognormal(0, 1, (6, 256))
    ours = [search_map(layer[None], Shape(256, 32, 32)) for layer in loads]
    assert [doubles(found) for found in ours] == [0] * len(loads)


def peak_to_mean(device_loads: np.ndarray) -> float:
    return float(peaks(device_loads, ("batch", "device")).over("batch").ratio)


def test_an_expert_above_a_devices_share_needs_replicas() -> None:
    loads = [[70, 10, 10, 10]]
    alone = search_map(loads, Shape(4, 2))
    copied = search_map(loads, Shape(4, 2, replicas=2))
    assert peak_to_mean(alone.device_loads(loads)) == 1.6
    assert copied.copies == (2, 2, 1, 1)  # a third copy of the first would lie beside another
    assert peak_to_mean(copied.device_loads(loads)) == 1


def test_many_pieces_are_merged_with_their_neighbours() -> None:
    loads = np.random.default_rng(0).integers(0, 9, (MAX_PIECES * 3 + 5, 4))
    assert len(fit_pieces(loads)) == MAX_PIECES
    assert fit_pieces(loads).sum() == pytest.approx(loads.sum())


@given(st.integers(1, 6), st.data())
def test_damping_keeps_sums(experts: int, data: st.DataObject) -> None:
    loads = data.draw(tables(experts))
    fitted = fit_pieces(loads)
    assert fitted.sum(0) == pytest.approx(loads.sum(0))
    assert fitted.sum(1) == pytest.approx(loads.sum(1))
    assert (fitted >= 0).all()


def test_swaps_stay_in_their_cell() -> None:
    items = np.array([[9.0, 9, 1, 1]])
    start = np.array([0, 1, 2, 3])
    assert improve(items, start, np.array([0, 0, 1, 1])).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((0, 1), r"num_devices must .*got 1"),
        ((4, 5), r"num_devices must .*got 5"),
        ((4, 0), r"num_devices must .*got 0"),
        ((4, 2, -1), r"replicas must .*got -1"),
        ((4, 2, 0, 3), r"groups must .*got 3"),
        ((4, 2, 0, 0), r"groups must .*got 0"),
        ((12, 8, 0, 4, 4), r"num_devices must .*got 8"),
        ((12, 4, 0, 3), r"groups must .*got 3"),
        ((8, 4, 0, 2, 3), r"nodes must .*got 3"),
        ((8, 4, 0, 2, 4), r"groups must .*got 2"),
    ],
)
def test_shapes_that_cannot_be(shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Shape(*shape)


@pytest.mark.parametrize("loads", [[], [[]], [1, 2], [[-1, 2]], [[float("nan"), 1]]])
def test_loads_that_cannot_be(loads: list[object]) -> None:
    with pytest.raises(ValueError, match="loads"):
        search_map(loads, Shape(2, 1))


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("tokens", [256, *FULL])
def test_beats_greedy_and_eplb_on_traffic_not_seen(name: str, tokens: int) -> None:
    """Fitted on the first half of recorded routing, judged on the second, 8 devices."""
    ids, experts = recorded(name)
    half = ids.shape[1] // 2 // 1024 * 1024
    fit, judge = (
        piece_loads(ids[:, :half], experts, 64),
        piece_loads(ids[:, half:], experts, tokens),
    )
    ways = {
        "contiguous": [ExpertMap.contiguous(experts, 8)] * len(fit),
        "greedy": [greedy_map(layer, 8) for layer in fit],
        "eplb": [eplb_map(layer.sum(0), 8) for layer in fit],
        "search": [search_map(layer, Shape(experts, 8)) for layer in fit],
    }
    found = {
        way: float(
            np.mean([peak_to_mean(m.device_loads(x)) for m, x in zip(maps, judge, strict=True)])
        )
        for way, maps in ways.items()
    }
    assert found["search"] < min(found["greedy"], found["eplb"]) < found["contiguous"]
