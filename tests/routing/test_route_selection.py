"""Keeping the best of every group, for few groups (one sort) and for very many (two)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import CapacityPolicy, RoutingInputs, route
from paceline.routing.backends.plain import first_of_each_group as keep_best


@given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([None, 0, 1, 2, 3]))
def test_few_and_very_many_groups_agree_with_sorted(
    seed: int, with_priority: bool, genuine_slots: int | None
) -> None:
    rng = np.random.default_rng(seed)
    tokens, slots, groups = int(rng.integers(0, 12)), 3, 4
    group = rng.integers(0, groups + 1, (tokens, slots))  # the last: no assignment
    capacity = rng.integers(0, 6, (tokens, slots))
    key = rng.choice([0, 1, 2**31, 2**32 - 1], (tokens, slots))
    priority = rng.choice([0, 1, 255, 256], tokens)
    want = np.zeros((tokens, slots), dtype=bool)
    for g in range(groups):
        members = [(t, j) for t in range(tokens) for j in range(slots) if group[t, j] == g]
        members.sort(
            key=lambda m: (
                genuine_slots is not None and m[1] >= genuine_slots,
                priority[m[0]] if with_priority else 0,
                key[m],
                m,
            )
        )
        for rank, member in enumerate(members):
            want[member] = rank < capacity[member]
    for many in (groups, 2**20, 2**22, 2**31 - 1, 2**31, 2**40):
        spread = np.where(group == groups, many, group * (many // groups))
        got = keep_best(
            torch.from_numpy(spread),
            many,
            torch.from_numpy(capacity),
            torch.from_numpy(key),
            torch.from_numpy(priority) if with_priority else None,
            genuine_slots,
        )
        assert got.tolist() == want.tolist(), many


@pytest.mark.parametrize("places", [0, 1, 5])
def test_one_capacity_serves_all(places: int) -> None:
    group = torch.tensor([[0], [0], [1], [2]])
    key = torch.tensor([[5], [4], [9], [0]])
    got = keep_best(group, 2, torch.tensor(places), key)
    assert got.sum() == min(places, 2) + min(places, 1)


def test_many_requests_of_many_experts() -> None:
    """So many pools times units that a group, a priority and a key don't fit one word."""
    tokens, experts = 40_000, 128
    rng = torch.Generator().manual_seed(0)
    scores = torch.rand(tokens, 2, generator=rng)
    inputs = RoutingInputs(
        topk_ids=torch.randint(3, (tokens, 2), generator=rng),
        topk_weights=scores,
        topk_scores=scores,
        token_request=torch.arange(tokens) // 100,
        token_priority=torch.zeros(tokens, dtype=torch.int64),
        num_experts=experts,
    )
    policy = CapacityPolicy(capacity_factor=8, pool="request", min_expert_load=0)
    a = route(inputs, policy)
    assert torch.equal(a.loads_after, torch.minimum(a.loads_before, a.capacity))
    rows = slice(12_300, 12_400)
    alone = RoutingInputs(
        topk_ids=inputs.topk_ids[rows], topk_weights=scores[rows], topk_scores=scores[rows],
        num_experts=experts,
    )  # fmt: skip
    assert torch.equal(route(alone, policy.replace(pool="batch")).kept, a.kept[rows])
