"""Balance figures against values worked out by hand, on NumPy arrays and torch tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.balance import (
    Peaks,
    Sample,
    combine_peaks,
    peaks,
    percentile,
    sample_of,
    share,
    spread,
    straggler_loss,
    unit_matrix,
)

LOADS = [[[1, 3], [5, 1]], [[4, 0], [0, 0]]]  # [batch, layer, device]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_peaks_are_summed_over_the_axes_that_are_named(make: Any) -> None:
    found = peaks(make(LOADS), ("batch", "layer", "device"))
    assert found.busiest.tolist() == [[3, 5], [4, 0]]
    assert found.mean.tolist() == [[2, 3], [2, 0]]
    assert np.asarray(found.ratio) == pytest.approx(np.array([[1.5, 5 / 3], [2.0, 1.0]]))
    assert found.over("batch").ratio.tolist() == pytest.approx([7 / 4, 5 / 3])
    assert found.over("layer").ratio.tolist() == pytest.approx([8 / 5, 2.0])
    assert found.over("batch", "layer").ratio.item() == pytest.approx(12 / 7)
    assert found.over("layer").axes == ("batch",)
    assert found.over() is found
    assert (found + found).busiest.tolist() == [[6, 10], [8, 0]]
    three = peaks(make([[4, 0, 0]]), ("batch", "device")).best_possible  # 2, 1, 1 at best
    assert three.busiest.tolist() == [2]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20))
def test_units_are_compared_by_their_rows(loads: list[int]) -> None:
    rows = np.array(loads)
    expected = rows.max() / rows.mean() if rows.any() else 1.0
    for table in (rows, torch.tensor(loads)):
        assert peaks(table, ("expert",)).ratio.item() == pytest.approx(expected)


def test_axes_must_be_those_of_the_loads() -> None:
    with pytest.raises(ValueError, match="axes must name 1 axes"):
        peaks(np.ones(3), ("batch", "device"))
    with pytest.raises(ValueError, match=r"axes must be among \('batch',\)"):
        peaks(np.ones((2, 3)), ("batch", "device")).over("layer")


def test_spread_over_batches_with_a_load() -> None:
    found = spread(peaks(np.array(LOADS), ("batch", "layer", "device")))
    assert found.mean == pytest.approx(12 / 7)
    assert (found.p50, found.max) == (pytest.approx(5 / 3), 2.0)
    assert spread(Peaks(("batch",), np.array([3.0]), np.array([2.0])), mean=1.25).mean == 1.25
    assert spread(peaks(np.zeros((2, 3)), ("batch", "device"))).mean is None


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_a_straggler_loss_of_nothing_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="peak_to_mean must be a number >= 0"):
        straggler_loss(bad)


def test_layers_in_a_row_are_weighted_by_their_work() -> None:
    # Busiest loads 20 and 30 against means 10 and 30 (2 units: 20 and 60 assignments).
    assert combine_peaks([2.0, 1.0], [20, 60]) == pytest.approx(50 / 40)
    assert combine_peaks([3.0], [0]) == 1.0
    with pytest.raises(ValueError, match="must have the same length"):
        combine_peaks([1.0], [])


def test_percentiles() -> None:
    assert [percentile([4, 1, 3, 2], p) for p in (0, 50, 100)] == [1, 2.5, 4]
    assert percentile([7], 90) == 7
    for bad in (101, -1, math.nan):
        with pytest.raises(ValueError, match="from 0 to 100"):
            percentile([1], bad)
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)


def test_loads_of_units_and_shares() -> None:
    matrix = unit_matrix((0, 2, 0), 3)
    assert (np.array([[5, 1, 2]]) @ matrix).tolist() == [[7, 0, 1]]
    assert unit_matrix((0, 2, 0), 3) is matrix
    assert (share(3, 12), share(3, 0)) == (0.25, 0.0)


@pytest.mark.parametrize(
    ("experts", "k", "devices"), [(32, 4, 8), (8, 2, 8), (64, 6, 4), (256, 8, 32), (60, 4, 7)]
)
def test_chance_is_that_of_random_routing(experts: int, k: int, devices: int) -> None:
    """The busiest device of routers that prefer nobody, drawn a few hundred times."""
    rng, tokens = np.random.default_rng(0), 400
    sizes = [len(part) for part in np.array_split(np.arange(experts), devices)]
    device = np.repeat(np.arange(devices), sizes)
    peaks = []
    for _ in range(200):
        chosen = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k]
        loads = np.bincount(device[chosen.ravel()], minlength=devices)
        peaks.append(loads.max() / loads.mean())
    sample = sample_of(tokens, 1, k, sizes)
    even = max(sizes) * devices / experts  # uneven devices are uneven without chance
    assert sample.by_chance * even == pytest.approx(
        np.mean(peaks), abs=0.35 * (sample.by_chance - 1)
    )
    more = sample_of(sample.tokens_needed, 1, k, sizes)
    assert (more.too_little, more.by_chance) == (False, pytest.approx(1.1, abs=1e-3))


def test_one_device_needs_no_sample() -> None:
    assert sample_of(1, 1, 2, [8]) == Sample(1, 0, False, 1.0)
