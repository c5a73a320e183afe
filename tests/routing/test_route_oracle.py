"""`route` says what the oracle says, on every kind of call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import assert_agrees
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Case, cases

from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs, register_keep, route

MANY = 5 * settings().max_examples  # 300 under the ci profile


@settings(max_examples=MANY)
@given(cases(expansion=False))
def test_token_drop_agrees_with_the_oracle(case: Case) -> None:
    assert_agrees(case)


@settings(max_examples=MANY)
@given(cases(expansion=True, min_expert_load=0))
def test_expanded_drop_agrees_with_the_oracle(case: Case) -> None:
    assert_agrees(case)


@given(cases(expansion=True))
def test_expansion_with_every_threshold_agrees_with_the_oracle(case: Case) -> None:
    assert_agrees(case)


@given(cases(expansion=True, plain=True, mode="enforce", keep="score", min_expert_load=0))
def test_expansion_on_ordinary_scores_agrees_with_the_oracle(case: Case) -> None:
    assert_agrees(case)


@pytest.mark.parametrize("expand", ["own_device", "visited_devices", "all"])
@pytest.mark.parametrize("rule", ["fill", "compete"])
@pytest.mark.parametrize("keep", ["score", "weight", "random"])
@settings(max_examples=max(10, settings().max_examples // 4))
@given(case=cases(max_tokens=40, expansion=True, plain=True, min_expert_load=0))
def test_each_expansion_agrees_with_the_oracle(
    expand: str, rule: str, keep: str, case: Case
) -> None:
    update = {"expand": expand, "expand_rule": rule, "keep": keep, "mode": "enforce"}
    if expand == "own_device" and case.inputs.token_source is None:
        update["expand"] = "all"
    if rule == "compete":
        update["fill_to"] = 1.0
    assert_agrees(Case(case.inputs, case.policy.replace(**update), case.placement))


@settings(max_examples=max(20, settings().max_examples // 2))
@given(cases(max_tokens=200, plain=True, min_expert_load=0, pool="batch"))
def test_bigger_batches_agree_with_the_oracle(case: Case) -> None:
    assert_agrees(case)


def test_the_example_of_the_exact_capacity() -> None:
    """Factor 1.1 with 400 tokens of 2 choices among 8 experts is 110, not the float's 111."""
    ids = torch.tensor([[0, 1]] * 400)
    inputs = RoutingInputs(topk_ids=ids, topk_weights=torch.full((400, 2), 0.5), num_experts=8)
    policy = CapacityPolicy(capacity_factor=1.1, unit="expert", keep="first", min_expert_load=0)
    a = route(inputs, policy)
    assert a.capacity.tolist() == [[110] * 8]
    assert a.loads_after.tolist() == [[110, 110] + [0] * 6]
    assert a.kept[:110].all()
    assert not a.kept[110:].any()


def test_a_small_example_by_hand() -> None:
    """Four tokens want expert 0, which may serve two: the two best scores, ties to the first."""
    scores = torch.tensor([[0.5, 0.1], [0.9, 0.1], [0.5, 0.1], [0.4, 0.1]])
    inputs = RoutingInputs(
        topk_ids=torch.zeros(4, 1, dtype=torch.int32), topk_weights=scores[:, :1], scores=scores
    )
    a = route(inputs, CapacityPolicy(capacity_factor=1.0, min_expert_load=0))
    assert a.topk_ids.tolist() == [[0], [0], [2], [2]]
    assert a.topk_weights.flatten().tolist() == [0.5, scores[1, 0].item(), 0.0, 0.0]
    assert a.capacity.tolist() == [[2, 2]]
    assert a.loads_before.tolist() == [[4, 0]]
    assert int(a.dropped) == 2
    assert float(a.gate_mass_kept) == pytest.approx(1.4 / 2.3)


