"""W0 to W7 against an oracle of who gets what: loads are exact, tokens have k distinct experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.bench.patterns import (
    TITLES,
    Pattern,
    expert_loads,
    named_pattern,
    pattern_workloads,
    source_sizes,
)
from paceline.bench.run import bench_layer
from paceline.bench.workload import Shape
from paceline.placement import ExpertPlacement

TINY = Shape("tiny", 16, 8, 16, 4, 4)
FOUR = ExpertPlacement.contiguous(16, 4)
TOKENS = 40


def counted(number: int, step: int = 0, peak: float = 2.0) -> list[int]:
    """Return the assignments of every expert, counted in what tokens are given."""
    loads = pattern_workloads(Pattern(number, step), TINY, TOKENS, peak, FOUR, sources=4)
    ids = torch.cat([load.gate(load.hidden).topk_ids for load in loads])
    return torch.bincount(ids.flatten(), minlength=16).tolist()


def of_devices(loads: list[int]) -> list[int]:
    return [sum(loads[4 * device : 4 * device + 4]) for device in range(4)]


MEAN = TOKENS * 4  # of a device: 4 sources x 40 tokens x k=4 over 4 devices


def test_every_workload_gives_the_loads_of_its_name() -> None:
    hot, cold = [80] * 4, [27] * 8 + [26] * 4  # 320 of 640 assignments, and 320 for the others
    assert counted(0) == [40] * 16
    assert counted(1) == [160] * 2 + [23] * 12 + [22] * 2
    assert counted(2) == hot + cold
    assert of_devices(counted(2)) == [2 * MEAN, 108, 108, 104]
    spread = counted(3)
    assert sorted(spread) == sorted(hot + cold)
    assert [load for load in spread if load == 80] == spread[0::4]
    assert counted(4) == [40] * 16
    assert counted(5) == [72, 71, 71, 0, *[71, 71, 71, 0] * 2, *[0] * 4]
    for step in range(6):
        assert max(range(4), key=of_devices(counted(6, step)).__getitem__) == step % 4
        assert max(of_devices(counted(7, step))) == (2 * MEAN if step == 3 else MEAN)


def test_ragged_sources_hold_all_tokens() -> None:
    loads = pattern_workloads(Pattern(4), TINY, TOKENS, 2.0, FOUR, sources=4)
    assert [len(load.hidden) for load in loads] == [64, 48, 32, 16]
    assert source_sizes(Pattern(2), 40, 4) == [40] * 4


@given(
    st.integers(0, 7),
    st.integers(0, 9),
    st.integers(1, 4),
    st.integers(1, 60),
    st.floats(1, 4),
    st.lists(st.integers(0, 3), min_size=6, max_size=20),
)
def test_any_placement_is_dealt_exactly(
    number: int, step: int, k: int, tokens: int, peak: float, devices: list[int]
) -> None:
    placement = ExpertPlacement.explicit((*range(4), *devices))
    pattern, experts = Pattern(number, step), placement.num_experts
    shape = Shape("any", 8, 8, experts, k, 4)
    try:
        want = expert_loads(pattern, k, 4 * tokens, peak, placement)
    except ValueError as error:
        assert "can't give an expert" in str(error)  # noqa: PT017
        assume(False)
    assert sum(want) == 4 * tokens * k
    loads = pattern_workloads(pattern, shape, tokens, peak, placement, sources=4)
    ids = torch.cat([load.gate(load.hidden).topk_ids for load in loads])
    assert torch.bincount(ids.flatten(), minlength=experts).tolist() == want
    assert all(len(set(row)) == k for row in ids.tolist())
    again = pattern_workloads(pattern, shape, tokens, peak, placement, sources=4)
    assert torch.equal(ids, torch.cat([load.gate(load.hidden).topk_ids for load in again]))


@pytest.mark.parametrize("number", range(len(TITLES)))
def test_the_benchmark_runs_just_these_rows(number: int) -> None:
    pattern = Pattern(number, 3)
    found = bench_layer(
        shape=TINY, policies=["capacity_factor=1.0,pool=batch,min_expert_load=0"], tokens=TOKENS,
        rounds=1, peak_to_mean=2.0, pattern=pattern,
    )  # fmt: skip
    want = of_devices(expert_loads(pattern, 4, 4 * TOKENS, 2.0, FOUR))
    free, capped = found.policies
    assert free.loads == want
    assert capped.loads == [min(rows, MEAN) for rows in want]
    assert capped.dropped_share == pytest.approx(1 - sum(capped.loads) / sum(want))
    assert found.workload["routing"] == str(pattern)


@pytest.mark.parametrize("text", ["W8", "w", "W6:x", "2", "W-1"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"workload must be W0 to W7, or W6:STEP, got"):
        named_pattern(text)


def test_loads_that_no_routing_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"W1 is not possible .* 160 tokens can't give an expert"):
        expert_loads(Pattern(1), 4, 160, 3.9, FOUR)
    with pytest.raises(ValueError, match="peak_to_mean must be 1 to 4, the devices, got 5"):
        expert_loads(Pattern(2), 4, 160, 5, FOUR)
