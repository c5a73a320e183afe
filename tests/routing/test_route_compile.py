"""Compiled, routing and counting are one graph for any number of tokens, and say the same."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from test_route_static import POLICIES, batch
from torch._dynamo.testing import CompileCounterWithBackend

from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs, route
from paceline.routing.stats import LoadAccumulator

TENSORS = [f.name for f in dataclasses.fields(RoutingInputs)
           if isinstance(getattr(batch(4, 8, 2, 0), f.name), torch.Tensor)]  # fmt: skip
TOKENS = [24, 37, 5, 64]
no_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler"
)
backends = pytest.mark.parametrize(
    "backend",
    [
        pytest.param("eager", marks=pytest.mark.full),
        "aot_eager",
        pytest.param("inductor", marks=[pytest.mark.full, no_compiler]),
    ],
)
usual = ("source", "fill")
every_policy = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * (n not in usual)) for n in POLICIES]
)


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def policy_of(name: str) -> CapacityPolicy:
    return CapacityPolicy(**{"capacity_factor": 0.75, "min_expert_load": 0, **POLICIES[name]})


def step_of(policy: CapacityPolicy, placement: ExpertPlacement | None) -> Callable[..., Any]:
    """Routes tensors, and returns everything an assignment says."""

    def step(*tensors: torch.Tensor) -> list[torch.Tensor]:
        inputs = RoutingInputs(**dict(zip(TENSORS, tensors, strict=True)), layer=1)
        a = route(inputs, policy, placement)
        return [
            a.topk_ids, a.topk_weights, a.kept, a.capacity, a.dropped, a.extras,
            a.loads_before, a.loads_after, a.expert_loads_after,
        ]  # fmt: skip

    return step


def check(
    step: Callable[..., Any],
    compiled: Callable[..., Any],
    mark: bool = False,
    several: Sequence[int] = TOKENS,
) -> None:
    """Whatever the number of tokens, the same bits."""
    for seed, tokens in enumerate(several):
        inputs = batch(tokens, 8, 2, seed)
        tensors = [getattr(inputs, name) for name in TENSORS]
        if mark:
            for tensor in tensors:
                torch._dynamo.mark_dynamic(tensor, 0)  # fails where a size is taken as a constant
        for got, want in zip(compiled(*tensors), step(*tensors), strict=True):
            assert torch.equal(got, want), tokens


@every_policy
def test_one_graph_serves_any_number_of_tokens(name: str) -> None:
    step = step_of(policy_of(name), ExpertPlacement.contiguous(8, 4))
    for mark in (True, False):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        dynamic = None if mark else True
        compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=dynamic)
        check(step, compiled, mark, TOKENS[:1])
        graphs = counter.frame_count  # with every size unknown the first call may start over once
        check(step, compiled, mark)
        assert counter.frame_count == graphs, "recompiled for a new number of tokens"
        assert not mark or graphs == 1


@backends
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        ("shadow", True),
        *[
            pytest.param(name, dynamic, marks=pytest.mark.full)
            for name, dynamic in (
                ("source", True),
                ("fill", True),
                ("source", None),
                ("fill", None),
                ("shadow", None),
            )
        ],
    ],
)
def test_every_backend_of_torch_says_the_same(
    name: str, backend: str, dynamic: bool | None
) -> None:
    step = step_of(policy_of(name), ExpertPlacement.contiguous(8, 4))
    check(step, torch.compile(step, fullgraph=True, backend=backend, dynamic=dynamic))


@backends
def test_without_a_placement_or_a_cap(backend: str) -> None:
    for policy in (policy_of("expert"), CapacityPolicy()):
        torch._dynamo.reset()
        step = step_of(policy, None)
        check(step, torch.compile(step, fullgraph=True, backend=backend, dynamic=True))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint8,
        *[pytest.param(d, marks=pytest.mark.full) for d in (torch.int8, torch.int32, torch.uint16)],
    ],
    ids=str,
)
def test_ids_of_any_dtype_compile(dtype: torch.dtype) -> None:
    experts = torch.iinfo(dtype).max + 1 if dtype.itemsize == 1 else 300
    policy = policy_of("request")

    def step(ids: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        request = ids[:, 0].long() % 3
        a = route(RoutingInputs(ids, torch.ones(ids.shape), scores, token_request=request), policy)
        return a.topk_ids, a.expert_loads_before

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in TOKENS:
        scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens))
        ids = scores.topk(2, dim=1).indices
        for got, want in zip(compiled(ids.to(dtype), scores), step(ids, scores), strict=True):
            assert torch.equal(got, want)


@backends
@pytest.mark.parametrize("dynamic", [True, pytest.param(None, marks=pytest.mark.full)])
def test_counting_compiles(backend: str, dynamic: bool | None) -> None:
    """One graph; what it counts is what is counted without it."""
    placement = ExpertPlacement.contiguous(8, 3)
    counts, same = (LoadAccumulator("x", placement, 2, "cpu") for _ in range(2))
    policy = policy_of("source")

    def step(loads: LoadAccumulator, *tensors: torch.Tensor) -> torch.Tensor:
        inputs = RoutingInputs(**dict(zip(TENSORS, tensors, strict=True)))
        loads.observe(inputs.topk_ids)
        loads.observe(inputs.topk_ids, inputs.valid)
        a = route(inputs, policy, placement)
        loads.add(a)
        return a.topk_ids

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=dynamic)
    frames = []
    for seed, tokens in enumerate(TOKENS):
        inputs = batch(tokens, 8, 2, seed, devices=3)
        tensors = [getattr(inputs, name) for name in TENSORS]
        assert torch.equal(compiled(counts, *tensors), step(same, *tensors))
        frames.append(counter.frame_count)
    got, want = counts.result().to_dict(), same.result().to_dict()
    assert {k: v for k, v in got.items() if isinstance(v, float)} == pytest.approx(
        {k: v for k, v in want.items() if isinstance(v, float)}
    )
    assert {k: v for k, v in got.items() if not isinstance(v, float)} == {
        k: v for k, v in want.items() if not isinstance(v, float)
    }
    known = 0 if dynamic else 1  # a second number of tokens makes it "any"
    assert frames[known] == frames[-1], "recompiled for a new number of tokens"
