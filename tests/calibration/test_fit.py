"""Stand-ins against least squares in NumPy, and what holds of any rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.calibration.fit import ROWS_PER_RANK, Regression, none


def rows(seed: int, n: int, hidden: int, noise: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(2.0, 1.0, (n, hidden)) * np.linspace(0.2, 3, hidden)
    y = np.tanh(x @ rng.normal(size=(hidden, hidden)) / hidden) + noise * rng.normal(size=x.shape)
    return x, y + 5.0


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
    fit = Regression(torch.tensor(x), torch.tensor(y)).fit(rank, ridge)
    allowed = min(rank, n // ROWS_PER_RANK)
    assert fit.rank <= min(allowed, hidden)
    assert all(bool(torch.isfinite(t).all()) for t in (fit.bias, fit.up, fit.down, fit.mean))
    at = rows(seed + 1, 7, hidden)[0]
    got = fit(torch.tensor(at)).numpy()
    if allowed == 0:
        assert fit.rank == 0
        assert (got == 0).all()
    else:
        assert fit.rank == min(allowed, hidden)
        np.testing.assert_allclose(got, oracle(x, y, allowed, ridge, at), rtol=1e-6, atol=1e-7)


def test_without_ridge_and_at_full_rank_it_is_least_squares() -> None:
    x, y = rows(3, 200, 6)
    a = np.hstack([x, np.ones((len(x), 1))])
    want = a @ np.linalg.lstsq(a, y, rcond=None)[0]
    got = Regression(torch.tensor(x), torch.tensor(y)).fit(6, 0.0)(torch.tensor(x))
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-8)


def test_no_map_of_that_rank_fits_better() -> None:
    x, y = (torch.tensor(t) for t in rows(4, 120, 5))
    fit = Regression(x, y).fit(2, 0.2)
    penalty = 0.2 * ((x - x.mean(0)) ** 2).sum() / 5

    def cost(up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        left = y - y.mean(0) - (x - x.mean(0)) @ down.T @ up.T
        return (left**2).sum() + penalty * ((up @ down) ** 2).sum()

    best, rng = cost(fit.up, fit.down), torch.Generator().manual_seed(0)
    for scale in (1e-3, 1e-2, 0.1):
        for _ in range(50):
            moved = [
                t + scale * torch.randn(t.shape, generator=rng).double() for t in (fit.up, fit.down)
            ]
            assert cost(*moved) > best


def test_rows_that_say_nothing_give_no_stand_in() -> None:
    for value in (1.0, 0.1, 1e6 / 3):
        same = torch.full((63, 4), value, dtype=torch.float64)
        other = torch.randn(63, 4, dtype=torch.float64)
        assert Regression(same, other).fit(4, 0.1).rank == 0
        assert Regression(other, same).fit(4, 0.1).rank == 0
    assert Regression(torch.empty(0, 4), torch.empty(0, 4)).fit(4, 0.1).rank == 0
    assert none(4)(torch.ones(3, 4)).abs().max() == 0


def test_rows_that_are_not_finite_are_left_out() -> None:
    x, y = (torch.tensor(t) for t in rows(5, 80, 4))
    want = Regression(x, y).fit(3, 0.1)
    bad_x, bad_y = torch.cat([x, x[:2]]), torch.cat([y, y[:2]])
    bad_x[80, 0], bad_y[81, 1] = torch.nan, torch.inf
    got = Regression(bad_x, bad_y).fit(3, 0.1)
    torch.testing.assert_close(got(x), want(x))


@pytest.mark.parametrize(
    ("rank", "ridge", "said"), [(0, 0.1, "rank=0"), (2, -1.0, "ridge=-1.0"), (2, np.nan, "ridge=")]
)
def test_bad_arguments(rank: int, ridge: float, said: str) -> None:
    x = torch.randn(20, 3)
    with pytest.raises(ValueError, match=said):
        Regression(x, x).fit(rank, ridge)
    with pytest.raises(ValueError, match="x has shape"):
        Regression(x, x[:, :2])
