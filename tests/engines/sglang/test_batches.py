"""The tokens of SGLang's forwards, as far as its batches tell them; needs no SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.engines.sglang import tokens
from paceline.engines.sglang.tokens import current_batch, prompt_lengths, request_ids, running


def forward(mode: str, rows: int, **more: Any) -> Any:
    """A ForwardBatch, as far as it is read."""
    values: dict[str, Any] = {
        "forward_mode": SimpleNamespace(
            is_idle=lambda: mode == "idle", is_decode=lambda: mode == "decode"
        ),
        "input_ids": torch.zeros(rows, dtype=torch.int64), "input_embeds": None,
        "num_token_non_padded": None, "seq_lens": None, "extend_seq_lens": None,
        "extend_prefix_lens": None, "rids": None,
    }  # fmt: skip
    return SimpleNamespace(**values | more)


def test_a_chunk_of_prompts_knows_its_requests_and_positions() -> None:
    """Requests of 3 and 2 tokens, of which 0 and 5 were computed before or found in the cache."""
    lengths = {
        "extend_seq_lens": torch.tensor([3, 2], dtype=torch.int32),
        "extend_prefix_lens": torch.tensor([0, 5], dtype=torch.int32),
    }
    with running(forward("extend", 5, rids=["a", "b"], **lengths)):
        batch = current_batch(5)
        assert (batch.tokens, batch.requests, batch.valid) == (5, 2, None)
        assert batch.request.tolist() == [0, 0, 0, 1, 1]
        assert batch.position.tolist() == [0, 1, 2, 5, 6]
        assert batch.decode(prompt_lengths(2)).tolist() == [False] * 5
        assert request_ids() == ["a", "b"]
        assert current_batch(5) is batch  # read once per forward
    assert request_ids() is None


def test_a_decode_step_has_a_row_per_request() -> None:
    with running(forward("decode", 3, seq_lens=torch.tensor([7, 1, 40]))):
        batch = current_batch(3)
        assert batch.request.tolist() == [0, 1, 2]
        assert batch.position.tolist() == [6, 0, 39]
        assert batch.decode(prompt_lengths(3)).tolist() == [True] * 3


def test_padding_is_no_token() -> None:
    padded = forward("decode", 4, seq_lens=torch.ones(4), num_token_non_padded=torch.tensor(3))
    with running(padded):
        batch = current_batch(4)
        assert batch.tokens == 3
        assert batch.valid is not None
        assert batch.valid.tolist() == [True, True, True, False]


def test_forwards_of_nobody_are_not_real() -> None:
    assert not current_batch(9).real  # outside of any forward: a profile, a trial
    with running(forward("idle", 0)):
        assert not current_batch(4).real


def test_a_layer_with_other_rows_is_an_error() -> None:
    one = running(forward("decode", 3, seq_lens=torch.ones(3)))
    with one, pytest.raises(RuntimeError, match="a layer has 2 rows in a forward of 3"):
        current_batch(2)


def test_a_forward_that_tells_no_requests_is_an_error_where_they_are_needed() -> None:
    with running(forward("verify", 6)):
        batch = current_batch(6)
        assert batch.requests == 0
        with pytest.raises(RuntimeError, match="needs the requests"):
            _ = batch.position


def test_a_forward_within_another_gives_it_back() -> None:
    with running(forward("decode", 3, seq_lens=torch.ones(3))):
        outer = current_batch(3)
        with running(forward("decode", 1, seq_lens=torch.ones(1))):
            assert current_batch(1).rows == 1
        assert current_batch(3) is outer
    assert tokens._running.forward is None
