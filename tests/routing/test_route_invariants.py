"""What must hold of any routing call, said without the oracle, as docs/method.md has it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from agreement import listed, run
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import ID_DTYPES, Case, cases

from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs, route

INT64_MAX = 2**63 - 1
PER_TOKEN = [
    "topk_ids", "topk_weights", "scores", "topk_scores", "valid",
    "token_source", "token_request", "token_priority", "token_decode",
]  # fmt: skip


def with_inputs(case: Case, **changes: Any) -> Case:
    """The case with some inputs replaced."""
    return Case(dataclasses.replace(case.inputs, **changes), case.policy, case.placement)


def with_policy(case: Case, **changes: Any) -> Case:
    """The case with some policy fields replaced."""
    if changes.get("expand", "") is None:
        changes.update(expand_limit=None, max_experts=None)
    return Case(case.inputs, case.policy.replace(**changes), case.placement)


def take_rows(case: Case, rows: torch.Tensor) -> Case:
    """The case with these rows only, in this order."""
    chosen = {}
    for name in PER_TOKEN:
        value = getattr(case.inputs, name)
        chosen[name] = None if value is None else value[rows]
    norms = case.inputs.expert_norms
    if norms is not None and norms.dim() == 2:
        chosen["expert_norms"] = norms[rows]
    if chosen["scores"] is None:
        chosen["num_experts"] = run(case).num_experts
    return with_inputs(case, **chosen)


def genuine(case: Case, num_experts: int) -> torch.Tensor:
    """[tokens, k] bool: the assignments of the model itself."""
    ids = case.inputs.topk_ids.long()
    inside = (ids >= 0) & (ids < num_experts)
    return inside if case.inputs.valid is None else inside & case.inputs.valid[:, None]


@given(cases())
def test_1_no_unit_exceeds_its_capacity(case: Case) -> None:
    a = run(with_policy(case, mode="enforce"))
    assert (a.loads_after <= a.capacity).all()
    assert a.loads_after.sum() == a.kept.sum()


@given(cases(expansion=False))
def test_1_ties_neither_exceed_nor_waste_the_capacity(case: Case) -> None:
    a = run(case)
    assert torch.equal(a.loads_after, torch.minimum(a.loads_before, a.capacity))


@pytest.mark.parametrize("off", [{"capacity_factor": None}, {"capacity_factor": float("inf")}])
@given(case=cases(expansion=False))
def test_2_without_a_cap_the_model_has_its_way(off: dict[str, Any], case: Case) -> None:
    free = with_policy(case, **off)
    a = run(free)
    real = genuine(case, a.num_experts)
    assert torch.equal(a.kept, real)
    assert torch.equal(a.topk_ids, torch.where(real, case.inputs.topk_ids.long(), a.num_experts))
    given_weights = torch.where(real, case.inputs.topk_weights, 0)
    torch.testing.assert_close(a.topk_weights, given_weights, rtol=0, atol=0, equal_nan=True)
    assert (a.capacity == INT64_MAX).all()
    assert int(a.dropped) == 0


@given(cases(expansion=True), st.sampled_from([{"capacity_factor": None}, {"mode": "observe"}]))
def test_2_without_a_cap_nothing_is_expanded(case: Case, off: dict[str, Any]) -> None:
    a = run(with_policy(case, **off))
    k = case.inputs.topk_ids.shape[1]
    assert torch.equal(a.kept[:, :k], genuine(case, a.num_experts))
    assert not a.kept[:, k:].any()
    assert int(a.extras) == 0


@given(cases(capacity_factor=1e-3, min_expert_load=10**6))
def test_2_below_the_minimum_load_nothing_changes(case: Case) -> None:
    a = run(case)
    assert torch.equal(a.loads_before, a.loads_after)
    assert (a.capacity == INT64_MAX).all()
    assert int(a.dropped) == int(a.extras) == 0


@given(cases(expand_rule="fill", mode="enforce"))
def test_3_units_within_capacity_lose_nothing(case: Case) -> None:
    a = run(case)
    k = case.inputs.topk_ids.shape[1]
    within = run(with_policy(case, expand=None))
    assert torch.equal(a.kept[:, :k], within.kept)  # extras take free places only
    over = torch.clamp(a.loads_before - a.capacity, min=0)
    assert int(a.dropped) == int(over.sum())


@given(cases(expansion=True, plain=True, expand_rule="fill", mode="enforce", min_expert_load=0))
def test_3_extras_fill_no_unit_beyond_fill_to(case: Case) -> None:
    a = run(case)
    k = case.inputs.topk_ids.shape[1]
    ceiling = run(with_policy(case, expand=None, capacity_factor=case.policy.fill_to)).capacity
    genuine_after = run(with_policy(case, expand=None)).loads_after
    assert (a.loads_after <= torch.maximum(genuine_after, ceiling)).all()
    if case.policy.max_experts is not None:
        assert (a.kept.sum(1) <= max(k, case.policy.max_experts)).all()


@given(cases(), st.data())
def test_5_padding_changes_no_real_row(case: Case, data: st.DataObject) -> None:
    """Rows of rubbish at any place, marked as padding, change nothing for the others."""
    T = case.inputs.topk_ids.shape[0]
    extra = data.draw(st.integers(1, 6))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    real = torch.from_numpy(np.sort(rng.permutation(T + extra)[:T]))
    old = case.inputs
    rubbish = {
        "topk_ids": [0, 1, 255 if old.topk_ids.dtype == torch.uint8 else -1],
        "topk_weights": [float("nan"), 1.0, float("inf")],
        "scores": [float("nan"), float("inf"), 1.0],
        "topk_scores": [float("nan"), float("inf"), 1.0],
        "valid": [False],
        "token_source": [-1, 0, 10**6],
        "token_request": [-(10**15), 0, 10**15],
        "token_priority": [127, 0],
        "token_decode": [True, False],
        "expert_norms": [float("nan"), float("inf"), 1.0],
    }
    padded: dict[str, Any] = {}
    for name, junk in rubbish.items():
        value = getattr(old, name)
        if name == "valid" and value is None:
            value = torch.ones(T, dtype=torch.bool)
        if value is not None and (name != "expert_norms" or value.dim() == 2):
            shape = (T + extra, *value.shape[1:])
            padded[name] = torch.from_numpy(rng.choice(junk, size=shape)).to(value.dtype)
            padded[name][real] = value
    a, b = run(case), run(with_inputs(case, **padded))
    assert torch.equal(b.kept[real], a.kept)
    assert torch.equal(b.topk_ids[real], a.topk_ids)
    torch.testing.assert_close(b.topk_weights[real], a.topk_weights, rtol=0, atol=0, equal_nan=True)
    fake = torch.ones(T + extra, dtype=torch.bool)
    fake[real] = False
    assert not b.kept[fake].any()
    assert (b.topk_ids[fake] == b.num_experts).all()
    assert (b.topk_weights[fake] == 0).all()
    pools = a.loads_before.shape[0]
    for name in ("loads_before", "loads_after", "capacity"):
        assert torch.equal(getattr(b, name)[:pools], getattr(a, name)), name
    assert int(b.dropped) == int(a.dropped)
    assert int(b.extras) == int(a.extras)


@given(cases())
def test_5_a_mask_of_only_real_rows_is_no_mask(case: Case) -> None:
    T = case.inputs.topk_ids.shape[0]
    masked = with_inputs(case, valid=torch.ones(T, dtype=torch.bool))
    assert listed(run(masked)) == listed(run(with_inputs(case, valid=None)))


@given(cases())
def test_5_a_batch_of_only_padding_gets_nothing(case: Case) -> None:
    T = case.inputs.topk_ids.shape[0]
    a = run(with_inputs(case, valid=torch.zeros(T, dtype=torch.bool)))
    assert not a.kept.any()
    assert (a.topk_ids == a.num_experts).all()
    assert (a.topk_weights == 0).all()
    assert int(a.dropped) == 0
    assert float(a.gate_mass_kept) == 1.0


@given(cases())
def test_6_same_inputs_same_result(case: Case) -> None:
    before = {n: v.clone() for n, v in vars(case.inputs).items() if isinstance(v, torch.Tensor)}
    first = listed(run(case))
    assert listed(run(case)) == first
    for name, value in before.items():  # and the inputs are left alone
        now = getattr(case.inputs, name)
        assert torch.equal(now, value) or now.isnan().any(), name


@given(cases())
def test_6_the_index_dtype_does_not_matter(case: Case) -> None:
    E = run(case).num_experts
    ids = case.inputs.topk_ids.long()
    inside = torch.where((ids >= 0) & (ids < E), ids, E)  # what every dtype can hold
    results = [listed(run(with_inputs(case, topk_ids=inside.to(dtype)))) for dtype in ID_DTYPES]
    assert all(r == results[0] for r in results)


@given(cases())
def test_6_strides_do_not_matter(case: Case) -> None:
    strided = {}
    for name in PER_TOKEN:
        value = getattr(case.inputs, name)
        if value is not None:
            strided[name] = torch.stack([value, value], -1).unbind(-1)[0]
    assert listed(run(with_inputs(case, **strided))) == listed(run(case))


@given(cases(distinct=True, keep="score"), st.randoms(use_true_random=False))
def test_7_permuting_tokens_permutes_the_result(case: Case, random: Any) -> None:
    case = with_inputs(case, token_priority=None)
    order = list(range(case.inputs.topk_ids.shape[0]))
    random.shuffle(order)
    rows = torch.tensor(order, dtype=torch.int64)
    a, b = run(case), run(take_rows(case, rows))
    assert torch.equal(b.topk_ids, a.topk_ids[rows])
    assert torch.equal(b.kept, a.kept[rows])
    torch.testing.assert_close(b.topk_weights, a.topk_weights[rows], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(b.loads_after, a.loads_after)


@given(cases(expansion=False), st.floats(1e-3, 8), st.floats(1e-3, 8))
def test_8_a_larger_factor_keeps_a_superset(case: Case, x: float, y: float) -> None:
    small = run(with_policy(case, capacity_factor=min(x, y)))
    large = run(with_policy(case, capacity_factor=max(x, y)))
    assert not (small.kept & ~large.kept).any()
    assert (small.capacity <= large.capacity).all()


@given(cases(expansion=False, renormalize=False, mode="enforce"))
def test_10_weights_are_kept_or_exactly_zero(case: Case) -> None:
    a = run(case)
    want = torch.where(a.kept, case.inputs.topk_weights, 0)
    torch.testing.assert_close(a.topk_weights, want, rtol=0, atol=0, equal_nan=True)
    want_ids = torch.where(a.kept, case.inputs.topk_ids.long(), a.num_experts)
    assert a.topk_ids.dtype == torch.int64
    assert torch.equal(a.topk_ids, want_ids)


@given(cases(plain=True, renormalize=True, mode="enforce"))
def test_10_renormalised_survivors_have_their_former_sum(case: Case) -> None:
    a = run(case)
    plain = run(with_policy(case, renormalize=False))
    real = genuine(case, a.num_experts)
    k = real.shape[1]
    lost = (real & ~a.kept[:, :k]).any(1)
    assert torch.equal(a.topk_weights[~lost], plain.topk_weights[~lost])  # bit-identical
    former = torch.where(real, case.inputs.topk_weights, 0).double().sum(1)
    some = lost & a.kept.any(1) & (plain.topk_weights.double().sum(1) > 0)
    rtol = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
    torch.testing.assert_close(
        a.topk_weights.double().sum(1)[some],
        former[some],
        rtol=rtol[a.topk_weights.dtype],
        atol=1e-6,
    )
    nothing = real.any(1) & ~a.kept.any(1)
    assert (a.topk_weights[nothing] == 0).all()  # never NaN


@given(cases())
def test_12_shadow_shows_the_models_choice_and_counts_as_enforce(case: Case) -> None:
    shadow, enforce = (run(with_policy(case, mode=m)) for m in ("shadow", "enforce"))
    free = run(with_policy(case, mode="observe", expand=None))
    assert torch.equal(shadow.topk_ids, free.topk_ids)
    assert torch.equal(shadow.kept, free.kept)
    torch.testing.assert_close(
        shadow.topk_weights, free.topk_weights, rtol=0, atol=0, equal_nan=True
    )
    for name in ("loads_before", "loads_after", "capacity", "dropped", "extras"):
        assert torch.equal(getattr(shadow, name), getattr(enforce, name)), name
    torch.testing.assert_close(shadow.gate_mass_kept, enforce.gate_mass_kept, equal_nan=True)
    assert torch.equal(shadow.expert_loads_after, enforce.expert_loads_after)


@given(cases(expansion=False))
def test_an_expert_per_device_is_the_expert_unit(case: Case) -> None:
    assume(case.policy.pool != "source")  # sources are devices
    E = run(case).num_experts
    by_device = Case(
        case.inputs,
        case.policy.replace(unit="device"),
        ExpertPlacement.per_expert(E),
    )

    def made(one: Case) -> dict[str, Any]:
        """Active experts are counted by device, and these differ here."""
        return {name: value for name, value in listed(run(one)).items() if name != "active"}

    by_expert = with_policy(case, unit="expert")
    assert made(by_device) == made(by_expert)
    nowhere = Case(case.inputs, by_device.policy, None)
    if case.inputs.scores is not None or case.inputs.num_experts is not None:
        assert made(nowhere) == made(by_expert)


@given(cases(keep="random", expansion=False), st.integers(0, 5))
def test_random_depends_on_the_step_as_a_number_or_a_tensor(case: Case, step: int) -> None:
    one = run(with_inputs(case, step=step))
    other = run(with_inputs(case, step=torch.tensor(step)))
    assert torch.equal(one.kept, other.kept)


def test_random_differs_by_seed_layer_and_step_and_is_fair() -> None:
    """All tokens want one expert that may serve half of them: over calls each is kept half."""
    T = 64
    base = RoutingInputs(
        topk_ids=torch.zeros(T, 1, dtype=torch.int64),
        topk_weights=torch.ones(T, 1),
        num_experts=2,
    )
    policy = CapacityPolicy(capacity_factor=1.0, keep="random", min_expert_load=0)
    first = route(base, policy).kept[:, 0]
    assert int(first.sum()) == T // 2
    changes = [
        route(dataclasses.replace(base, layer=1), policy),
        route(dataclasses.replace(base, step=1), policy),
        route(base, policy.replace(seed=1)),
    ]
    for changed in changes:
        assert not torch.equal(changed.kept[:, 0], first)
    counts = torch.zeros(T)
    for step in range(400):
        counts += route(dataclasses.replace(base, step=step), policy).kept[:, 0]
    assert counts.min() > 140
    assert counts.max() < 260
