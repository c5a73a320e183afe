"""Compare what `route` returns with the oracle, every output, exactly where exactness is due."""

from __future__ import annotations

import math
from typing import Any

import torch
from oracle import Expected, route_oracle
from strategies import Case

from paceline import Assignment, route

RELATIVE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-6}


def run(case: Case) -> Assignment:
    """Route the case."""
    return route(case.inputs, case.policy, case.placement)


def listed(assignment: Assignment) -> dict[str, Any]:
    """Everything an assignment holds as plain lists; NaN weights become the string 'nan'."""
    a = assignment
    weights = [["nan" if math.isnan(w) else w for w in row] for row in a.topk_weights.tolist()]
    return {
        "ids": a.topk_ids.tolist(), "weights": weights, "kept": a.kept.tolist(),
        "capacity": a.capacity.tolist(), "before": a.loads_before.tolist(),
        "narrowed": a.max_active_applies.tolist(), "active": a.active_after.tolist(),
        "after": a.loads_after.tolist(), "dropped": int(a.dropped), "extras": int(a.extras),
    }  # fmt: skip


def assert_weights(got: torch.Tensor, want: Expected, k: int) -> None:
    """Bit-equal for genuine slots of tokens that were not rescaled, close for the others."""
    rtol = RELATIVE[got.dtype]
    for t, (row, expected) in enumerate(zip(got.tolist(), want.topk_weights, strict=True)):
        for j, (x, y) in enumerate(zip(row, expected, strict=True)):
            where = f"weight of token {t} slot {j}: {x} for {y}"
            if math.isnan(y):
                assert math.isnan(x), where
            elif (t in want.renormalized or j >= k) and y != 0 and math.isfinite(y):
                assert math.isclose(x, y, rel_tol=rtol, abs_tol=1e-7), where
            elif not (t in want.renormalized and not math.isfinite(y)):
                assert x == y, where


def assert_agrees(case: Case) -> Assignment:
    """Fail unless `route` and the oracle say the same of this case."""
    got = run(case)
    want = route_oracle(case.inputs, case.policy, case.placement)
    T, k = case.inputs.topk_ids.shape
    assert got.topk_ids.dtype == got.capacity.dtype == torch.int64
    assert got.kept.dtype == torch.bool
    assert got.topk_weights.dtype == case.inputs.topk_weights.dtype
    assert got.topk_ids.shape == got.kept.shape == got.topk_weights.shape
    assert got.topk_ids.shape[0] == T
    if T:
        assert got.topk_ids.shape[1] == len(want.topk_ids[0])
    assert got.num_experts == len(want.expert_loads_before)
    assert got.capacity.tolist() == want.capacity
    assert got.loads_before.tolist() == want.loads_before
    assert got.kept.tolist() == want.kept
    assert got.topk_ids.tolist() == want.topk_ids
    assert got.loads_after.tolist() == want.loads_after
    assert got.expert_loads_before.tolist() == want.expert_loads_before
    assert got.expert_loads_after.tolist() == want.expert_loads_after
    assert got.max_active_applies.tolist() == [want.narrowed]
    assert got.active_before.tolist() == want.active_before
    assert got.active_after.tolist() == want.active_after
    assert int(got.tokens_without_expert) == want.tokens_without_expert
    assert got.dropped.shape == got.extras.shape == got.gate_mass_kept.shape == ()
    assert int(got.dropped) == want.dropped
    assert int(got.extras) == want.extras
    assert_weights(got.topk_weights, want, k)
    scores = case.inputs.scores if case.inputs.scores is not None else case.inputs.topk_scores
    measure = case.inputs.topk_weights if scores is None else scores
    if bool((torch.nan_to_num(measure.float(), nan=0.0) >= 0).all()):
        assert math.isclose(float(got.gate_mass_kept), want.gate_mass_kept, rel_tol=1e-5)
    return got
