"""Stand-ins against least squares in NumPy, and what holds of any rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.calibration.fit import (
    CHUNK,
    EXACT,
    ROWS_PER_RANK,
    Moments,
    StandInFit,
    fit,
    merged,
    no_stand_in,
    without,
)


def rows(seed: int, n: int, hidden: int, noise: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(2.0, 1.0, (n, hidden)) * np.linspace(0.2, 3, hidden)
    y = np.tanh(x @ rng.normal(size=(hidden, hidden)) / hidden) + noise * rng.normal(size=x.shape)
    return x, y + 5.0


def fitted(x: object, y: object, rank: int, ridge: float) -> StandInFit:
    return fit(Moments.of(torch.as_tensor(x), torch.as_tensor(y)), rank, ridge)


def oracle(x: np.ndarray, y: np.ndarray, rank: int, ridge: float, at: np.ndarray) -> np.ndarray:
    """Ridge as least squares on penalty rows; the rank by the SVD of what these give."""
    mean, bias, hidden = x.mean(0), y.mean(0), x.shape[1]
    penalty = ridge * ((x - mean) ** 2).sum() / hidden
    a = np.vstack([x - mean, np.sqrt(penalty) * np.eye(hidden)])
    whole = np.linalg.lstsq(a, np.vstack([y - bias, np.zeros((hidden, hidden))]), rcond=None)[0]
    right = np.linalg.svd(a @ whole)[2][:rank]
    return bias + (at - mean) @ whole @ right.T @ right


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 12),
    st.integers(0, 90),
    st.integers(1, 14),
    st.sampled_from([1e-3, 0.1, 1.0, 30.0]),
)
def test_the_fit_is_reduced_rank_ridge_regression(
    seed: int, hidden: int, n: int, rank: int, ridge: float
) -> None:
    x, y = rows(seed, n, hidden)
    got_fit = fitted(x, y, rank, ridge)
    allowed = min(rank, n // ROWS_PER_RANK)
    parts = (got_fit.bias, got_fit.up, got_fit.down, got_fit.mean)
    assert all(bool(torch.isfinite(t).all()) for t in parts)
    at = rows(seed + 1, 7, hidden)[0]
    got = got_fit(torch.tensor(at)).numpy()
    if allowed == 0:
        assert got_fit.rank == 0
        assert (got == 0).all()
    else:
        assert got_fit.rank == min(allowed, hidden)
        np.testing.assert_allclose(got, oracle(x, y, allowed, ridge, at), rtol=1e-6, atol=1e-7)


def test_a_row_that_weighs_twice_is_two_rows() -> None:
    x, y = (torch.tensor(t) for t in rows(6, 90, 4))
    twice = torch.arange(90) < 30
    heavy = fit(Moments.of(x, y, 1 + twice.double()), 2, 0.1)
    double = fit(Moments.of(torch.cat([x, x[twice]]), torch.cat([y, y[twice]])), 2, 0.1)
    torch.testing.assert_close(heavy(x), double(x))


def test_with_next_to_no_ridge_and_at_full_rank_it_is_least_squares() -> None:
    x, y = rows(3, 200, 6)
    a = np.hstack([x, np.ones((len(x), 1))])
    want = a @ np.linalg.lstsq(a, y, rcond=None)[0]
    got = fitted(x, y, 6, 1e-12)(torch.tensor(x))
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-8)


def test_no_map_of_that_rank_fits_better() -> None:
    x, y = (torch.tensor(t) for t in rows(4, 120, 5))
    found = fitted(x, y, 2, 0.2)
    penalty = 0.2 * ((x - x.mean(0)) ** 2).sum() / 5

    def cost(up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        left = y - y.mean(0) - (x - x.mean(0)) @ down.T @ up.T
        return (left**2).sum() + penalty * ((up @ down) ** 2).sum()

    best, rng = cost(found.up, found.down), torch.Generator().manual_seed(0)
    for scale in (1e-3, 1e-2, 0.1):
        for _ in range(50):
            moved = [
                t + scale * torch.randn(t.shape, generator=rng).double()
                for t in (found.up, found.down)
            ]
            assert cost(*moved) > best


def test_rows_that_say_nothing_give_no_stand_in() -> None:
    for value in (1.0, 0.1, 1e6 / 3):
        same = torch.full((63, 4), value, dtype=torch.float64)
        other = torch.randn(63, 4, dtype=torch.float64)
        assert fitted(same, other, 4, 0.1).rank == 0
        assert fitted(other, same, 4, 0.1).rank == 0
    assert fitted(torch.empty(0, 4), torch.empty(0, 4), 4, 0.1).rank == 0
    assert no_stand_in(4)(torch.ones(3, 4)).abs().max() == 0


def test_rows_that_are_not_finite_are_left_out() -> None:
    x, y = (torch.tensor(t) for t in rows(5, 80, 4))
    want = fitted(x, y, 3, 0.1)
    bad_x, bad_y = torch.cat([x, x[:2]]), torch.cat([y, y[:2]])
    bad_x[80, 0], bad_y[81, 1] = torch.nan, torch.inf
    got = fitted(bad_x, bad_y, 3, 0.1)
    torch.testing.assert_close(got(x), want(x))


@pytest.mark.parametrize(
    ("rank", "ridge", "said"),
    [(0, 0.1, "rank must.*got 0"), (2, 0.0, "ridge.*0.0"), (2, np.nan, "ridge.*nan")],
)
def test_bad_arguments(rank: int, ridge: float, said: str) -> None:
    x = torch.randn(20, 3)
    with pytest.raises(ValueError, match=said):
        fitted(x, x, rank, ridge)
    with pytest.raises(ValueError, match="x and y must both have shape"):
        Moments.of(x, x[:, :2])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 30), min_size=1, max_size=5))
def test_moments_of_parts_are_those_of_all_rows(seed: int, sizes: list[int]) -> None:
    x, y = rows(seed, sum(sizes), 4)
    weight = np.random.default_rng(seed).uniform(0.05, 1.05, len(x))
    parts = zip(*(torch.tensor(t).split(sizes) for t in (x, y, weight)), strict=True)
    got = merged(Moments.of(*part) for part in parts)
    assert got.rows == len(x)
    assert got.weight == pytest.approx(weight.sum())
    if len(x):
        mean, bias = (np.average(t, axis=0, weights=weight) for t in (x, y))
        np.testing.assert_allclose(got.mean, mean)
        np.testing.assert_allclose(got.bias, bias)
        a, b = x - mean, y - bias
        assert got.yy == pytest.approx(float((weight @ b**2).sum()))
        np.testing.assert_allclose(got.xx, (a.T * weight) @ a, atol=1e-9)
        np.testing.assert_allclose(got.xy, (a.T * weight) @ b, atol=1e-9)


@pytest.mark.parametrize("exact", [EXACT, 0])
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 30), min_size=2, max_size=5))
def test_moments_without_a_part_are_those_of_the_others(
    exact: int, monkeypatch: pytest.MonkeyPatch, seed: int, sizes: list[int]
) -> None:
    monkeypatch.setattr("paceline.calibration.fit.EXACT", exact)
    x, y = (torch.tensor(t) for t in rows(seed, sum(sizes), 4))
    parts = [Moments.of(*part) for part in zip(x.split(sizes), y.split(sizes), strict=True)]
    want, got = merged(parts[1:]), without(merged(parts), parts[0])
    close = {"rtol": 1e-4, "atol": 1e-3} if exact == 0 else {"rtol": 1e-9, "atol": 1e-9}
    if got is None:
        assert 0 in (parts[0].rows, want.rows) or want.rows == 1
        return
    assert got.rows == want.rows
    for name in ("weight", "mean", "bias", "xx", "xy", "yy"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), **close)


def test_a_difference_that_would_be_rounding_is_not_taken() -> None:
    """Rows of one value each are constant, however unlike the others are."""
    same, others = torch.full((40, 3), 0.1), torch.randn(40, 3) * 1e6
    parts = [Moments.of(others, others), Moments.of(same, same)]
    assert without(merged(parts), parts[0]) is None


@pytest.mark.parametrize("exact", [EXACT, 0])
def test_rows_that_are_all_alike_have_no_stand_in(
    exact: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.calibration.fit.EXACT", exact)
    x = torch.full((1000, 8), 0.1)
    assert fitted(x, torch.randn(1000, 8), 2, 0.1).rank == 0
    assert fitted(torch.randn(1000, 8), x, 2, 0.1).rank == 0


def test_float32_fits_like_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """With inputs of which few directions matter, so that the penalty is all there is elsewhere."""
    x = torch.randn(3000, 12) @ torch.randn(12, 96) * 30 + 5 + 0.01 * torch.randn(3000, 96)
    y = torch.tanh(x @ torch.randn(96, 96) / 300)
    left = []
    for exact, precise in ((EXACT, True), (0, True), (0, False)):
        monkeypatch.setattr("paceline.calibration.fit.EXACT", exact)
        found = fit(Moments.of(x, y), 8, 1e-3, exact=precise)
        left.append(float((y - found(x.to(found.up)).float()).square().sum()))
    assert left[1:] == pytest.approx([left[0]] * 2, rel=1e-3)


def test_products_too_coarse_for_float32_are_factored_in_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(400, 2) @ torch.randn(2, 64) * 1e3
    seen = Moments.of(x, x)
    monkeypatch.setattr("paceline.calibration.fit.EXACT", 0)
    found = fit(seen, 2, 1e-9, exact=False)
    assert found.rank == 2
    assert float((x - found(x.double())).norm() / x.norm()) < 1e-2


def test_distances_are_in_units_of_the_rows_fitted_to() -> None:
    x, y = (torch.tensor(t) for t in rows(7, 400, 6))
    found = fitted(x, y, 4, 0.1)
    seen = (x - found.mean) @ found.down.T
    want = torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(seen.T @ seen / len(x), want, rtol=1e-6, atol=1e-6)


def test_wide_experts_in_float32_and_by_subspace() -> None:
    """Beyond EXACT and CHUNK, and where the subspace is far narrower than the hidden size."""
    rng = torch.Generator().manual_seed(0)
    hidden, rank = EXACT + 8, 8
    x = torch.randn(CHUNK + 100, 40, generator=rng) @ torch.randn(40, hidden, generator=rng) + 3
    y = torch.tanh(x @ torch.randn(hidden, hidden, generator=rng) / hidden) + 1
    seen = Moments.of(x, y)
    a, b = (x - x.mean(0)).double(), (y - y.mean(0)).double()
    penalty = 1e-3 * float(a.square().sum()) / hidden
    u, s, _ = torch.linalg.svd(a, full_matrices=False)
    shrunk = (s / (s.square() + penalty).sqrt()).unsqueeze(1) * (u.T @ b)
    best = float(torch.linalg.svdvals(shrunk)[:rank].square().sum())
    found = fit(seen, rank, 1e-3)
    map_ = (found.up @ found.down).T
    cost = float((b - a @ map_).square().sum() + penalty * map_.square().sum())
    gained = float(b.square().sum()) - cost
    assert found.rank == rank
    assert 0.99 * best <= gained <= best * (1 + 1e-6)
