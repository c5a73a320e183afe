"""Batches hold what they should, and perplexity equals an independent computation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from paceline.batches import Batch, cut, mixed, separate, tokens_by_source
from paceline.evaluation.perplexity import Losses, batch_losses, change, sequence_losses


def test_cut_keeps_order_and_leaves_the_rest() -> None:
    part = cut("a", list(range(10)), 4)
    assert part.ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cut("a", list(range(10)), 4, limit=1).ids.tolist() == [[0, 1, 2, 3]]
    assert cut("a", [5, 6, 7], 256).ids.tolist() == [[5, 6, 7]]
    for tokens in ([], [1]):
        with pytest.raises(ValueError, match="at least two tokens"):
            cut("a", tokens, 4)


def test_mixed_batches_hold_the_same_sequences() -> None:
    parts = [cut("a", list(range(12)), 3), cut("b", list(range(100, 109)), 3)]
    alone, dealt = separate(parts, 4), mixed(parts, 4)
    assert [set(batch.sources) for batch in alone] == [{"a"}, {"b"}]
    assert dealt[0].sources == ("a", "b", "a", "b")

    def rows(batches: list[Batch]) -> list[tuple[str, tuple[int, ...]]]:
        return sorted(
            (source, tuple(ids.tolist()))
            for batch in batches
            for source, ids in zip(batch.sources, batch.ids, strict=True)
        )

    assert rows(alone) == rows(dealt)
    assert tokens_by_source(parts) == {"a": 12, "b": 9}
    with pytest.raises(ValueError, match="one length"):
        mixed([*parts, cut("c", [1, 2], 3)], 4)


def test_losses_equal_a_plain_numpy_computation() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 6, 11, generator=generator)
    ids = torch.randint(11, (3, 6), generator=generator)
    x, y = logits.double().numpy(), ids.numpy()
    expected = []
    for row in range(3):
        total = 0.0
        for place in range(5):
            shifted = x[row, place] - x[row, place].max()
            total -= shifted[y[row, place + 1]] - np.log(np.exp(shifted).sum())
        expected.append(total)
    assert sequence_losses(logits, ids) == pytest.approx(expected, rel=1e-6)


def test_change_is_paired_and_averages_the_ratios_of_the_texts() -> None:
    base = Losses({"a": [2.0, 4.0], "b": [3.0, 3.0]}, {"a": [2, 2], "b": [3, 3]})
    other = Losses({"a": [2.4, 4.4], "b": [3.0, 3.6]}, {"a": [2, 2], "b": [3, 3]})
    result = change(base, other)
    a, b = math.exp(0.2) - 1, math.exp(0.1) - 1
    assert result.by_domain == pytest.approx({"a": a, "b": b})
    assert result.mean == pytest.approx((a + b) / 2)
    # Differences a token: a 0.2, 0.2 (no spread), b 0 and 0.2 (standard error 0.1).
    assert result.standard_error == pytest.approx(math.exp(0.1) * 0.1 / 2)
    assert change(base, base).mean == 0
    one = Losses({"a": [2.0]}, {"a": [2]})
    assert change(one, one).standard_error is None
    assert change(one, one).standard_error_over_texts is None
    assert base.perplexity()["a"] == pytest.approx(math.exp(6 / 4))
    assert base.predicted_tokens() == 10
    with pytest.raises(ValueError, match="same sequences"):
        change(base, Losses({"a": [1.0]}, {"a": [2]}))


def test_losses_are_of_ids_alone() -> None:
    ids = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="attention_mask"):
        batch_losses(None, Batch(ids, ("a",), {"attention_mask": ids}))
