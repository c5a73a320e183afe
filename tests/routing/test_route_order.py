"""The order of preference, read off by giving one expert one place more each time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracle import random_metric

from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs, route

INF, NAN = math.inf, math.nan


def preference(values: list[float], **fields: Any) -> list[int]:
    """Tokens in the order in which expert 0 keeps them; `values` are scores and weights."""
    tokens = len(values)
    column = torch.tensor(values)[:, None]
    per_token = {name: fields.pop(name) for name in list(fields) if name.startswith("token_")}
    per_call = {name: fields.pop(name) for name in ("layer", "step") if name in fields}
    inputs = RoutingInputs(
        topk_ids=torch.zeros(tokens, 1, dtype=torch.int64),
        topk_weights=column,
        scores=column.expand(tokens, 2),
        **{name: torch.tensor(value) for name, value in per_token.items()},
        **per_call,
    )
    order: list[int] = []
    for places in range(1, tokens + 1):
        policy = CapacityPolicy(
            capacity_factor=round(places * 2 / tokens, 6), min_expert_load=0, **fields
        )
        a = route(inputs, policy)
        assert a.capacity.tolist() == [[places, places]]
        kept = a.kept[:, 0].nonzero()[:, 0].tolist()
        (new,) = set(kept) - set(order)
        assert len(kept) == places
        order.append(new)
    return order


VALUES = [
    NAN, -INF, -0.0, 0.0, -0.0, 1e-38, -1e-38, INF, 0.5, NAN, 0.5, -3.0, -INF, 1e-45, 2.0, -2.0,
]  # fmt: skip
BEST_FIRST = [7, 14, 8, 10, 5, 13, 2, 3, 4, 6, 15, 11, 1, 12, 0, 9]


@pytest.mark.parametrize("keep", ["score", "weight"])
def test_every_kind_of_number_has_its_place(keep: str) -> None:
    """inf, finite, zeros of either sign alike, -inf, NaN; ties to the smaller token."""
    assert preference(VALUES, keep=keep) == BEST_FIRST


def test_nan_of_either_sign_comes_last() -> None:
    negative = torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32).tolist()
    assert preference([*negative, -INF, 0.0], keep="score") == [3, 2, 0, 1]


def test_priority_comes_before_the_metric() -> None:
    order = preference(
        [0.1, 0.9, 0.5, 0.7, 0.3, 0.2, NAN, 0.4], token_priority=[1, 0, 0, -1, 1, -1, 2, 0]
    )
    assert order == [6, 4, 0, 1, 2, 7, 3, 5]


def test_first_and_last_go_by_the_token() -> None:
    values = [0.1, 0.9, 0.5, 0.7]
    assert preference(values, keep="first") == [0, 1, 2, 3]
    assert preference(values, keep="last") == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("seed", "layer", "step"), [(0, 0, 0), (1, 0, 0), (2**32 - 1, 47, 10**6), (-5, 3, 2**31 + 7)]
)
def test_random_goes_by_the_hash(seed: int, layer: int, step: int) -> None:
    hashes = [random_metric(seed, layer, step, rank, 0) for rank in range(16)]
    want = sorted(range(16), key=lambda t: -hashes[t])
    for as_step in (step, torch.tensor(step)):
        got = preference([0.5] * 16, keep="random", seed=seed, layer=layer, step=as_step)
        assert got == want


def test_ties_within_a_token_go_to_the_smaller_slot() -> None:
    """Both choices of a token are on one device with one score."""
    inputs = RoutingInputs(
        topk_ids=torch.tensor([[1, 0], [0, 1]]),
        topk_weights=torch.full((2, 2), 0.5),
        scores=torch.full((2, 4), 0.25),
    )
    placement = ExpertPlacement.contiguous(4, 2)
    kept = []
    for places in (1, 2, 3):
        policy = CapacityPolicy(capacity_factor=places / 2, min_expert_load=0)
        a = route(inputs, policy, placement)
        assert a.capacity.tolist() == [[places, places]]
        kept.append(a.kept.flatten().tolist())
    assert kept == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
    ]


def test_extras_of_one_score_go_to_the_smaller_expert() -> None:
    scores = torch.tensor([[0.5, 0.1, 0.1, 0.1]])
    inputs = RoutingInputs(
        topk_ids=torch.tensor([[0]]), topk_weights=torch.tensor([[0.5]]), scores=scores
    )
    policy = CapacityPolicy(capacity_factor=4, min_expert_load=0, expand="all", fill_to=4)
    assert route(inputs, policy).topk_ids.tolist() == [[0, 1, 2, 3, 4]]
    limited = policy.replace(expand_limit=2)
    assert route(inputs, limited).topk_ids.tolist() == [[0, 1, 2]]
