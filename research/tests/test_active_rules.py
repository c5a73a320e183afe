"""research/active_rules.py: published rules give the experts that plain loops give."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DEVICES, HOSTED, K = 3, 4, 3
ORDER = [4, 5, 6, 11, 0, 1, 2, 3, 7, 8, 9, 10]
"""Experts device by device."""
RULES = runpy.run_path(str(Path(__file__).resolve().parents[1] / "active_rules.py"))


def made_step(tokens: int, seed: int) -> Any:
    rng = torch.Generator().manual_seed(seed)
    scores = torch.rand(2, tokens, DEVICES * HOSTED, generator=rng).mul(4).softmax(2)
    weights, ids = scores.topk(K, dim=2)
    return RULES["Step"](ids, weights, scores, DEVICES, torch.tensor(ORDER), None, 2)


def device_of(expert: int) -> int:
    return ORDER.index(expert) // HOSTED


def best_among(step: Any, number: int, read: set[int]) -> list[list[int]]:
    """Each token's best K experts among those that are read, best first."""
    scores = step.scores[number]
    return [sorted(read, key=lambda e: -float(row[e]))[:K] for row in scores]


def chosen_of(step: Any, rule: Any, number: int) -> list[list[int]]:
    ids = rule(step).ids[number].tolist()
    return [[e for e in row if e < step.experts] for row in ids]


def by_device(score: dict[int, float], most: int) -> set[int]:
    """The experts with the highest score of each device, ties to the smaller id."""
    read: set[int] = set()
    for device in range(DEVICES):
        own = [e for e in score if device_of(e) == device]
        read |= set(sorted(own, key=lambda e: (-score[e], e))[:most])
    return read


steps = st.builds(made_step, st.integers(1, 6), st.integers(0, 2**32))


@given(steps, st.integers(1, K))
@settings(max_examples=30)
def test_oea_takes_the_best_k0_of_all_and_fills_up_with_what_is_read(step: Any, k0: int) -> None:
    for number in range(2):
        read = {e for row in step.ids[number].tolist() for e in row[:k0]}
        got = chosen_of(step, RULES["opportunistic"](k0), number)
        assert got == best_among(step, number, read)
        for row, own in zip(got, step.ids[number].tolist(), strict=True):
            assert row[:k0] == own[:k0]


@given(steps, st.integers(1, HOSTED))
@settings(max_examples=30)
def test_lynx_scores_experts_by_bins(step: Any, most: int) -> None:
    for number in range(2):
        score: dict[int, float] = {}
        ids, scores = step.ids[number].tolist(), step.scores[number].double()
        for row, own in zip(scores.tolist(), ids, strict=True):
            for e in own:
                bin_ = max(math.floor(math.log(row[e]) - math.log(row[own[0]])), -RULES["BINS"])
                score[e] = score.get(e, 0.0) + len(ids) ** float(bin_)
        got = chosen_of(step, RULES["remapped"](most), number)
        assert got == best_among(step, number, by_device(score, most))


@given(steps, st.integers(1, HOSTED))
@settings(max_examples=30)
def test_xshare_keeps_first_choices_and_then_the_most_score(step: Any, most: int) -> None:
    for number in range(2):
        first = {row[0] for row in step.ids[number].tolist()}
        total = step.scores[number].double().sum(0).tolist()
        score = {e: total[e] + 1e6 * (e in first) for e in range(step.experts)}
        got = chosen_of(step, RULES["shared"](most), number)
        assert got == best_among(step, number, by_device(score, most))
        for device in range(DEVICES):
            assert len({e for row in got for e in row if device_of(e) == device}) <= most
