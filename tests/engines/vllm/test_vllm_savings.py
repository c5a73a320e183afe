"""Where leaving dropped rows out pays; needs no vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.engines.vllm.cpu_experts import LITTLE_WORK, ExpertCost

LARGE, SMALL, AMX = ExpertCost(512, 1024), ExpertCost(192, 64), ExpertCost(512, 1024, "amx")


@pytest.mark.parametrize("experts", [LARGE, SMALL, AMX])
def test_it_pays_beyond_one_share(experts: ExpertCost) -> None:
    """One share decides, whatever the tokens, and it is the one that is told."""
    edge = experts.share_that_pays
    for assignments in (10**6, 10**7):
        for share in (0.0, edge * 0.99, edge * 1.01, 1.0):
            pays = experts.skipping_pays(int(share * assignments), assignments)
            assert pays == (share > edge)


RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "vllm_kernel.json"


def test_the_measured_cases() -> None:
    """Of the two ways it never chooses one that was measured as a sixth slower than the other."""
    cases = json.loads(RESULTS.read_text(encoding="utf-8"))["cases"]
    assert {case["kernel"] for case in cases} == {"amx", "vec"}
    chosen = set()
    for case in cases:
        _, _, hidden, width = case["shape"]
        experts = ExpertCost(hidden, width, case["kernel"])
        pays = experts.skipping_pays(int(case["dropped_share"] * 10**6), 10**6)
        chosen.add(pays)
        assert case["median"] < 7 / 6 if pays else case["median"] > 6 / 7
    assert chosen == {True, False}


def test_little_work_is_left_out_as_counted() -> None:
    few = LITTLE_WORK // (SMALL.hidden * SMALL.width)
    assert SMALL.skipping_pays(1, few)
    assert not SMALL.skipping_pays(1, few + 1)
