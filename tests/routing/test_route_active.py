"""max_active: below the threshold devices read few experts, exactly those that the rule names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import assert_agrees, listed, run
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import Case, narrow_cases
from test_kernels import INSTALLED, everywhere
from test_route_invariants import genuine, take_rows, with_inputs, with_policy

from paceline import CapacityPolicy, ExpertPlacement, PolicyError, RoutingInputs, route
from paceline.routing.active import limits_of
from paceline.routing.backends import using_backend

INT64_MAX = 2**63 - 1


@everywhere
@given(case=narrow_cases())
def test_every_backend_agrees_with_the_oracle(backend: str, case: Case) -> None:
    if backend != "cuda" or case.inputs.topk_ids.shape[0] % 3 == 0:  # the interpreter is slow
        with using_backend(backend):
            assert_agrees(case)


@everywhere
@given(case=narrow_cases(capped=True, expansion=True))
def test_expansion_does_nothing_below_the_threshold(backend: str, case: Case) -> None:
    assume(backend != "cuda" or case.inputs.topk_ids.shape[0] % 3 == 0)
    with using_backend(backend):
        a = assert_agrees(with_policy(case, mode="enforce"))
    if bool(a.max_active_applies):
        assert int(a.extras) == 0
        assert a.topk_ids.shape[1] >= case.inputs.topk_ids.shape[1]  # static, whichever rules


@given(narrow_cases(mode="enforce"))
def test_one_cap_rules_a_forward(case: Case) -> None:
    a = run(case)
    capped = bool((a.capacity != INT64_MAX).any())
    assert not (capped and bool(a.max_active_applies))
    if bool(a.max_active_applies):
        assert a.capacity.eq(INT64_MAX).all()
    else:
        b = run(with_policy(case, max_active=None))
        assert torch.equal(a.topk_ids, b.topk_ids)
        assert torch.equal(a.topk_weights.nan_to_num(), b.topk_weights.nan_to_num())


@given(narrow_cases(capped=False, pool="batch", mode="enforce", min_expert_load=10**6))
def test_no_device_reads_more_than_it_may(case: Case) -> None:
    a = run(case)
    assert case.placement is not None
    for device, active in enumerate(a.active_after.tolist()):
        hosted = case.placement.sizes[device]
        most = case.policy.max_active
        assert most is not None
        bound = min(most, hosted) if isinstance(most, int) else -(-most * hosted // 1)
        assert active <= bound
        assert active == min(bound, int(a.active_before[device]))  # and none is given away
    assert int(a.dropped) == int(a.expert_loads_before.sum() - a.expert_loads_after.sum())


@given(narrow_cases(capped=False, mode="enforce", min_expert_load=10**6, renormalize=False))
def test_an_expert_keeps_all_its_tokens_of_a_pool_or_none(case: Case) -> None:
    a = run(case)
    pool = a.pools.of_token
    pool = torch.zeros(len(a.kept), dtype=torch.int64) if pool is None else pool
    seen: dict[tuple[int, int], set[bool]] = {}
    offered = genuine(case, a.num_experts)
    for t, j in offered.nonzero().tolist():
        key = (int(pool[t]), int(case.inputs.topk_ids[t, j]))
        seen.setdefault(key, set()).add(bool(a.kept[t, j]))
    assert all(len(fates) == 1 for fates in seen.values())


@given(narrow_cases(mode="enforce", renormalize=False))
def test_what_stays_is_untouched_and_what_goes_is_exactly_nothing(case: Case) -> None:
    a = run(with_policy(case, expand=None))
    given_weights = case.inputs.topk_weights
    assert torch.equal(a.topk_weights[a.kept].nan_to_num(), given_weights[a.kept].nan_to_num())
    assert (a.topk_weights[~a.kept] == 0).all()
    assert (a.topk_ids[~a.kept] == a.num_experts).all()


@given(narrow_cases(), st.integers(0, 2**32 - 1))
def test_padding_changes_nothing(case: Case, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    rows = case.inputs.topk_ids.shape[0]
    assume(rows)
    alone = run(case)
    real = torch.ones(rows, dtype=torch.bool) if case.inputs.valid is None else case.inputs.valid
    # rows of padding that would change every sum, anywhere among the others
    picked = torch.randint(rows, (7,), generator=rng)
    order = torch.randperm(rows + 7, generator=rng)
    padded = take_rows(case, torch.cat([torch.arange(rows), picked])[order])
    valid = torch.cat([real, torch.zeros(7, dtype=torch.bool)])[order]
    back = torch.argsort(order)[:rows]
    # real rows in their order, as ties between tokens go by it
    order[torch.argsort(back)] = order[torch.argsort(back)]
    b = run(with_inputs(padded, valid=valid))
    if bool(alone.max_active_applies):
        assert torch.equal(b.kept[back], alone.kept)
        assert torch.equal(b.topk_ids[back], alone.topk_ids)
    assert torch.equal(b.max_active_applies, alone.max_active_applies)


@given(narrow_cases(capped=False), st.integers(0, 2**32 - 1))
def test_the_order_of_tokens_does_not_matter(case: Case, seed: int) -> None:
    rows = case.inputs.topk_ids.shape[0]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    a, b = run(case), run(take_rows(case, order))
    assert torch.equal(a.kept[order], b.kept)
    assert torch.equal(a.active_after, b.active_after)


@given(narrow_cases(capped=False))
def test_priorities_do_not_matter(case: Case) -> None:
    assert listed(run(case)) == listed(run(with_inputs(case, token_priority=None)))


@given(narrow_cases(capped=False, mode="enforce", pool="source"))
def test_a_source_chooses_for_its_own_tokens(case: Case) -> None:
    """What other sources' tokens choose changes nothing, as long as there are as many."""
    source = case.inputs.token_source
    assert source is not None
    a = run(case)
    for other in source.unique().tolist():
        mine = source == other
        changed = case.inputs.topk_ids.clone()
        changed[~mine] = changed[~mine].flip(1).roll(1, 0)
        weights = torch.where(mine[:, None], case.inputs.topk_weights, 0.5)
        b = run(with_inputs(case, topk_ids=changed, topk_weights=weights.to(weights.dtype)))
        assert torch.equal(a.kept[mine], b.kept[mine])


