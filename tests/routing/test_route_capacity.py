"""The capacity is exact: as fractions say it, for any factor a user can write."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import capacity_of

from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs, route
from paceline.routing.limits import capacities, small_ratio

INT64_MAX = 2**63 - 1
MANY = 20 * settings().max_examples
AWKWARD = [0.1 + 0.2, 1e-3, 1.1, 1e30, 1 / 3, 2 / 3, 1.0000000000000002, 5e-324, 1.7e308, 1e18]
factors = st.one_of(
    st.sampled_from(AWKWARD),
    st.floats(1e-6, 1e6),
    st.floats(min_value=5e-324, max_value=1.7e308),
    st.integers(1, 400).map(lambda n: n / 100),
    st.integers(1, 10**9),
    st.builds(lambda n, d: n / 10**d, st.integers(1, 10**17), st.integers(0, 17)),
)


def reported(
    factor: float, tokens: int, k: int, placement: ExpertPlacement, real: int | None = None
) -> list[int]:
    """Capacities that `route` reports for so many tokens, `real` of them valid."""
    ids = torch.zeros((1, k), dtype=torch.uint8).expand(tokens, k)
    inputs = RoutingInputs(
        topk_ids=ids,
        topk_weights=torch.zeros(1, 1).expand(tokens, k),
        valid=None if real is None else torch.arange(tokens) < real,
    )
    policy = CapacityPolicy(capacity_factor=factor, keep="first", min_expert_load=0, mode="shadow")
    return route(inputs, policy, placement).capacity[0].tolist()


@settings(max_examples=MANY)
@given(factors, st.integers(0, 300), st.integers(1, 12), st.data())
def test_the_capacity_is_that_of_fractions(
    factor: float, tokens: int, k: int, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=2, max_size=5).filter(any))
    host = [d for d, n in enumerate(sizes) for _ in range(n)]
    placement = ExpertPlacement.explicit(host, num_devices=len(sizes))
    real = data.draw(st.integers(0, tokens))
    got = reported(factor, tokens, k, placement, real)
    exact = Fraction(str(factor))
    assert got == [capacity_of(exact, real, k, n, len(host)) for n in sizes]


@settings(max_examples=max(20, settings().max_examples // 2))
@given(factors, st.integers(0, 2**20))
def test_the_capacity_of_large_batches_is_that_of_fractions(factor: float, tokens: int) -> None:
    placement = ExpertPlacement.explicit([0, 1, 1], num_devices=3)
    got = reported(factor, 2**20, 1, placement, real=tokens)
    exact = Fraction(str(factor))
    assert got == [capacity_of(exact, tokens, 1, n, 3) for n in (1, 2, 0)]


@settings(max_examples=MANY)
@given(st.fractions(0, 9, max_denominator=10**6), st.integers(1, 60))
def test_the_small_ratio_is_the_next_one_up(ratio: Fraction, order: int) -> None:
    """Of all fractions with a denominator up to `order`, the smallest that is not below."""
    ratio = max(ratio, Fraction(1, 10**6))
    smallest = min(Fraction(math.ceil(ratio * d), d) for d in range(1, order + 1))
    assert Fraction(*small_ratio(ratio, order)) == smallest


@settings(max_examples=MANY)
@given(factors, st.integers(1, 64), st.integers(1, 512))
def test_capacities_are_exact_up_to_the_largest_batch(factor: float, k: int, share: int) -> None:
    ratio = Fraction(str(factor)) * k * share / 512
    tokens = [0, 1, 2, 3, 1000, 2**20 - 1, 2**20, 10**9, 2**31 - 2, 2**31 - 1]
    tokens += [ratio.denominator * n % 2**31 for n in (1, 2, 3, 7)]
    got = capacities(ratio, torch.tensor(tokens)).tolist()
    assert got == [min(math.ceil(ratio * t), INT64_MAX) for t in tokens]


@pytest.mark.parametrize("factor", [*AWKWARD, 0.5, 1.0, 1.25, 2, 3.0])
def test_the_exact_factor_is_the_decimal_that_was_written(factor: float) -> None:
    assert CapacityPolicy(capacity_factor=factor).factor == Fraction(str(factor))


@pytest.mark.parametrize("factor", [None, math.inf])
def test_no_factor_is_no_cap(factor: float | None) -> None:
    policy = CapacityPolicy(capacity_factor=factor)
    assert policy.factor is None
    assert not policy.caps


@pytest.mark.parametrize(
    ("tokens", "minimum", "capped"),
    [(4, 1, True), (3, 1, False), (4, 1.0, True), (5, 1.1, True), (4, 1.1, False), (0, 0, True),
     (1, 0, True), (1, 0.25, True), (1, 0.3, False), (32, "auto", True), (31, "auto", False)],
)  # fmt: skip
def test_the_minimum_load_counts_valid_tokens(
    tokens: int, minimum: float | str, capped: bool
) -> None:
    """With one of four experts a token, the mean load is a quarter of the tokens."""
    inputs = RoutingInputs(
        topk_ids=torch.zeros(tokens + 3, 1, dtype=torch.int64),
        topk_weights=torch.ones(tokens + 3, 1),
        valid=torch.arange(tokens + 3) >= 3,
        token_request=torch.full((tokens + 3,), 5),
        token_source=torch.arange(tokens + 3) % 4,
        num_experts=4,
    )
    for pool in ("batch", "source"):
        policy = CapacityPolicy(
            capacity_factor=0.5, keep="first", pool=pool, min_expert_load=minimum
        )
        a = route(inputs, policy)
        assert bool((a.capacity < INT64_MAX).all()) == capped
        assert bool((a.capacity == INT64_MAX).all()) != capped


def test_the_minimum_load_is_an_exact_decimal() -> None:
    """A mean of exactly 1.1 is not below 1.1; the float quotient 11 * 1 / 10 must not decide."""
    for tokens, experts, minimum in [(11, 10, 1.1), (3, 10, 0.3), (7, 100, 0.07), (57, 100, 0.57)]:
        inputs = RoutingInputs(
            topk_ids=torch.zeros(tokens, 1, dtype=torch.int64),
            topk_weights=torch.ones(tokens, 1),
            num_experts=experts,
        )
        policy = CapacityPolicy(capacity_factor=1, keep="first", min_expert_load=minimum)
        assert (route(inputs, policy).capacity < INT64_MAX).all()
        above = policy.replace(min_expert_load=minimum + 1e-9)
        assert (route(inputs, above).capacity == INT64_MAX).all()


def test_saturated_capacities_cap_nothing() -> None:
    inputs = RoutingInputs(
        topk_ids=torch.zeros(50, 1, dtype=torch.int64),
        topk_weights=torch.ones(50, 1),
        num_experts=4,
    )
    for factor in (1e18, 1e30, 1.7e308):
        a = route(inputs, CapacityPolicy(capacity_factor=factor, keep="last", min_expert_load=0))
        assert a.kept.all()
        assert a.capacity.tolist() == [[capacity_of(Fraction(str(factor)), 50, 1, 1, 4)] * 4]


def test_a_minimum_load_that_nothing_reaches_is_no_cap() -> None:
    inputs = RoutingInputs(
        topk_ids=torch.zeros(9, 1, dtype=torch.int64), topk_weights=torch.ones(9, 1), num_experts=4
    )
    policy = CapacityPolicy(capacity_factor=0.5, keep="first", min_expert_load=1e300)
    assert route(inputs, policy).kept.all()
