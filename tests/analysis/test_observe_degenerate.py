"""Detection of routing unlike real traffic: degenerate routing is named, that of text is not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from real_traces import arrays

from paceline import RoutingInputs
from paceline.analysis.observe import LayerEvidence, constant_norms


def evidence(batches: list[Any], experts: int, scores: Any = None) -> LayerEvidence:
    layer = LayerEvidence(experts, batches[0].shape[1])
    for ids in batches:
        ids = torch.as_tensor(ids)
        weights = torch.ones(ids.shape)
        layer.add(RoutingInputs(ids, weights, scores=scores, num_experts=experts))
    return layer


@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(2, 60),
    experts=st.integers(2, 12),
    padding=st.booleans(),
)
def test_figures_equal_a_plain_count(seed: int, tokens: int, experts: int, padding: bool) -> None:
    rng = np.random.default_rng(seed)
    k = int(rng.integers(1, experts + 1))
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)])
    valid = rng.random(tokens) < 0.7 if padding else np.ones(tokens, bool)
    layer = LayerEvidence(experts, k)
    layer.add(
        RoutingInputs(
            torch.tensor(ids), torch.ones(ids.shape), valid=torch.tensor(valid), num_experts=experts
        )
    )
    sets = [frozenset(row) for row in ids[valid].tolist()]
    same = [a == b for i, a in enumerate(sets) for j, b in enumerate(sets) if i != j]
    found = layer.choices()
    assert found.distinct_choices == len(set(sets))
    assert found.same_choice_chance == pytest.approx(np.mean(same) if same else 0)
    largest = max(Counter(sets).values()) / len(sets) if sets else 0
    assert found.largest_choice_share == pytest.approx(largest)
    assert found.score_spread == (0.0 if k > 1 and sets else None)  # weights are all alike


@pytest.mark.parametrize(("experts", "k"), [(4, 1), (8, 1), (8, 2), (32, 4), (64, 8), (256, 8)])
def test_identical_rows_are_seen_whatever_the_shape(experts: int, k: int) -> None:
    rng = np.random.default_rng(0)
    one = np.tile(rng.permutation(experts)[:k], (64, 1))
    assert evidence([one], experts).identical
    free = np.stack([rng.permutation(experts)[:k] for _ in range(64)])
    assert not evidence([free], experts).identical
    # a favourite is no fault: more than half of all tokens have expert 0 among their k
    favour = np.where(np.arange(experts) == 0, 1.5 * np.log(experts), 0)
    noisy = favour + rng.gumbel(size=(512, experts))
    hot = np.argsort(-noisy, axis=1)[:, :k]
    assert (hot == 0).any(1).mean() > 0.5
    assert not evidence([hot], experts).identical


def test_some_dummy_rows_among_many_are_seen() -> None:
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(64)[:8] for _ in range(1000)])
    ids[rng.random(1000) < 0.5] = np.arange(8)
    assert evidence([ids], 64).identical


def test_few_tokens_and_layers_without_a_choice_say_nothing() -> None:
    assert not evidence([np.tile([1, 2], (8, 1))], 64).identical
    assert not evidence([np.tile([0, 1], (640, 1))], 2).identical
    assert not LayerEvidence(8, 2).identical


def test_flat_scores_are_seen_and_preferences_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    for spread, flat in ((0.0, False), (0.01, True), (0.3, False), (1.5, False)):
        scores = (torch.randn(200, 64, generator=generator) * spread).softmax(-1)
        ids = scores.topk(8).indices
        assert evidence([ids], 64, scores).flat is flat, spread


@pytest.mark.parametrize("name", ["esft_v2lite_intent", "esft_v2lite_law"])
def test_real_traces_are_not_degenerate(name: str) -> None:
    ids = arrays(f"{name}.npz")["topk_ids"]
    for layer in ids:
        for size in (64, 1024, len(layer)):
            batches = np.array_split(layer, max(1, len(layer) // size))
            assert not evidence(batches, 64).identical


def test_real_decode_steps_are_not_degenerate() -> None:
    ids = arrays("gpt_oss_20b_decode.npz")["topk_ids"]
    for layer in ids:  # [sequences, steps, k]; the first step is one token for all sequences
        assert not evidence([layer[:, step] for step in range(layer.shape[1])], 32).identical


def test_norms_tell_the_trained_model() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    from paceline.demo.assets import load_model

    assert not constant_norms(load_model()[0])
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    assert constant_norms(model)
    with torch.no_grad():
        model.model.norm.weight[0] = 1.01
    assert not constant_norms(model)
    assert not constant_norms(torch.nn.Linear(4, 4))