@given(narrow_cases(mode="shadow"))
def test_shadow_changes_nothing_and_counts_what_enforce_drops(case: Case) -> None:
    a, b = run(case), run(with_policy(case, mode="enforce"))
    real = genuine(case, a.num_experts)
    assert torch.equal(a.kept, real)
    for name in ("dropped", "active_after", "expert_loads_after", "tokens_without_expert"):
        assert torch.equal(getattr(a, name), getattr(b, name))


@given(narrow_cases(capped=False, mode="enforce", min_expert_load=10**6))
def test_fewer_active_experts_keep_a_subset(case: Case) -> None:
    most = case.policy.max_active
    assume(isinstance(most, int) and most > 1)
    assert isinstance(most, int)
    fewer, more = run(with_policy(case, max_active=most - 1)), run(case)
    assert not (fewer.kept & ~more.kept).any()


@everywhere
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes_and_odd_weights(backend: str, dtype: torch.dtype, weights: torch.dtype) -> None:
    """NaN counts nothing, infinity much; a wanted expert of negative sum beats an unwanted one."""
    nan, inf = float("nan"), float("inf")
    ids = torch.tensor([[0, 1], [2, 5], [3, 200], [4, 1]], dtype=dtype)
    given_weights = torch.tensor([[nan, 0.25], [-0.5, inf], [-1.0, 1.0], [0.5, 0.125]])
    inputs = RoutingInputs(ids, given_weights.to(weights), num_experts=8)
    policy = CapacityPolicy(max_active=1, keep="weight")
    placement = ExpertPlacement.explicit([0, 0, 1, 1, 2, 2, 1, 1])
    with using_backend(backend):
        a = route(inputs, policy, placement)
        assert_agrees(Case(inputs, policy, placement))
    assert a.topk_ids.tolist() == [[8, 1], [2, 5], [8, 8], [8, 1]]


