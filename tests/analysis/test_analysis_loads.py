"""Balance figures against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.analysis.loads import (
    add_loads,
    busiest,
    combine_peaks,
    peak_to_mean,
    percentile,
)
from paceline.balance import straggler_loss


def test_peak_to_mean_of_equal_units() -> None:
    assert peak_to_mean([1, 2, 3, 6]) == 2.0  # mean 3
    assert peak_to_mean([5, 5]) == 1.0


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20))
def test_units_are_compared_by_their_rows(loads: list[int]) -> None:
    found, rows = busiest(loads), np.array(loads)
    assert found.index == int(rows.argmax())
    assert found.load == rows.max()
    assert found.peak_to_mean == pytest.approx(rows.max() / rows.mean() if rows.any() else 1.0)


def test_a_device_without_experts_waits_with_the_others() -> None:
    assert peak_to_mean([4, 0]) == 2.0
    assert peak_to_mean([0, 0]) == 1.0


@pytest.mark.parametrize("loads", [[], [-1, 3], [math.nan, 1], [math.inf, 1]])
def test_bad_loads_are_refused(loads: list[float]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        busiest(loads)


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_a_straggler_loss_of_nothing_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="peak_to_mean"):
        straggler_loss(bad)


def test_layers_in_a_row_are_weighted_by_their_work() -> None:
    # Busiest loads 20 and 30 against means 10 and 30 (2 units: 20 and 60 assignments).
    assert combine_peaks([2.0, 1.0], [20, 60]) == pytest.approx(50 / 40)
    assert combine_peaks([3.0], [0]) == 1.0
    with pytest.raises(ValueError, match="allowed is the same number"):
        combine_peaks([1.0], [])


def test_add_loads() -> None:
    assert add_loads([[1, 2], [3, 4], [5, 6]]) == [9.0, 12.0]


def test_percentiles() -> None:
    assert [percentile([4, 1, 3, 2], p) for p in (0, 50, 100)] == [1, 2.5, 4]
    assert percentile([7], 90) == 7
    for bad in (101, -1, math.nan):
        with pytest.raises(ValueError, match="from 0 to 100"):
            percentile([1], bad)
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)
