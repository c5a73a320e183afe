"""The emulated devices compute exactly the rows that the placement gives them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.analysis.emulate import (
    REPEATS,
    paired_ratios,
    slowest_device,
    split_by_device,
    time_policies,
)
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing import RoutingInputs, route

EXPERTS, DEVICES, TOKENS, K = 10, 4, 200, 3


class Recorder:
    """Stands in for an experts module and notes what it was asked to compute."""

    def __init__(self) -> None:
        self.calls: list[Counter[int]] = []

    def __call__(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        assert hidden.shape[0] == ids.shape[0] == weights.shape[0]
        assert ids.shape[1] == 1
        self.calls.append(Counter(ids.flatten().tolist()))
        return hidden


@pytest.fixture
def placement() -> ExpertPlacement:
    return ExpertPlacement.contiguous(EXPERTS, DEVICES)


@pytest.fixture
def inputs() -> RoutingInputs:
    generator = torch.Generator().manual_seed(0)
    skew = torch.linspace(0, 3, EXPERTS)
    scores = (torch.randn(TOKENS, EXPERTS, generator=generator) + skew).softmax(-1)
    weights, ids = scores.topk(K, dim=-1)
    return RoutingInputs(topk_ids=ids, topk_weights=weights, scores=scores)


def _split(inputs: RoutingInputs, policy: CapacityPolicy, placement: ExpertPlacement) -> Any:
    assignment = route(inputs, policy, placement)
    hidden = torch.arange(TOKENS, dtype=torch.float32).unsqueeze(1)
    work = split_by_device(
        hidden, assignment.topk_ids, assignment.topk_weights, placement.expert_to_device
    )
    return assignment, work


@pytest.mark.parametrize("factor", [None, 1.0, 0.5])
def test_rows_of_each_device_are_its_load(
    inputs: RoutingInputs, placement: ExpertPlacement, factor: float | None
) -> None:
    policy = CapacityPolicy(capacity_factor=factor, min_expert_load=0)
    assignment, work = _split(inputs, policy, placement)
    assert [part.rows for part in work] == assignment.loads_after[0].tolist()
    assert sum(part.rows for part in work) == int(assignment.kept.sum())  # dropped rows: nowhere
    if factor is not None:
        assert int(assignment.dropped) > 0
        assert max(part.rows for part in work) <= int(assignment.capacity.max())


def test_each_device_runs_only_its_experts_on_the_right_tokens(
    inputs: RoutingInputs, placement: ExpertPlacement
) -> None:
    policy = CapacityPolicy(capacity_factor=1, min_expert_load=0)
    assignment, work = _split(inputs, policy, placement)
    experts = Recorder()
    slowest_device(experts, work, repeats=1)
    assert len(experts.calls) == DEVICES
    expected = assignment.expert_loads_after.tolist()
    for device, call in enumerate(experts.calls):
        assert call == {e: expected[e] for e in placement.experts_of(device) if expected[e]}
    pairs = {
        (int(token), int(expert), float(weight))
        for part in work
        for token, expert, weight in zip(part.hidden, part.ids, part.weights, strict=True)
    }
    kept = assignment.kept.nonzero().tolist()
    assert pairs == {
        (t, int(assignment.topk_ids[t, s]), float(assignment.topk_weights[t, s])) for t, s in kept
    }


def test_ids_outside_the_layer_are_nobodys_work() -> None:
    ids = torch.tensor([[0, -1], [3, 99], [4, 1]])
    work = split_by_device(torch.zeros(3, 2), ids, torch.ones(3, 2), [0, 0, 1, 1])
    assert [part.rows for part in work] == [2, 1]


def test_every_policy_runs_once_a_round_and_idle_devices_are_skipped() -> None:
    ids = torch.tensor([[0], [0]])
    work = split_by_device(torch.zeros(2, 2), ids, torch.ones(2, 1), [0, 1])
    experts = Recorder()
    times = time_policies(experts, {"a": work, "b": work}, rounds=3)
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}
    assert len(experts.calls) == 2 * (
        3 * REPEATS + 1
    )  # a warm-up each; device 1 has nothing to run


def test_paired_ratios() -> None:
    ratios = paired_ratios([2.0, 3.0, 8.0], [1.0, 3.0, 2.0])
    assert (ratios.median, ratios.minimum, ratios.maximum) == (2.0, 1.0, 4.0)
    with pytest.raises(ValueError, match="same number"):
        paired_ratios([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="positive"):
        paired_ratios([1.0], [0.0])