@pytest.mark.parametrize("backend", INSTALLED)
def test_a_tie_goes_to_the_smaller_expert_however_the_sum_comes_about(backend: str) -> None:
    """Three thirds in one order or another differ in float32; here they are one exact sum."""
    third, rest = 1 / 3, 0.1
    ids = torch.tensor([[0, 1], [0, 1], [0, 1], [0, 1]])
    weights = torch.tensor([[third, rest], [third, third], [rest, third], [rest, rest]])
    inputs = RoutingInputs(ids.flip(1), weights.flip(1), num_experts=2)
    placement = ExpertPlacement.explicit([0, 0])
    with using_backend(backend):
        a = route(inputs, CapacityPolicy(max_active=1, keep="weight"), placement)
    assert (a.kept == (ids.flip(1) == 0)).all()


def test_share_of_what_a_device_hosts() -> None:
    """ceil(0.28 * 25) is 7, where floats say 8: the decimal that was written counts."""
    ids = torch.arange(26).reshape(26, 1)
    inputs = RoutingInputs(ids, torch.ones(26, 1), num_experts=26)
    placement = ExpertPlacement.explicit([0] * 25 + [1])
    a = route(inputs, CapacityPolicy(max_active=0.28, keep="weight"), placement)
    assert a.active_after.tolist() == [7, 1]
    b = route(inputs, CapacityPolicy(max_active=0.281, keep="weight"), placement)
    assert b.active_after.tolist() == [8, 1]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_active": 0}, "max_active must be a whole number of experts >= 1, .*, got 0$"),
        ({"max_active": 1.0}, "max_active must be .* got 1.0$"),
        ({"max_active": -0.5}, "a share of a device's experts > 0 and < 1, or None, got -0.5$"),
        ({"max_active": float("nan")}, "max_active must be .* got nan$"),
        ({"max_active": True}, "max_active must be .* got True$"),
        ({"max_active": "many"}, "max_active must be .* got 'many'$"),
        ({"max_active": 2, "pool": "request"}, 'pool must be .* got "request"'),
        ({"max_active": 2, "phase": "prefill"}, 'phase must be .* got "prefill"'),
        ({"max_active": 2, "min_expert_load": 0}, "min_expert_load must be > 0"),
    ],
)
def test_bad_values_are_one_sentence(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError, match=said.replace("(", r"\(")) as caught:
        CapacityPolicy(**fields)
    assert ". " not in str(caught.value)


@pytest.mark.parametrize(
    ("most", "placement"),
    [(1, None), (2, ExpertPlacement.contiguous(4, 2)), (0.9, ExpertPlacement.contiguous(4, 2))],
)
def test_what_can_never_bind_is_refused(most: float, placement: ExpertPlacement | None) -> None:
    inputs = RoutingInputs(torch.tensor([[0, 1]]), torch.ones(1, 2), num_experts=4)
    with pytest.raises(ValueError, match="can never bind"):
        route(inputs, CapacityPolicy(max_active=most, keep="weight"), placement)


@pytest.mark.parametrize("most", [3, 0.25, "0.5", "3"])
def test_text_forms_read_back(most: Any) -> None:
    policy = CapacityPolicy(capacity_factor=1.25, max_active=most)
    for again in (
        CapacityPolicy.parse(str(policy)),
        CapacityPolicy.from_json(policy.to_json()),
        CapacityPolicy.from_toml(policy.to_toml()),
    ):
        assert again == policy
        assert type(again.max_active) is type(policy.max_active)


@given(narrow_cases(capped=False, pool="batch", mode="enforce", min_expert_load=10**6))
def test_a_look_at_the_choice_finds_whether_anything_is_dropped(case: Case) -> None:
    """Where all tokens count; an id that is no expert's is left to routing."""
    case = with_inputs(case, valid=None)
    assert case.placement is not None
    assert case.policy.max_active is not None
    ids = case.inputs.topk_ids.long()
    usual = bool(((ids >= 0) & (ids < case.placement.num_experts)).all())
    quick = limits_of(case.placement, case.policy.max_active).keep(ids)
    assert quick == (usual and not int(run(case).dropped))
