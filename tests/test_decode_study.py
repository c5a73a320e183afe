"""benchmarks/active_*.py: published rules as plain loops have them, and the demo's picture."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.demo.assets import shipped_decode
from paceline.reporting.quality_figures import decode_figure, decode_words

ROOT = Path(__file__).parent.parent
DEVICES, HOSTED, K = 3, 4, 3
ORDER = [4, 5, 6, 11, 0, 1, 2, 3, 7, 8, 9, 10]
"""Experts device by device."""


def benchmark(name: str) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return runpy.run_path(str(ROOT / "benchmarks" / name))
    finally:
        sys.path.pop(0)


RULES = benchmark("active_rules.py")


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


def test_the_demo_shows_what_was_measured() -> None:
    shipped, made = shipped_decode(), benchmark("active_experts.py")
    assert shipped is not None
    measured = (ROOT / "benchmarks" / "results" / "active_experts.json").read_text("utf-8")
    assert shipped == made["shipped"](json.loads(measured)), (
        "run python benchmarks/active_experts.py --ship"
    )
    figure = decode_figure(shipped)
    batches = {point["batch"] for point in shipped["points"]}
    assert len(figure["data"]) == 3 * len(batches)
    shown = {(trace["name"], x) for trace in figure["data"] for x in trace["x"]}
    assert len(shown) == len(shipped["points"])


def test_the_tables_of_the_page_are_of_the_results() -> None:
    made = benchmark("active_tables.py")
    text = (ROOT / "docs" / "decode.md").read_text(encoding="utf-8")
    assert text.count("<!-- end of ") == len(made["tables"]())
    assert made["page"](text) == text, "run python benchmarks/active_tables.py --write"


def test_words_name_the_deepest_cut_within_half_a_percent() -> None:
    point = {"batch": 4, "stand_ins": True, "placed": False, "read_before": 3.0}
    points = [
        {**point, "max_active": 3, "read": 2.9, "change": 0.001},
        {**point, "max_active": 2, "read": 2.0, "change": 0.004},
        {**point, "max_active": 1, "read": 1.0, "change": 0.02},
        {**point, "max_active": 2, "read": 2.0, "change": 0.009, "stand_ins": False},
    ]
    (said,) = decode_words({"experts_a_device": 4, "points": points})
    assert "max_active=2" in said
    assert "2.00 of its 4 experts, not 3.00 (33% fewer)" in said
    assert "+0.40% perplexity with stand-ins, +0.90% without" in said
    assert decode_words({"experts_a_device": 4, "points": points[2:3]}) == []
    placed = {**point, "max_active": 2, "read": 2.0, "read_before": 2.8, "change": 0.002}
    points.append({**placed, "placed": True})
    (said,) = decode_words({"experts_a_device": 4, "points": points})
    assert "not 3.00 (33% fewer), for +0.20% perplexity with stand-ins and the experts" in said
    assert said.endswith("placed, +0.90% with neither.")


@pytest.fixture(scope="module")
def counted() -> Any:
    """A model of the timings, and its counter."""
    made = benchmark("decode_models.py")
    shape = made["Shape"]("small", 32, 16, 8, 2, 4)
    return made["random_model"](shape, 2, torch.float32), made["WeightsRead"]


def test_weights_read_are_counted_below_the_engine(counted: Any) -> None:
    model, counter = counted
    ids = torch.arange(3).unsqueeze(1)
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
        for layer in model.model.layers
    ]
    with torch.no_grad(), counter(model) as read:
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    wanted = [len(torch.unique(found)) for found in chosen]
    assert [int(found.sum()) for found in read.experts.values()] == wanted
    expert = 3 * 32 * 16 * 4
    attention, router, head = 4 * 32 * 32 * 4, 8 * 32 * 4, 512 * 32 * 4
    assert read.bytes == sum(wanted) * expert + 2 * (attention + router) + head
