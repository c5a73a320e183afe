"""Shapes depend on no data, nothing waits for the device, and the whole compiles as one graph."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from agreement import run
from hypothesis import given, settings
from strategies import Case, cases
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from paceline import Assignment, CapacityPolicy, ExpertPlacement, RoutingInputs, route
from paceline.routing import stats
from paceline.routing.stats import LoadAccumulator

READS = (
    "aten._local_scalar_dense", "aten.item", "aten.nonzero", "aten.masked_select", "aten.equal",
    "aten.is_nonzero", "aten._unique2", "aten.unique_consecutive", "aten.unique_dim",
    "aten.bincount", "aten.histc", "aten.repeat_interleave.Tensor",
)  # fmt: skip


class SyncCounter(TorchDispatchMode):
    """Counts the operations whose result or shape the host must wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        by_mask = name.startswith(("aten.index.Tensor", "aten.index_put")) and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in args[1]
        )
        if name.startswith(READS) or by_mask:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def outputs(a: Assignment) -> list[torch.Tensor]:
    """Every tensor of an assignment, statistics too."""
    return [
        a.topk_ids, a.topk_weights, a.kept, a.capacity, a.loads_before, a.loads_after,
        a.expert_loads_before, a.expert_loads_after, a.dropped, a.extras, a.gate_mass_kept,
    ]  # fmt: skip


def without_source(case: Case) -> Case:
    """The source of a token is range-checked on the CPU, which reads it; leave it out."""
    update: dict[str, Any] = {}
    if case.policy.pool == "source":
        update["pool"] = "batch"
    if case.policy.expand == "own_device":
        update["expand"] = "visited_devices"
    inputs = dataclasses.replace(case.inputs, token_source=None)
    return Case(inputs, case.policy.replace(**update), case.placement)


@given(cases())
def test_nothing_is_read_back(case: Case) -> None:
    case = without_source(case)
    with SyncCounter() as counter:
        outputs(run(case))
    assert not counter.seen, f"{dict(counter.seen)} in {case}"


@settings(max_examples=max(20, settings().max_examples // 3))
@given(cases())
def test_shapes_do_not_depend_on_data(case: Case) -> None:
    """Route tensors that hold no data at all: what works there reads nothing."""
    case = without_source(case)
    real = outputs(run(case))
    with FakeTensorMode() as mode:
        fields = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in vars(case.inputs).items()
        }
        fake = outputs(route(RoutingInputs(**fields), case.policy, case.placement))
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in real]


@given(cases())
def test_the_number_of_slots_is_that_of_the_policy(case: Case) -> None:
    k = case.inputs.topk_ids.shape[1]
    a, policy, placement = run(case), case.policy, case.placement
    if policy.expand is None or policy.mode == "shadow":
        assert a.topk_ids.shape[1] == k
        return
    E = a.num_experts
    largest = 1 if placement is None else max(placement.sizes)
    widest = {"own_device": largest, "visited_devices": min(E, k * largest), "all": E}
    limit = E if policy.expand_limit is None else policy.expand_limit
    assert a.topk_ids.shape[1] == k + min(limit, widest[policy.expand])


def batch(T: int, E: int, k: int, seed: int, devices: int = 4) -> RoutingInputs:
    """A call with every optional input."""
    rng = torch.Generator().manual_seed(seed)
    scores = torch.rand(T, E, generator=rng).softmax(1)
    weights, ids = scores.topk(k, dim=1)
    return RoutingInputs(
        topk_ids=ids,
        topk_weights=weights,
        scores=scores,
        valid=torch.rand(T, generator=rng) < 0.9,
        token_source=torch.randint(devices, (T,), generator=rng),
        token_request=torch.randint(3, (T,), generator=rng),
        token_priority=torch.randint(-1, 2, (T,), generator=rng),
        token_decode=torch.rand(T, generator=rng) < 0.3,
    )


POLICIES = {
    "device": {},
    "expert": {"unit": "expert", "capacity_factor": 1.1},
    "request": {"pool": "request", "phase": "prefill"},
    "source": {"pool": "source", "keep": "weight", "renormalize": True},
    "random": {"keep": "random", "seed": 3},
    "fill": {"expand": "own_device", "unit": "expert", "expand_limit": 2},
    "compete": {"expand": "all", "expand_rule": "compete", "max_experts": 3},
    "shadow": {"mode": "shadow", "keep": "last", "min_expert_load": 4},
}


@settings(max_examples=max(20, settings().max_examples // 3))
@given(cases(pool="source"))
def test_a_source_is_checked_only_where_it_is_used(case: Case) -> None:
    """One read for the range, no more, on the CPU."""
    with SyncCounter() as counter:
        outputs(run(case))
    assert sum(counter.seen.values()) <= 2, counter.seen


@pytest.mark.parametrize("name", POLICIES)
def test_a_second_call_copies_no_table_to_the_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy from the host waits for the device and can't be captured in a CUDA graph."""
    policy = CapacityPolicy(**{"capacity_factor": 0.75, "min_expert_load": 0, **POLICIES[name]})

    def call() -> list[torch.Tensor]:
        placement = ExpertPlacement.contiguous(8, 4)
        return outputs(route(batch(24, 8, 2, 0), policy, placement))

    first = call()
    for maker in ("tensor", "as_tensor"):
        monkeypatch.setattr(torch, maker, None)
    for got, want in zip(call(), first, strict=True):
        assert torch.equal(got, want)


@given(cases())
def test_a_host_counts_as_a_device_does(case: Case) -> None:
    """Few calls on a CPU, operators that wait for nothing elsewhere: the same statistics."""
    assignment, k = run(case), case.inputs.topk_ids.shape[1]
    placement = case.placement or ExpertPlacement.per_expert(assignment.num_experts)
    found = []
    for host in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stats, "on_host", lambda assignment, host=host: host)
            loads = LoadAccumulator("a layer", placement, k, "cpu")
            for _ in range(2):
                loads.add(assignment)
            found.append(loads.result().to_dict())
    for name, value in found[0].items():
        near = isinstance(value, float)
        assert found[1][name] == (pytest.approx(value, rel=1e-6, nan_ok=True) if near else value)


def test_counting_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics are read when asked for; until then the device never holds up the host."""
    policy = CapacityPolicy(capacity_factor=0.75, min_expert_load=0)
    placement = ExpertPlacement.contiguous(8, 4)
    loads = LoadAccumulator("a layer", placement, 2, "cpu")
    inputs = batch(24, 8, 2, 0)
    monkeypatch.setattr(stats, "on_host", lambda assignment: False)
    loads.add(route(inputs, policy, placement))
    monkeypatch.setattr(torch, "tensor", None)
    with SyncCounter() as counter:
        for _ in range(200):
            loads.observe(inputs.topk_ids, inputs.valid)
            loads.observe(inputs.topk_ids)
        loads.add(route(inputs, policy, placement))
        loads.reset()
    assert not counter.seen
