"""Where leaving dropped rows out pays; needs no vLLM."""

from __future__ import annotations

import pytest

from paceline.engines.vllm.savings import LITTLE_WORK, Experts

LARGE, SMALL, AMX = Experts(512, 1024), Experts(192, 64), Experts(512, 1024, "amx")


@pytest.mark.parametrize("experts", [LARGE, SMALL, AMX])
def test_it_pays_beyond_one_share(experts: Experts) -> None:
    """One share decides, whatever the tokens, and it is the one that is told."""
    edge = experts.share_that_pays
    for assignments in (10**6, 10**7):
        for share in (0.0, edge * 0.99, edge * 1.01, 1.0):
            pays = experts.skipping_pays(int(share * assignments), assignments)
            assert pays == (share > edge)


def test_the_measured_cases() -> None:
    """Ratios of compaction to computing all that were measured on one core; see docs/vllm.md."""
    for experts, share, ratio in (
        (SMALL, 0.12, 1.67), (SMALL, 0.40, 1.20), (Experts(256, 256), 0.12, 1.08),
        (Experts(256, 256), 0.28, 0.91), (LARGE, 0.12, 0.94), (LARGE, 0.20, 0.86),
        (Experts(512, 1024, "amx"), 0.10, 1.08), (Experts(512, 1024, "amx"), 0.25, 0.96),
    ):  # fmt: skip
        assert experts.skipping_pays(int(share * 10**6), 10**6) == (ratio < 1)


def test_little_work_is_left_out_as_counted() -> None:
    few = LITTLE_WORK // (SMALL.hidden * SMALL.width)
    assert SMALL.skipping_pays(1, few)
    assert not SMALL.skipping_pays(1, few + 1)
