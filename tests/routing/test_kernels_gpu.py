"""What only a CUDA machine can show: real kernels, no sync, CUDA graphs. Skipped elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline import Assignment, CapacityPolicy, ExpertPlacement, RoutingInputs, route
from paceline.routing.backends import using_backend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

POLICIES: dict[str, dict[str, Any]] = {
    "device": {},
    "expert": {"unit": "expert", "capacity_factor": 1.1},
    "weight": {"keep": "weight"},
    "first": {"keep": "first"},
    "last": {"keep": "last"},
    "random": {"keep": "random", "seed": 5},
    "source": {"pool": "source"},
    "prefill": {"phase": "prefill"},
    "fill": {"expand": "own_device", "unit": "expert"},
    "substitutes": {"expand": "all", "expand_limit": 4, "max_experts": 8},
    "compete": {"expand": "all", "expand_limit": 4, "expand_rule": "compete", "max_experts": 9},
}
SHAPES = [(512, 8, 2), (4096, 64, 8), (1000, 128, 8)]


def policy(name: str) -> CapacityPolicy:
    """A policy that binds."""
    fields = {"capacity_factor": 0.9, "min_expert_load": 0, **POLICIES[name]}
    return CapacityPolicy(**fields)


def batch(tokens: int, experts: int, k: int, seed: int, ties: bool = False) -> dict[str, Any]:
    """Inputs with every optional tensor, on the CPU."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=rng) + torch.linspace(0, 1, experts)
    scores = (logits.round() if ties else logits).softmax(1)
    weights, ids = scores.topk(k, dim=1)
    return {
        "topk_ids": ids,
        "topk_weights": weights,
        "scores": scores,
        "valid": torch.rand(tokens, generator=rng) < 0.95,
        "token_source": torch.randint(4, (tokens,), generator=rng),
        "token_priority": torch.randint(-1, 2, (tokens,), generator=rng),
        "token_decode": torch.rand(tokens, generator=rng) < 0.1,
    }


def routed(tensors: dict[str, Any], name: str) -> Assignment:
    """Route on the device where the tensors are."""
    experts = tensors["scores"].shape[1]
    return route(RoutingInputs(**tensors), policy(name), ExpertPlacement.contiguous(experts, 4))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", POLICIES)
def test_the_gpu_says_what_the_cpu_says(name: str, shape: tuple[int, int, int], ties: bool) -> None:
    tensors = batch(*shape, seed=1, ties=ties)
    with using_backend("plain"):
        want = routed(tensors, name)
    on_gpu = {key: value.cuda() for key, value in tensors.items()}
    for backend in ("cuda", "plain"):
        with using_backend(backend):
            got = routed(on_gpu, name)
        assert torch.equal(got.kept.cpu(), want.kept)
        assert torch.equal(got.topk_ids.cpu(), want.topk_ids)
        torch.testing.assert_close(got.topk_weights.cpu(), want.topk_weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_waits_for_the_device(name: str) -> None:
    tensors = {key: value.cuda() for key, value in batch(4096, 64, 8, seed=2).items()}
    routed(tensors, name)  # tables are copied and kernels compiled once
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        routed(tensors, name)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", POLICIES)
def test_a_captured_graph_routes_changed_inputs(name: str) -> None:
    """The number of valid tokens changes between replays as well."""
    static = {key: value.cuda() for key, value in batch(2048, 64, 8, seed=3).items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        routed(static, name)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = routed(static, name)
    for seed in (4, 5):
        fresh = batch(2048, 64, 8, seed=seed)
        fresh["valid"] &= torch.arange(2048) < 500 * seed - 1200
        for key, value in fresh.items():
            static[key].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        with using_backend("plain"):
            want = routed(fresh, name)
        assert torch.equal(got.topk_ids.cpu(), want.topk_ids)
        assert torch.equal(got.kept.cpu(), want.kept)
