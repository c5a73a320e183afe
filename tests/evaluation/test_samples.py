"""Paired differences and their standard errors, against NumPy and what must hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.evaluation.samples import difference

FIGURES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 3)), min_size=3, max_size=30
)


@given(FIGURES)
def test_without_clusters_it_is_the_error_of_a_mean(rows: list[tuple[int, int, int]]) -> None:
    base, other, _ = zip(*rows, strict=True)
    found = difference(base, other)
    changes = np.subtract(other, base)
    assert found.mean == pytest.approx(changes.mean())
    assert found.standard_error == pytest.approx(changes.std(ddof=1) / math.sqrt(len(rows)))


@given(FIGURES)
def test_clusters_of_equal_size_are_as_one_sample_each(rows: list[tuple[int, int, int]]) -> None:
    base, other, _ = zip(*rows, strict=True)
    names = list(range(len(rows)))
    single = difference(base, other, names)
    tripled = difference(base * 3, other * 3, names * 3)
    assert tripled.mean == pytest.approx(single.mean)
    assert tripled.standard_error == pytest.approx(single.standard_error)
    assert (tripled.samples, tripled.clusters) == (3 * len(rows), len(rows))


@given(FIGURES)
def test_a_ratio_of_sums_by_the_delta_method(rows: list[tuple[int, int, int]]) -> None:
    base, other, clusters = map(np.array, zip(*rows, strict=True))
    weights = 1 + base
    found = difference(base.tolist(), other.tolist(), clusters.tolist(), weights.tolist())
    mean = (other - base).sum() / weights.sum()
    left = other - base - mean * weights
    sums = np.array([left[clusters == c].sum() for c in np.unique(clusters)])
    assert found.mean == pytest.approx(mean)
    if len(sums) == 1:
        assert found.standard_error is None
    else:
        spread = (sums**2).sum() * len(sums) / (len(sums) - 1)
        assert found.standard_error == pytest.approx(math.sqrt(spread) / weights.sum())


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match="got 1, 2, 1 and 1"):
        difference([1], [1, 2])
    with pytest.raises(ValueError, match="at least 1"):
        difference([], [])
