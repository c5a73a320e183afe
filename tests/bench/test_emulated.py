"""The emulated devices compute exactly the rows that the placement gives them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.bench.emulated import play, slowest_device, split_by_device, time_in_turn
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing import RoutingInputs, route

EXPERTS, DEVICES, TOKENS, K = 10, 4, 200, 3
CONTIGUOUS = ExpertPlacement.contiguous(EXPERTS, DEVICES)
SCATTERED = ExpertPlacement.explicit([3, 0, 3, 0, 3, 0, 3, 1, 3, 3], num_devices=5)


class Recorder:
    """Stands in for an experts module: notes what it was asked to compute, gives expert + 1."""

    def __init__(self) -> None:
        self.calls: list[Counter[int]] = []

    def __call__(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        assert hidden.shape[0] == ids.shape[0] == weights.shape[0]
        assert ids.shape[1] == 1
        self.calls.append(Counter(ids.flatten().tolist()))
        return hidden * weights * (ids + 1)


@pytest.fixture
def inputs() -> RoutingInputs:
    generator = torch.Generator().manual_seed(0)
    skew = torch.linspace(0, 3, EXPERTS)
    scores = (torch.randn(TOKENS, EXPERTS, generator=generator) + skew).softmax(-1)
    weights, ids = scores.topk(K, dim=-1)
    return RoutingInputs(topk_ids=ids, topk_weights=weights, scores=scores)


def _split(inputs: RoutingInputs, factor: float | None, placement: ExpertPlacement) -> Any:
    policy = CapacityPolicy(capacity_factor=factor, min_expert_load=0)
    assignment = route(inputs, policy, placement)
    hidden = torch.arange(TOKENS, dtype=torch.float32).unsqueeze(1)
    work = split_by_device(hidden, assignment.topk_ids, assignment.topk_weights, placement)
    return assignment, hidden, work


@pytest.mark.parametrize("placement", [CONTIGUOUS, SCATTERED])
@pytest.mark.parametrize("factor", [None, 1.0, 0.5])
def test_rows_of_each_device_are_its_load(
    inputs: RoutingInputs, placement: ExpertPlacement, factor: float | None
) -> None:
    assignment, _, work = _split(inputs, factor, placement)
    assert [part.rows for part in work] == assignment.loads_after[0].tolist()
    assert sum(part.rows for part in work) == int(assignment.kept.sum())  # dropped rows: nowhere
    if factor is not None:
        assert int(assignment.dropped) > 0
        assert all(
            part.rows <= places
            for part, places in zip(work, assignment.capacity[0].tolist(), strict=True)
        )


@pytest.mark.parametrize("placement", [CONTIGUOUS, SCATTERED])
def test_each_device_runs_only_its_experts_and_the_parts_add_up(
    inputs: RoutingInputs, placement: ExpertPlacement
) -> None:
    assignment, hidden, work = _split(inputs, 1, placement)
    experts = Recorder()
    ids, weights = assignment.topk_ids, assignment.topk_weights
    out, played = play(experts, hidden, ids, weights, placement)
    assert played.rows == [part.rows for part in work]
    loads = assignment.expert_loads_after.tolist()
    busy = [device for device in range(placement.num_devices) if played.rows[device]]
    assert len(experts.calls) == len(busy)  # devices without rows run nothing
    for device, call in zip(busy, experts.calls, strict=True):
        assert call == {e: loads[e] for e in placement.experts_of(device) if loads[e]}
    expected = [
        sum(t * float(w) * (int(e) + 1) for e, w in zip(ids[t], weights[t], strict=True))
        for t in range(TOKENS)
    ]
    assert out.flatten().tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.uint16])
def test_ids_outside_the_layer_are_nobodys_work(dtype: torch.dtype) -> None:
    outside = -1 if dtype.is_signed else 99
    ids = torch.tensor([[0, outside], [3, 99], [4, 1]]).to(dtype)
    placement = ExpertPlacement.explicit([0, 0, 1, 1])
    work = split_by_device(torch.zeros(3, 2), ids, torch.ones(3, 2), placement)
    assert [part.rows for part in work] == [2, 1]
    assert [part.token.tolist() for part in work] == [[0, 2], [1]]


def test_every_policy_runs_once_a_round_on_the_two_devices_with_most_rows() -> None:
    ids = torch.tensor([[0], [0], [0], [1], [1], [2]])
    placement = ExpertPlacement.explicit([0, 1, 2], num_devices=4)
    work = split_by_device(torch.zeros(6, 2), ids, torch.ones(6, 1), placement)
    experts = Recorder()
    times = time_in_turn(experts, {"a": work, "b": work}, rounds=3, repeats=2)
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}
    runs = 2 * (3 * 2 + 1)  # both policies, a warm-up each
    assert Counter(map(str, experts.calls)) == {
        str(Counter({0: 3})): runs,
        str(Counter({1: 2})): runs,
    }
    assert slowest_device(experts, work[3:]) == 0.0  # nothing to run
