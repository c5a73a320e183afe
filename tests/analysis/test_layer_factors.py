"""Factors of layers under one bound: the best there are, and never beyond it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.analysis.layer_factors import STEP, share_bound
from paceline.evaluation.sensitivity import Sensitivity
from paceline.policy import CapacityPolicy

FACTORS = (0.5, 0.62, 0.7, 0.9)
POINTS = [0.5 + STEP * step for step in range(41)]


def loss(curve: tuple[float, ...], at: float) -> float:
    """The square of what is linear between the roots."""
    for (low, one), (high, two) in itertools.pairwise(zip(FACTORS, curve, strict=True)):
        if at <= high + 1e-12:
            share = (at - low) / (high - low)
            return ((1 - share) * math.sqrt(one) + share * math.sqrt(two)) ** 2
    return curve[-1]


@st.composite
def convex(draw: st.DrawFn) -> tuple[float, ...]:
    """Losses whose roots fall ever more slowly."""
    slopes = sorted(draw(st.lists(st.floats(0, 10), min_size=3, max_size=3)))
    root = [draw(st.floats(0, 1))]
    for slope, (low, high) in zip(slopes, reversed([*itertools.pairwise(FACTORS)]), strict=True):
        root.append(root[-1] + slope * (high - low))
    return tuple(value**2 for value in reversed(root))


@given(st.lists(convex(), min_size=2, max_size=2), st.integers(0, 40))
def test_no_other_factors_cost_less(curves: list[tuple[float, ...]], steps: int) -> None:
    """Every pair of factors that fits is tried."""
    bound = 0.5 + STEP * steps
    found = share_bound(FACTORS, curves, bound)
    got = sum(loss(curve, min(at, 0.9)) for curve, at in zip(curves, found, strict=True))
    table = [[loss(curve, at) for at in POINTS] for curve in curves]
    best = min(
        table[0][i] + table[1][j] for i, j in itertools.product(range(41), repeat=2)
        if i + j <= 2 * steps
    )  # fmt: skip
    assert got == pytest.approx(best, rel=1e-6, abs=1e-9)


curve = st.lists(st.floats(0, 100), min_size=4, max_size=4)


@given(
    st.lists(st.tuples(curve, st.floats(0.01, 100)), min_size=1, max_size=12), st.floats(0.5, 3.0)
)
def test_the_bound_is_used_up_and_never_exceeded(
    layers: list[tuple[list[float], float]], bound: float
) -> None:
    """Whatever the curves are, rising ones too, and what layers weigh."""
    curves, weights = [c for c, _ in layers], [w for _, w in layers]
    found = share_bound(FACTORS, curves, bound, weights)
    assert min(found) >= 0.5
    mean = np.average(found, weights=weights)
    assert mean == pytest.approx(bound, rel=1e-9)
    names = tuple(str(index) for index in range(len(layers)))
    told = Sensitivity(names, FACTORS, tuple(map(tuple, curves)), tuple(weights), 1)
    assume(bound < 2.9)
    policies = told.share(CapacityPolicy(capacity_factor=bound, unit="expert"))
    rounded = [policy.capacity_factor or math.inf for policy in policies]
    assert bound - 1e-3 < np.average(rounded, weights=weights) <= bound + 1e-9
    assert {policy.unit for policy in policies} == {"expert"}


def test_a_heavy_layer_gets_less_for_the_same_loss() -> None:
    curves = [[4.0, 2.56, 1.96, 0.36]] * 2
    light, heavy = share_bound(FACTORS, curves, 0.7, [1.0, 3.0])
    assert light > 0.7 > heavy


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (((0.5,), [[1.0]], 1.0), "factors"),
        (((0.5, 0.4), [[1.0, 0.0]], 1.0), "factors"),
        (((0.0, 0.4), [[1.0, 0.0]], 1.0), "factors"),
        (((0.5, 0.6), [[1.0]], 1.0), r"losses must be \[layers, 2\], got shape \[1, 1\]"),
        (((0.5, 0.6), [[math.nan, 0.0]], 1.0), "losses"),
        (((0.5, 0.6), [[-1.0, 0.0]], 1.0), "losses"),
        (((0.5, 0.6), [[1.0, 0.0]], 0.4), r"bound must be at least 0.5, got 0.4"),
        (((0.5, 0.6), [[1.0, 0.0]], math.nan), "bound"),
        (((0.5, 0.6), [[1.0, 0.0]], 1.0, [0.0]), "weights"),
        (((0.5, 0.6), [[1.0, 0.0]], 1.0, [1.0, 1.0]), "weights"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[object, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        share_bound(*arguments)  # type: ignore[arg-type]