def test_fill_and_compete_by_hand() -> None:
    """Both tokens chose expert 0; `fill` gives the loser expert 1, `compete` may evict."""
    scores = torch.tensor([[0.6, 0.5, 0.1], [0.7, 0.2, 0.1], [0.1, 0.3, 0.9]])
    inputs = RoutingInputs(
        topk_ids=torch.tensor([[0], [0], [2]]),
        topk_weights=torch.tensor([[1.2], [1.4], [1.8]]),
        scores=scores,
    )
    policy = CapacityPolicy(capacity_factor=1.0, min_expert_load=0, expand="all", max_experts=1)
    a = route(inputs, policy)
    assert a.topk_ids.shape == (3, 4)
    assert a.topk_ids.tolist() == [[3, 1, 3, 3], [0, 3, 3, 3], [2, 3, 3, 3]]
    assert a.topk_weights[0, 1].item() == pytest.approx(1.0)  # 0.5 at the token's scale of 2
    assert int(a.extras) == 1
    assert int(a.dropped) == 1
    assert int(route(inputs, policy.replace(fill_to=0)).extras) == 0
    greedy = route(inputs, policy.replace(max_experts=None))
    assert greedy.loads_after.tolist() == [[1, 1, 1]]

    rival = RoutingInputs(
        topk_ids=torch.tensor([[0], [1]]),
        topk_weights=torch.tensor([[0.9], [0.2]]),
        scores=torch.tensor([[0.9, 0.8], [0.1, 0.2]]),
    )
    compete = CapacityPolicy(
        capacity_factor=1.0, min_expert_load=0, expand="all", expand_rule="compete"
    )
    assert route(rival, compete).topk_ids.tolist() == [[0, 1, 2], [2, 2, 2]]  # evicted
    assert route(rival, compete.replace(max_experts=1)).topk_ids.tolist() == [
        [0, 2, 2],
        [2, 2, 2],
    ]  # trimmed afterwards; the freed place stays empty


def test_a_device_shares_its_capacity_among_its_experts() -> None:
    placement = ExpertPlacement.contiguous(4, 2)
    inputs = RoutingInputs(
        topk_ids=torch.tensor([[0], [0], [0], [2]]),
        topk_weights=torch.tensor([[0.1], [0.3], [0.2], [0.4]]),
    )
    policy = CapacityPolicy(capacity_factor=1.0, keep="weight", min_expert_load=0)
    a = route(inputs, policy, placement)
    assert a.capacity.tolist() == [[2, 2]]
    assert a.topk_ids.flatten().tolist() == [4, 0, 0, 2]
    alone = route(inputs, policy.replace(unit="expert"), placement)
    assert alone.topk_ids.flatten().tolist() == [4, 0, 4, 2]


@given(cases(expansion=False, keep="first"))
def test_a_registered_metric_ranks(case: Case) -> None:
    """A metric of minus the token index is the policy `first`."""
    register_keep("test_earliest", _earliest)
    update = {"keep": "test_earliest"}
    named = Case(case.inputs, case.policy.replace(**update), case.placement)
    a = route(named.inputs, named.policy, named.placement)
    b = assert_agrees(case)
    assert a.kept.tolist() == b.kept.tolist()
    assert a.topk_ids.tolist() == b.topk_ids.tolist()


def _earliest(inputs: RoutingInputs) -> torch.Tensor:
    tokens, k = inputs.topk_ids.shape
    return -torch.arange(tokens, dtype=torch.float32)[:, None].expand(tokens, k)


@given(cases(expansion=False, keep="score"))
def test_scores_of_other_dtypes_are_read_as_float32(case: Case) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        fields = vars(case.inputs).copy()
        for name in ("scores", "topk_scores"):
            if fields[name] is not None:
                fields[name] = fields[name].to(dtype)
        assert_agrees(Case(RoutingInputs(**fields), case.policy, case.placement))


@given(cases(plain=True, min_expert_load=0, mode="enforce"), st.randoms(use_true_random=False))
def test_more_devices_than_experts_agree_with_the_oracle(case: Case, random: Any) -> None:
    """Most devices are empty, and some with a high number are not."""
    experts = route(case.inputs, case.policy, case.placement).num_experts
    placement = ExpertPlacement.explicit(
        [random.randrange(100) for _ in range(experts)], num_devices=100
    )
    assert_agrees(Case(case.inputs, case.policy, placement))
