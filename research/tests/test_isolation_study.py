"""research/isolation.py: its middle way gives each request its share, and no unit too much."""

from __future__ import annotations

import math
import runpy
from fractions import Fraction
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import ExpertPlacement, RoutingInputs, route

ROOT = Path(__file__).resolve().parents[2]
STUDY = runpy.run_path(str(ROOT / "research" / "isolation.py"))
EXPERTS, K = 16, 2


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.sampled_from(STUDY["CAPS"]),
    st.integers(0, 2**32),
)
def test_the_middle_way_keeps_every_guaranteed_assignment(
    lengths: list[int], cap: tuple[str, float], seed: int
) -> None:
    unit, factor = cap
    rng = torch.Generator().manual_seed(seed)
    request = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    scores = (torch.randn(len(request), EXPERTS, generator=rng) * 2).softmax(-1)
    weights, ids = scores.topk(K)
    inputs = RoutingInputs(topk_ids=ids, topk_weights=weights, scores=scores, token_request=request)
    placement = ExpertPlacement.contiguous(EXPERTS, STUDY["DEVICES"])
    a = route(inputs, STUDY["policy_of"]("shared", unit, factor, EXPERTS), placement)
    hosted = EXPERTS // STUDY["DEVICES"] if unit == "device" else 1
    places = Fraction(str(factor)) * len(request) * K * hosted / EXPERTS
    for number, tokens in enumerate(lengths):
        mine = request == number
        own = Fraction(str(factor)) * tokens * K * hosted / EXPERTS
        for one in range(EXPERTS // hosted):
            chosen = ids // hosted == one
            kept = int((a.kept & chosen)[mine].sum())
            assert kept >= min(int(chosen[mine].sum()), math.floor(own))
            assert int((a.kept & chosen).sum()) <= math.ceil(places)
