"""pool="request" inside vLLM: other requests change nothing, in given chunks and without a cache.

Seen at the kernel, which gets a token's hidden state and the experts that it reaches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kernel_rows
import pytest
import torch
from served_models import make
from torch import Tensor
from vllm_engines import UNBOUND, answers, environment, prompt, start

CALLS: list[tuple[bool, Tensor, Tensor]] = []
"""Per call: is it the first layer's, hidden states [rows, hidden], experts [rows, slots]."""


class WatchedKernel:
    """The kernel, with a record of its arguments."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.weights = kernel, None

    def call_boxed(self, keys: Any, output: Any, hidden: Any, w13: Any, *rest: Any) -> None:
        self.weights = w13.data_ptr() if self.weights is None else self.weights
        first = w13.data_ptr() == self.weights  # the first layer that ever ran
        CALLS.append((first, hidden.clone(), rest[4].clone()))
        self.kernel.call_boxed(keys, output, hidden, w13, *rest)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = make("olmoe", tmp_path_factory.mktemp("olmoe"))
    with pytest.MonkeyPatch.context() as patch, environment(policy=UNBOUND, devices="4"):
        patch.setenv("PACELINE_ACCEPT_SHARED_BUDGET", "1")
        patch.setattr(kernel_rows, "_KERNEL", WatchedKernel(kernel_rows._KERNEL))
        yield start(folder, max_num_batched_tokens=64, enable_prefix_caching=True, block_size=32)


def put(llm: Any, policy: str | None) -> None:
    """Put a policy in force, with an empty cache."""
    llm.collective_rpc("paceline_set", args=(policy,))
    llm.reset_prefix_cache()
    CALLS.clear()


CAP = "capacity_factor=0.6,min_expert_load=0"


@pytest.mark.parametrize("pool", ["request", "batch"])
def test_in_given_chunks_a_request_knows_no_neighbours(llm: Any, pool: str) -> None:
    """A prompt of 100 tokens among others that change, at most 64 tokens a step."""
    ours = prompt(100, 1)
    put(llm, None)
    answers(llm, tokens=1, of=[ours])
    own = torch.cat([hidden for first, hidden, _ in CALLS if first])  # whatever its chunks are
    assert len(own) == 100

    def beside(seed: int) -> tuple[list[Any], Any]:
        put(llm, f"{CAP},pool={pool}")
        others = prompt(30, seed), prompt(20, seed + 1)
        answer = answers(llm, tokens=4, of=[others[0], ours, others[1]])[1]
        reached = []
        for first, hidden, experts in CALLS:
            if not first:
                continue
            far, token = torch.cdist(hidden, own).min(1)
            pairs = zip(token[far < 1e-3].tolist(), experts[far < 1e-3].tolist(), strict=True)
            reached.append(sorted((t, e) for t, row in pairs for e in row))
        return reached, answer

    (one, (words, chances)), (other, (others_words, others_chances)) = beside(2), beside(4)
    dropped = 2 * 100 - sum(map(len, one))
    assert dropped > 20
    assert sum(map(bool, one)) > 1
    if pool == "batch":
        assert one != other
        return
    assert one == other
    assert words == others_words
    assert chances == pytest.approx(others_chances, abs=1e-3)


def test_a_shared_prefix_carries_what_followed_it(llm: Any) -> None:
    """No pool helps: cached keys depend on the tokens behind them. A salt keeps users apart."""
    prefix, question = prompt(32, 1)["prompt_token_ids"], prompt(8, 2)["prompt_token_ids"]
    for policy, salts, alike in (
        (f"{CAP},pool=request", ({}, {}), False),
        (f"{CAP},pool=request", ({"cache_salt": "one"}, {"cache_salt": "other"}), True),
        (None, ({}, {}), True),
    ):
        seen = []  # input of the last layer for the question
        for seed in (3, 4):
            put(llm, policy)
            before = prefix + prompt(24, seed)["prompt_token_ids"]
            answers(llm, tokens=1, of=[{"prompt_token_ids": before, **salts[0]}])
            answers(llm, tokens=1, of=[{"prompt_token_ids": prefix + question, **salts[1]}])
            seen.append(CALLS[-1][1])
        one, other = seen
        assert (one.shape == other.shape and torch.allclose(one, other, atol=1e-5)) == alike
