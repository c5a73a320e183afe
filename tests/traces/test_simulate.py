"""Simulation is routing: equal to `route` and to the oracle, to the assignment."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_traces import count_trace, traces
from oracle import Expected, route_oracle
from strategies import placements, policies

from paceline import Assignment, CapacityPolicy, ExpertPlacement, RoutingInputs, route
from paceline.plan import Plan
from paceline.traces import Trace, sample
from paceline.traces.simulate import simulate


def batches_of(trace: Trace) -> list[list[RoutingInputs]]:
    """[layers][batches] what each layer got, cut from the chunks by hand."""
    found: list[list[RoutingInputs]] = [[] for _ in trace.header.layers]
    for chunk in trace.chunks:
        bounds = chunk.starts.tolist()
        for layer, described in enumerate(trace.header.layers):
            for start, end in pairwise(bounds):
                facts: dict[str, Any] = {}
                for name in ("valid", "request", "source", "priority"):
                    tensor = getattr(chunk, name)
                    if tensor is not None:
                        row = tensor[layer] if tensor.dim() == 2 else tensor
                        facts[name if name == "valid" else f"token_{name}"] = row[start:end]
                if chunk.phase is not None:
                    row = chunk.phase[layer] if chunk.phase.dim() == 2 else chunk.phase
                    facts["token_decode"] = row[start:end] == 1
                found[layer].append(
                    RoutingInputs(
                        topk_ids=chunk.ids[layer, start:end],
                        topk_weights=chunk.weights[layer, start:end],
                        scores=None if chunk.scores is None else chunk.scores[layer, start:end],
                        topk_scores=None
                        if chunk.topk_scores is None
                        else chunk.topk_scores[layer, start:end],
                        num_experts=described.experts,
                        layer=layer,
                        step=len(found[layer]),
                        **facts,
                    )
                )
    return found


@st.composite
def cases(draw: Any) -> tuple[Trace, Plan]:
    trace = draw(traces())
    experts, k = trace.header.experts, trace.header.k
    known = {name for chunk in trace.chunks for name in chunk.tensors()}
    expansion = False if trace.header.content == "choices" else None
    policy = draw(policies(k=k, expansion=expansion))
    placement = draw(placements(experts, optional=False))
    if policy.pool == "source" and "source" not in known:
        policy = policy.replace(pool="batch")
    if policy.pool == "request" and "request" not in known:
        policy = policy.replace(pool="batch")
    if policy.expand == "own_device" and "source" not in known:
        policy = policy.replace(expand="all")
    if policy.keep == "contribution":  # no trace holds what that needs
        policy = policy.replace(keep="score")
    largest = max(placement.sizes)
    if largest > 1 and policy.pool != "request" and policy.phase == "all" and draw(st.booleans()):
        enough = draw(st.sampled_from([0.5, 2, 5]))  # rows an expert: batches have up to 11 tokens
        policy = policy.replace(max_active=draw(st.integers(1, largest - 1)),
                                min_expert_load=enough)  # fmt: skip
        if draw(st.booleans()) and policy.expand is None:
            policy = policy.replace(capacity_factor=None)
    return trace, Plan((policy,), (placement,))


@given(case=cases())
def test_what_is_simulated_is_what_route_and_the_oracle_do(case: tuple[Trace, Plan]) -> None:
    trace, plan = case
    policy, placement = plan.policies[0], plan.placements[0]
    assert isinstance(placement, ExpertPlacement)
    seen: dict[tuple[int, int], Assignment] = {}

    def watch(name: str, layer: int, step: int, assignment: Assignment) -> None:
        assert name == "it"
        seen[layer, step] = assignment

    watched = simulate(trace, {"it": plan}, watch=watch)
    assert simulate(trace, {"it": plan}) == watched  # batches that fit are rightly not routed
    result = watched.to_dict()["plans"]["it"]
    whole, kept = np.sum([each.gate_mass for each in seen.values()], axis=0)
    lost = result["overall"]["gate_mass_lost"]
    assert math.isclose(lost, 1 - kept / whole if whole > 0 else 0.0, abs_tol=1e-9)
    inputs = batches_of(trace)
    assert len(seen) == sum(map(len, inputs))
    for layer, of_layer in enumerate(inputs):
        wanted: list[Expected] = []
        for step, given_inputs in enumerate(of_layer):
            got, routed = seen[layer, step], route(given_inputs, policy, placement)
            expected = route_oracle(given_inputs, policy, placement)
            assert got.topk_ids.tolist() == routed.topk_ids.tolist() == expected.topk_ids
            assert got.kept.tolist() == routed.kept.tolist() == expected.kept
            assert got.capacity.tolist() == expected.capacity
            wanted.append(expected)
        nothing = 0
        for x in of_layer:
            real = (x.topk_ids < placement.num_experts).any(1)
            real = real if x.valid is None else real & x.valid
            nothing += int((~real).sum())
        enforced = policy.mode == "enforce"
        assert_sums(result["layers"][layer], wanted, placement, enforced, nothing)


def assert_sums(
    got: dict[str, Any], wanted: list[Expected], placement: ExpertPlacement, enforced: bool,
    nothing: int,
) -> None:  # fmt: skip
    """The figures of a layer, from what the oracle says of its batches.

    `enforced`: not in shadow. `nothing`: rows that have no assignment to lose.
    """
    hosts = placement.expert_to_device

    def busiest(loads: list[int]) -> int:
        devices = [0] * placement.num_devices
        for expert, load in enumerate(loads):
            devices[hosts[expert]] += load
        return max(devices)

    assignments = [sum(e.expert_loads_before) for e in wanted]
    assert got["assignments"] == sum(assignments)
    assert got["dropped"] == sum(e.dropped for e in wanted)
    assert got["extras"] == sum(e.extras for e in wanted)
    E = placement.num_experts
    lost = 0
    for said in wanted:  # in shadow, what is kept shows in the loads alone
        lost += sum(all(i == E for i in row) for row in said.topk_ids)
    if enforced:
        assert got["lost_tokens"] == lost - nothing
    assert got["expert_loads_after"] == np.sum(
        [e.expert_loads_after for e in wanted], axis=0
    ).tolist()  # fmt: skip

    def most_active(loads: list[int]) -> int:
        return max(sum(loads[e] > 0 for e in placement.experts_of(d))
                   for d in range(placement.num_devices))  # fmt: skip

    for key, tables in (
        ("most_active_experts_before", [e.expert_loads_before for e in wanted]),
        ("most_active_experts", [e.expert_loads_after for e in wanted]),
    ):
        assert got[key] == pytest.approx(np.mean([most_active(table) for table in tables]))
    before = [busiest(e.expert_loads_before) for e in wanted]
    after = [busiest(e.expert_loads_after) for e in wanted]
    means = [n / placement.num_devices for n in assignments]
    for key, peaks in (("device_peak_to_mean_before", before), ("device_peak_to_mean", after)):
        spread = got[key]
        if not sum(means):
            assert spread["mean"] is None
            continue
        ratios = [p / m for p, m in zip(peaks, means, strict=True) if m]
        assert math.isclose(spread["mean"], sum(peaks) / sum(means), rel_tol=1e-6)
        assert math.isclose(spread["max"], max(ratios), rel_tol=1e-6, abs_tol=1e-9)
        assert math.isclose(spread["p50"], float(np.median(ratios)), rel_tol=1e-6, abs_tol=1e-9)


def test_a_batch_just_large_enough_is_capped() -> None:
    """64 sequences x 4 / 32 experts is a mean of 8 exactly."""
    trace = sample("gpt_oss_20b_decode")
    dropped = {}
    for enough in (8, 8.01):
        policy = CapacityPolicy(capacity_factor=1.0, min_expert_load=enough)
        overall = simulate(trace, {"it": Plan((policy,), (8,))}).plans["it"].overall
        dropped[enough] = overall.dropped, overall.batches_below_min_expert_load
    assert dropped[8][0] > 0
    assert dropped[8][1] == 0
    assert dropped[8.01] == (0, 64 * 6)


def test_max_active_rules_small_batches_alone() -> None:
    """Steps of 64 x 4 / 32 are 8 rows an expert: below 8.01 devices read few experts."""
    trace = sample("gpt_oss_20b_decode")
    plans = {
        f"{most} {enough} {gamma}": Plan(
            (CapacityPolicy(max_active=most, min_expert_load=enough, capacity_factor=gamma),), (8,)
        )
        for most, enough, gamma in ((2, 8, None), (2, 8.01, None), (3, 8.01, 1.0), (3, 8, 1.0))
    }
    found = {name: each.overall for name, each in simulate(trace, plans).plans.items()}
    cap = Plan((CapacityPolicy(capacity_factor=1.0, min_expert_load=8),), (8,))
    wanted = simulate(trace, {"it": cap}).plans["it"].overall
    assert found["2 8 None"].dropped == found["2 8 None"].batches_ruled_by_max_active == 0
    assert found["3 8 1.0"].dropped == wanted.dropped > 0
    for name, most in (("2 8.01 None", 2), ("3 8.01 1.0", 3)):
        assert found[name].batches_ruled_by_max_active == 64 * 6
        assert 3.5 < found[name].most_active_experts_before <= 4
        assert found[name].most_active_experts <= most
        assert found[name].gate_mass_lost < found[name].dropped_share
    lacking = Trace(
        trace.header, [dataclasses.replace(chunk, weights=None) for chunk in trace.chunks]
    )
    with pytest.raises(ValueError, match="max_active=2 needs weights"):
        simulate(lacking, {"it": plans["2 8.01 None"]})


def test_several_plans_and_layers_of_their_own() -> None:
    trace = sample("esft_v2lite_law")
    layers = len(trace.header.layers)
    factors = [0.5 + 0.25 * layer for layer in range(layers)]
    by_layer = Plan(
        tuple(CapacityPolicy(capacity_factor=f, min_expert_load=0) for f in factors),
        tuple(ExpertPlacement.contiguous(64, 4 + layer) for layer in range(layers)),
    )
    result = simulate(trace, {"none": Plan(placements=by_layer.placements), "by layer": by_layer})
    assert result.reference == "none"
    assert result.plans["none"].overall.gain == 1
    assert result.plans["none"].overall.dropped == 0
    for layer, got in enumerate(result.plans["by layer"].layers):
        alone = Plan((by_layer.policies[layer],), (4 + layer,))
        part = simulate(trace.select_layers([layer]), {"it": alone}).plans["it"].layers[0]
        assert part == got
    rows = {n: r.overall.busiest_rows_after for n, r in result.plans.items()}
    gain = result.plans["by layer"].overall.gain
    assert math.isclose(gain, rows["none"] / rows["by layer"])


def test_plans_for_other_devices_are_refused() -> None:
    trace = sample("esft_v2lite_law")
    by_layer = Plan(placements=(8, 8, 8, 8, 8, 4))
    for first, second in ((8, 4), (4, 8)):
        plans = {"one": Plan(placements=(first,)), "two": Plan(placements=(second,))}
        with pytest.raises(ValueError, match=rf"got {first} \(one\) and {second} \(two\)"):
            simulate(trace, plans)
    with pytest.raises(ValueError, match=r"got 8 \(one\) and 4 \(two\)"):
        simulate(trace, {"one": Plan(placements=(8,)), "two": by_layer})
    with pytest.raises(ValueError, match=r"got 8 \(one\) and 64 \(two\)"):
        simulate(trace, {"one": Plan(placements=(8,)), "two": Plan()})


def test_a_cap_bounds_every_batch_of_the_real_traces() -> None:
    for name, experts in (("esft_v2lite_law", 64), ("gpt_oss_20b_decode", 32)):
        trace = sample(name)
        if experts == 64:
            trace = trace.regrouped(1024)
        policy = CapacityPolicy(capacity_factor=1.0, min_expert_load=0)
        overall = simulate(trace, {"cap": Plan((policy,), (8,))}).plans["cap"].overall
        assert overall.device_peak_to_mean.max <= 1.0 + 1 / 32  # the capacity is rounded up
        assert overall.device_peak_to_mean_before.mean > 1.2
        assert 0 < overall.gate_mass_lost < overall.dropped_share


def test_what_the_trace_lacks_is_said() -> None:
    weightless = sample("esft_v2lite_law")
    chunk = dataclasses.replace(next(iter(weightless.chunks)), weights=None)
    weightless = Trace(weightless.header, (chunk,))
    small = {"capacity_factor": 0.5, "min_expert_load": 0}
    for keep, said in (
        ("weight", "needs weights"),
        ("score", "needs scores"),
        ("contribution", "norms"),
    ):
        plan = Plan((CapacityPolicy(keep=keep, **small),), (8,))
        with pytest.raises(ValueError, match=said):
            simulate(weightless, {"it": plan})
    plan = Plan((CapacityPolicy(keep="first", **small),), (8,))
    overall = simulate(weightless, {"it": plan}).plans["it"].overall
    assert overall.gate_mass_lost is None
    assert overall.dropped > 0
    wants = {"scores of all experts": {"expand": "all"}, "token_source": {"pool": "source"}}
    for said, fields in wants.items():
        plan = Plan((CapacityPolicy(**fields, **small),), (8,))
        with pytest.raises(ValueError, match=said):
            simulate(sample("esft_v2lite_law"), {"it": plan})
    with pytest.raises(ValueError, match="holds counts"):
        simulate(count_trace(), {"it": Plan(placements=(2,))})
    with pytest.raises(ValueError, match="must name at least one"):
        simulate(sample("esft_v2lite_law"), {})


def test_a_plan_that_doesnt_fit_is_refused() -> None:
    trace = sample("gpt_oss_20b_decode")
    for plan in (
        Plan(layers=3, placements=(2, 2, 2)),
        Plan(placements=(ExpertPlacement.contiguous(64, 8),)),
        Plan(placements=(64,)),
        Plan((CapacityPolicy(capacity_factor=1.0),), (1,)),
    ):
        with pytest.raises(ValueError, match=r"plan|device"):
            simulate(trace, {"it": plan})


def test_progress_ends_at_its_total() -> None:
    told: list[tuple[int, int, str]] = []
    for trace in (sample("esft_v2lite_law"), sample("esft_v2lite_law").regrouped(1000)):
        told.clear()
        simulate(trace, {"it": Plan(placements=(8,))}, progress=lambda *a: told.append(a))
        assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
        assert all(done <= total for done, total, _ in told)
