"""Statistics of a layer add up what every forward did, recounted here in plain Python."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import route_oracle
from strategies import placements

from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs, route
from paceline.balance import straggler_loss
from paceline.routing.layer_stats import LayerStats
from paceline.routing.stats import LoadAccumulator

POLICIES: list[dict[str, Any]] = [
    {"capacity_factor": 0.75},
    {"capacity_factor": 1.0, "unit": "expert", "mode": "shadow"},
    {"capacity_factor": 0.5, "expand": "all", "expand_rule": "compete"},
    {"capacity_factor": 1.5, "expand": "all", "unit": "expert"},
    {"capacity_factor": 0.5, "pool": "request"},
    {"capacity_factor": None},
    {"capacity_factor": 0.5, "min_expert_load": 10**6},
    {"max_active": 1, "min_expert_load": 10**6},
    {"max_active": 0.1, "min_expert_load": 0.5, "capacity_factor": 0.5, "mode": "shadow"},
]


def forward(rng: np.random.Generator, experts: int, k: int) -> RoutingInputs:
    """A batch of a random size, some rows padding, some ids out of range."""
    tokens = int(rng.integers(0, 20))
    scores = rng.random((tokens, experts)).astype(np.float32)
    ids = np.argsort(-scores, axis=1)[:, :k]
    ids = np.where(rng.random(ids.shape) < 0.1, experts + rng.integers(-99, 99), ids)
    return RoutingInputs(
        topk_ids=torch.from_numpy(ids),
        topk_weights=torch.from_numpy(rng.random((tokens, k)).astype(np.float32)),
        scores=torch.from_numpy(scores),
        valid=torch.from_numpy(rng.random(tokens) < 0.8) if rng.random() < 0.5 else None,
        token_request=torch.from_numpy(rng.integers(0, 3, tokens)),
    )


@given(st.integers(2, 8), st.data())
def test_forwards_add_up(experts: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    k = data.draw(st.integers(1, experts))
    placement = data.draw(placements(experts, optional=False))
    loads = LoadAccumulator("a layer", placement, k, "cpu")
    want: dict[str, Any] = dict.fromkeys(
        ("forwards", "capped_forwards", "narrowed_forwards", "tokens", "assignments", "dropped",
         "extras", "tokens_without_expert"), 0
    )  # fmt: skip
    active: dict[str, list[list[int]]] = {"before": [], "after": []}
    experts_before, experts_after = np.zeros(experts, int), np.zeros(experts, int)
    peaks: dict[str, list[tuple[float, int]]] = {}
    whole = kept = 0.0
    for kind in data.draw(st.lists(st.integers(0, len(POLICIES)), max_size=5)):
        inputs = forward(rng, experts, k)
        if kind == len(POLICIES):
            policy = CapacityPolicy(capacity_factor=None)
            loads.observe(inputs.topk_ids, inputs.valid)
        else:
            fields = {"min_expert_load": 0, **POLICIES[kind]}
            if max(placement.sizes) == 1 and fields.pop("max_active", None):
                fields["mode"] = "observe"  # which could never bind
            policy = CapacityPolicy(**fields)
            loads.add(route(inputs, policy, placement))
        expected = route_oracle(inputs, policy, placement)
        rows = inputs.topk_ids.shape[0]
        tokens = rows if inputs.valid is None else int(inputs.valid.sum())
        want["forwards"] += 1
        capacity = [c for row in expected.capacity for c in row]
        capped = expected.narrowed or any(c < 2**63 - 1 for c in capacity)
        want["capped_forwards"] += int(capped)
        want["narrowed_forwards"] += int(expected.narrowed)
        want["tokens_without_expert"] += expected.tokens_without_expert
        active["before"].append(expected.active_before)
        active["after"].append(expected.active_after)
        want["tokens"] += tokens
        want["assignments"] += sum(expected.expert_loads_before)
        want["dropped"] += expected.dropped
        want["extras"] += expected.extras
        if kind < len(POLICIES):
            assert inputs.scores is not None
            share, mass = expected.gate_mass_kept, 0.0
            for t in range(rows):
                if inputs.valid is None or inputs.valid[t]:
                    for e in inputs.topk_ids[t].tolist():
                        mass += inputs.scores[t, e].item() if 0 <= e < experts else 0.0
            whole, kept = whole + mass, kept + share * mass
        for when, counts, total in (
            ("before", expected.expert_loads_before, experts_before),
            ("after", expected.expert_loads_after, experts_after),
        ):
            total += np.array(counts)
            for what, units in (("device", placement.num_devices), ("expert", experts)):
                hosts = placement.expert_to_device if what == "device" else range(experts)
                rows_of = [sum(c for c, h in zip(counts, hosts, strict=True) if h == u)
                           for u in range(units)]  # fmt: skip
                ratio = max(rows_of) / (tokens * k / units) if tokens else 0.0
                peaks.setdefault(f"{what}_peak_to_mean_{when}", []).append((ratio, tokens))
    got = loads.result()
    for name, value in want.items():
        assert getattr(got, name) == value, name
    assert got.name == "a layer"
    assert got.expert_loads_before == experts_before.tolist()
    assert got.expert_loads_after == experts_after.tolist()
    for when, total in (("before", experts_before), ("after", experts_after)):
        devices = [int(sum(total[e] for e in placement.experts_of(d)))
                   for d in range(placement.num_devices)]  # fmt: skip
        assert getattr(got, f"device_loads_{when}") == devices
    forwards = max(1, want["forwards"])
    for when, counts in active.items():
        table = np.array(counts).reshape(-1, placement.num_devices)
        mean = (table.sum(0) / forwards).tolist()
        assert getattr(got, f"active_experts_{when}") == pytest.approx(mean)
        most = table.max(1, initial=0).sum() / forwards
        assert getattr(got, f"most_active_experts_{when}") == pytest.approx(most)
    for name, values in peaks.items():
        mean = sum(r * t for r, t in values) / want["tokens"] if want["tokens"] else 1.0
        assert getattr(got, name) == pytest.approx(mean), name
        worst = max(r for r, _ in values)
        assert getattr(got, f"worst_{name}") == pytest.approx(worst), name
        if name.startswith("device"):
            loss = getattr(
                got, name.replace("peak_to_mean", "x").replace("device_x", "straggler_loss")
            )
            assert loss == pytest.approx(max(0.0, 1 - 1 / mean) if mean > 0 else 0.0)
    share = want["dropped"] / want["assignments"] if want["assignments"] else 0.0
    assert got.dropped_share == pytest.approx(share)
    assert got.gate_mass_kept == pytest.approx(kept / whole if whole else 1.0, rel=1e-4)
    assert json.loads(json.dumps(got.to_dict())) == got.to_dict()
    assert loads.result() == got  # reading changes nothing
    loads.reset()
    assert loads.result() == LoadAccumulator("a layer", placement, k, "cpu").result()


def test_many_forwards_are_counted_in_bulk() -> None:
    """Pending forwards are flushed on their own; none is lost or counted twice."""
    placement = ExpertPlacement.contiguous(4, 2)
    loads = LoadAccumulator("x", placement, 1, "cpu")
    for i in range(200):
        loads.observe(torch.full((3, 1), i % 4, dtype=torch.uint8))
    big = torch.zeros(40_000, 1, dtype=torch.int64)
    for _ in range(3):
        loads.observe(big)
    got = loads.result()
    assert (got.forwards, got.tokens, got.assignments) == (203, 120_600, 120_600)
    assert got.expert_loads_before == [120_150, 150, 150, 150]
    assert got.capped_forwards == got.dropped == got.extras == 0
    assert got.device_peak_to_mean_before == got.worst_device_peak_to_mean_before == 2.0
    assert got.expert_peak_to_mean_after == 4.0
    assert got.straggler_loss_before == 0.5
    assert isinstance(got, LayerStats)


def test_pending_forwards_do_not_pile_up() -> None:
    placement = ExpertPlacement.contiguous(4, 2)
    loads = LoadAccumulator("x", placement, 1, "cpu")
    for _ in range(1000):
        loads.observe(torch.zeros(1, 1, dtype=torch.int64))
        assert len(loads._pending) < 256
    for _ in range(10):
        loads.observe(torch.zeros(30_000, 1, dtype=torch.int64))
        assert sum(len(ids) for ids, _ in loads._pending) < 2**16


@pytest.mark.parametrize(
    ("ratio", "loss"), [(1.0, 0.0), (0.5, 0.0), (0.0, 0.0), (2.0, 0.5), (4, 0.75)]
)
def test_straggler_loss(ratio: float, loss: float) -> None:
    assert straggler_loss(ratio) == loss
