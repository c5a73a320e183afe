"""EPLB: its published example, and what its description promises, on random tables."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.analysis.eplb import eplb_map, pack, replicate

# the example of the README of github.com/deepseek-ai/EPLB (MIT): 2 layers of 12 experts in 4
# groups, 4 replicas, 8 GPUs on 2 nodes
LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PUBLISHED = [
    (5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1),
    (7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1),
]


@pytest.mark.parametrize("layer", [0, 1])
def test_published_example(layer: int) -> None:
    found = eplb_map(LOADS[layer], num_devices=8, replicas=4, groups=4, nodes=2)
    assert found.slots == PUBLISHED[layer]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.integers(0, 4))
def test_replicas_give_the_smallest_largest_share(loads: list[int], extra: int) -> None:
    """Against every way of giving the extra slots."""
    chosen, copies = replicate(np.array(loads, np.float32), len(loads) + extra)
    assert sorted(chosen.tolist()) == sorted(
        e for e, count in enumerate(copies) for _ in range(count)
    )
    ways = itertools.combinations_with_replacement(range(len(loads)), extra)
    best = min(max(x / (1 + way.count(e)) for e, x in enumerate(loads)) for way in ways)
    reached = max(x / c for x, c in zip(loads, copies, strict=True))
    assert reached == pytest.approx(best, rel=1e-6)


@given(st.integers(1, 4), st.integers(2, 4), st.data())
def test_packing_puts_the_heaviest_where_it_is_lightest(
    packs: int, places: int, data: st.DataObject
) -> None:
    count = packs * places
    weights = data.draw(st.lists(st.integers(0, 999), min_size=count, max_size=count, unique=True))
    packed = pack(np.array(weights, np.float32), packs)
    assert sorted(itertools.chain(*packed)) == list(range(count))
    assert {len(items) for items in packed} == {places}
    where = {item: p for p, items in enumerate(packed) for item in items}
    seen: list[int] = []
    for item in sorted(range(count), key=lambda i: -weights[i]):
        open_packs = [p for p in range(packs) if sum(where[i] == p for i in seen) < places]
        sums = {p: sum(weights[i] for i in seen if where[i] == p) for p in open_packs}
        assert sums[where[item]] == min(sums.values())
        seen.append(item)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(1, 3), st.data())
def test_groups_stay_on_a_node_where_they_divide(
    nodes: int, devices_a_node: int, size: int, data: st.DataObject
) -> None:
    groups, devices = nodes * 2, nodes * devices_a_node
    experts, replicas = groups * size * devices, devices * data.draw(st.integers(0, 2))
    loads = data.draw(st.lists(st.integers(0, 99), min_size=experts, max_size=experts))
    found = eplb_map(loads, devices, replicas, groups, nodes)
    assert found.replicas == replicas
    node_of = [d * nodes // devices for d in found.device_of_slot]
    for group in range(groups):
        members = set(range(group * size * devices, (group + 1) * size * devices))
        assert len({n for n, e in zip(node_of, found.slots, strict=True) if e in members}) == 1


def test_groups_that_do_not_divide_are_ignored() -> None:
    loads = list(range(12))
    assert eplb_map(loads, 4, groups=3, nodes=2) == eplb_map(loads, 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_devices": 3}, "slots per device must be equal"),
        ({"num_devices": 2, "replicas": 1}, "slots per device must be equal"),
        ({"num_devices": 2, "replicas": -2}, "slots per device must be equal"),
        ({"num_devices": 2, "groups": 3}, "groups must divide .* got 3"),
        ({"num_devices": 2, "nodes": 4}, "nodes must divide .* got 4"),
    ],
)
def test_what_eplb_cannot_do(arguments: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        eplb_map([1, 2, 3, 4], **arguments)
