"""Balance figures against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from paceline.analysis.loads import (
    add_loads,
    busiest,
    combine_peaks,
    device_loads,
    peak_to_mean,
    percentile,
    straggler_loss,
    unit_means,
)


def test_peak_to_mean_of_equal_units() -> None:
    assert peak_to_mean([1, 2, 3, 6]) == 2.0  # mean 3
    assert peak_to_mean([5, 5]) == 1.0


def test_unequal_devices_are_compared_with_their_own_share() -> None:
    # 3 experts on two devices: of 12 assignments 8 and 4 are expected.
    assert unit_means(12, [2, 1]) == [8.0, 4.0]
    found = busiest([6, 6], [2, 1])
    assert (found.index, found.load, found.peak_to_mean) == (1, 6, 1.5)


def test_empty_devices_and_idle_layers() -> None:
    assert peak_to_mean([4, 0], [2, 0]) == 1.0
    assert peak_to_mean([0, 0]) == 1.0
    assert busiest([3, 3]).index == 0


@pytest.mark.parametrize(
    ("loads", "sizes"), [([], None), ([1, 2], [1]), ([-1, 3], None), ([1, 1], [0, 0])]
)
def test_bad_loads_are_refused(loads: list[float], sizes: list[int] | None) -> None:
    with pytest.raises(ValueError, match="must"):
        busiest(loads, sizes)


def test_straggler_loss() -> None:
    assert straggler_loss(2.0) == 0.5
    assert straggler_loss(1.0) == 0.0
    assert straggler_loss(0.8) == 0.0  # after drops, relative to the mean before them
    assert straggler_loss(0.0) == 0.0  # nothing was left to do
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="peak_to_mean"):
            straggler_loss(bad)


def test_layers_in_a_row_are_weighted_by_their_work() -> None:
    # Busiest loads 20 and 30 against means 10 and 30 (2 units: 20 and 60 assignments).
    assert combine_peaks([2.0, 1.0], [20, 60]) == pytest.approx(50 / 40)
    assert combine_peaks([3.0], [0]) == 1.0
    with pytest.raises(ValueError, match="one weight per peak"):
        combine_peaks([1.0], [])


def test_device_loads_sum_the_experts() -> None:
    assert device_loads([1, 2, 3, 4], [0, 1, 1, 0], 3) == [5.0, 5.0, 0.0]
    with pytest.raises(ValueError, match="3 entries"):
        device_loads([1], [0, 0, 0], 1)


def test_add_loads() -> None:
    assert add_loads([[1, 2], [3, 4], [5, 6]]) == [9.0, 12.0]


def test_percentiles() -> None:
    assert [percentile([4, 1, 3, 2], p) for p in (0, 50, 100)] == [1, 2.5, 4]
    assert percentile([7], 90) == 7
    with pytest.raises(ValueError, match="percent"):
        percentile([1], 101)
