"""The cap of an accelerator: the same as `route`, traceable, and adjustable in a traced graph.

Needs no accelerator: torch operations, here on the CPU, on fake tensors and in a graph that is
traced once and run again, as a CUDA graph is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs, route
from paceline.engines.vllm.accelerator import DeviceCap

MOST = 40


def _case(seed: int, rows: int, experts: int, k: int) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, experts, generator=rng) + torch.linspace(2, 0, experts)
    logits = (logits * 4).round() / 4  # ties
    scores = logits.softmax(1)
    ids = torch.topk(logits + 1e-3 * torch.rand(rows, experts, generator=rng), k).indices
    valid = torch.rand(rows, generator=rng) < 0.8
    ids = torch.where(torch.rand(ids.shape, generator=rng) < 0.05, experts, ids)  # no assignment
    return ids.int(), torch.rand(rows, k, generator=rng), scores, valid


@given(
    seed=st.integers(0, 10**6),
    rows=st.one_of(st.integers(1, MOST), st.sampled_from([5, 6, 9, 10])),  # around the loads below
    factor=st.sampled_from([None, 0.1, 0.5, 1.0, 1.1, 1.25, 3.0]),
    unit=st.sampled_from(["device", "expert"]),
    keep=st.sampled_from(["score", "weight", "first", "last"]),
    load=st.sampled_from([0, 2.5, 4]),
    mode=st.sampled_from(["enforce", "shadow"]),
    padded=st.booleans(),
    active=st.sampled_from([None, 1, 0.5]),
)
@settings(max_examples=200)
def test_it_is_the_same_as_route(
    seed: int, rows: int, factor: float | None, unit: Any, keep: str, load: float, mode: Any,
    padded: bool, active: float | None,
) -> None:  # fmt: skip
    experts, k = 7, 3
    ids, weights, scores, valid = _case(seed, rows, experts, k)
    placement = ExpertPlacement.contiguous(experts, 3)
    active = None if load == 0 else active  # with 0 it could never apply
    policy = CapacityPolicy(
        capacity_factor=factor, unit=unit, keep=keep, min_expert_load=load, mode=mode,
        max_active=active,
    )  # fmt: skip
    mask = valid if padded else None
    want = route(
        RoutingInputs(
            topk_ids=ids.clone(), topk_weights=weights.clone(), scores=scores, valid=mask
        ),
        policy,
        placement,
    )
    cap = DeviceCap(policy, placement, k, MOST, "cpu")
    new_ids, new_weights = ids.clone(), weights.clone()
    chosen = scores.gather(1, ids.long().clamp(max=experts - 1))
    cap(new_weights, new_ids, chosen, mask)

    offered = (ids < experts) & (valid.unsqueeze(1) if padded else True)
    kept = want.kept[:, :k] if mode == "enforce" and policy.caps else offered
    assert torch.equal(new_ids, torch.where(offered & ~kept, -1, ids))
    assert torch.equal(new_weights, torch.where(offered & ~kept, 0, weights))
    assert torch.equal(cap.loads[0], want.expert_loads_before)
    assert torch.equal(cap.loads[1], want.expert_loads_after)
    real = int(valid.sum()) if padded else rows
    bound = (want.capacity != torch.iinfo(torch.int64).max).any()
    capped = bool(bound | want.max_active_applies.any())
    capped = capped and real > 0
    assert cap.counts.tolist() == [int(real > 0), int(capped), real]


def test_a_traced_graph_applies_a_changed_policy() -> None:
    """Traced once; then factor, min_expert_load, mode and off change what the same graph does."""
    experts, k, rows = 8, 2, 32
    ids, weights, scores, _ = _case(3, rows, experts, k)
    chosen = scores.gather(1, ids.long().clamp(max=experts - 1))
    valid = torch.ones(rows, dtype=torch.bool)
    placement = ExpertPlacement.contiguous(experts, 2)
    start = CapacityPolicy(capacity_factor=1.0, min_expert_load=0.5, max_active=1)
    cap = DeviceCap(start, placement, k, rows, "cpu")

    def run(weights: Any, ids: Any, valid: Any) -> Any:
        cap(weights, ids, chosen, valid)
        return ids

    graph = make_fx(run)(weights.clone(), ids.clone(), valid)
    for changes in (
        {"capacity_factor": 0.5},
        {"capacity_factor": 1.1},
        {"min_expert_load": 9},
        {"min_expert_load": 9, "max_active": 0.5},
        {"min_expert_load": 3, "capacity_factor": None},
        {"max_active": None, "min_expert_load": 0},
        {"mode": "shadow"},
        {"mode": "observe"},
        {},
    ):
        policy = start.replace(**changes)
        cap.set_policy(policy)
        for mask in (valid, *(torch.arange(rows) < real for real in (12, 11, 0))):
            inputs = RoutingInputs(
                topk_ids=ids.clone(), topk_weights=weights.clone(), scores=scores, valid=mask
            )
            want = route(inputs, policy, placement)
            offered = (ids < experts) & mask.unsqueeze(1)
            kept = want.kept if policy.caps and policy.mode == "enforce" else offered
            got = graph(weights.clone(), ids.clone(), mask)
            assert torch.equal(got, torch.where(offered & ~kept, -1, ids))
    cap.set_policy(None)
    assert torch.equal(graph(weights.clone(), ids.clone(), valid), ids)


def test_nothing_waits_for_the_device() -> None:
    """On fake tensors a read of a value raises, and so does a shape that depends on one."""
    placement = ExpertPlacement.contiguous(8, 4)
    policy = CapacityPolicy(capacity_factor=1.0, min_expert_load=2, max_active=1)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        cap = DeviceCap(policy, placement, 2, 64, "cpu")
        for name in ("places", "enforce", "loads", "counts", "_unit_of", "_size_of", "few",
                     "readable", "weight_unit", "_own"):  # fmt: skip
            found = getattr(cap, name)
            setattr(cap, name, mode.from_tensor(found) if type(found) is torch.Tensor else found)
        ids = torch.empty((16, 2), dtype=torch.int32)
        cap(torch.empty(16, 2), ids, torch.empty(16, 2), torch.empty(16, dtype=torch.bool))
        assert ids.shape == (16, 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pool": "request"}, "pool=request is not allowed on an accelerator"),
        ({"phase": "prefill"}, "phase=prefill is not allowed on an accelerator"),
        ({"expand": "all"}, "expand=all is not allowed on an accelerator"),
        ({"keep": "random"}, "keep=random is not allowed on an accelerator"),
        ({"unit": "expert"}, "unit=expert is not allowed on a running accelerator"),
        ({"keep": "weight"}, "keep=weight is not allowed on a running accelerator"),
        ({"max_active": 1}, "max_active=1 is not allowed on a running accelerator"),
    ],
)
def test_a_graph_refuses_other_policies(changes: dict[str, Any], reason: str) -> None:
    start = CapacityPolicy(capacity_factor=1.0)
    cap = DeviceCap(start, ExpertPlacement.contiguous(8, 4), 2, 64, "cpu")
    with pytest.raises(ValueError, match=reason):
        cap.set_policy(start.replace(**changes))
