"""Every backend says what the oracle says, ties included; which backend runs where."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from agreement import assert_agrees
from hypothesis import given
from strategies import Case, cases
from torch.utils._python_dispatch import TorchDispatchMode

from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs, route
from paceline.routing.backends import BACKENDS, backend_for, using_backend

INSTALLED = [name for name, library in BACKENDS.items() if not library or find_spec(library)]
SLOW = [pytest.param(name, marks=[pytest.mark.full] * (name == "cuda")) for name in INSTALLED]


everywhere = pytest.mark.parametrize("backend", SLOW)  # the interpreter takes some 50 ms a call


def check(backend: str, case: Case) -> None:
    """The interpreter is slow, so it gets a third of the cases."""
    if backend != "cuda" or case.inputs.topk_ids.shape[0] % 3 == 0:
        with using_backend(backend):
            assert_agrees(case)


@everywhere
@given(case=cases(expansion=False, min_expert_load=0))
def test_token_drop(backend: str, case: Case) -> None:
    check(backend, case)


@everywhere
@given(case=cases(expansion=True, min_expert_load=0))
def test_expanded_drop(backend: str, case: Case) -> None:
    check(backend, case)


@everywhere
@given(case=cases(phase="prefill"))
def test_pools_decide_for_themselves(backend: str, case: Case) -> None:
    if backend == "cuda" and case.inputs.topk_ids.shape[0] % 3:
        return  # the interpreter is slow
    pool = "source" if case.inputs.token_request is None else "request"
    if pool == "request" or case.inputs.token_source is not None:
        check(backend, Case(case.inputs, case.policy.replace(pool=pool), case.placement))


@everywhere
@given(case=cases())
def test_every_threshold(backend: str, case: Case) -> None:
    check(backend, case)


@pytest.mark.parametrize("backend", INSTALLED)
@pytest.mark.parametrize("changes", [{}, {"expand": "all", "expand_limit": 3}, {"keep": "random"}])
@pytest.mark.parametrize(
    ("shape", "unit", "ties"),
    [
        ((300, 8, 2), "device", True),
        ((1000, 16, 4), "expert", True),
        ((1000, 16, 4), "device", False),
    ],
)
def test_backends_agree_on_larger_batches(
    backend: str, changes: dict[str, Any], shape: tuple[int, int, int], unit: str, ties: bool
) -> None:
    if backend == "cuda":  # slow in the interpreter
        shape = (100, *shape[1:])
    inputs, placement = batch(*shape, ties=ties), ExpertPlacement.contiguous(shape[1], 4)
    policy = CapacityPolicy(capacity_factor=0.9, unit=unit, min_expert_load=0, **changes)
    with using_backend(backend):
        got = route(inputs, policy, placement)
    with using_backend("plain"):
        want = route(inputs, policy, placement)
    assert torch.equal(got.kept, want.kept)
    assert torch.equal(got.topk_ids, want.topk_ids)
    torch.testing.assert_close(got.topk_weights, want.topk_weights, rtol=1e-6, atol=0)
    assert (got.loads_after <= got.capacity).all()


def batch(tokens: int, experts: int, k: int, ties: bool = False) -> RoutingInputs:
    """Routing that favours some experts; with `ties`, few different scores."""
    rng = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, experts, generator=rng) + torch.linspace(0, 1, experts)
    scores = (logits.round() if ties else logits).softmax(1)
    weights, ids = scores.topk(k, dim=1)
    return RoutingInputs(ids, weights, scores)


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not find_spec("triton"), reason="no triton")
def test_three_launches_are_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token Drop on CUDA: of torch only memory and views, so the three kernels are all."""
    from paceline.routing.backends import triton_kernels

    launched = []

    class Counted:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(triton_kernels, name)

        def __getitem__(self, grid: tuple[int]) -> Any:
            launched.append(self.name)
            return self.kernel[grid]

    for name in ("prepare", "threshold", "apply"):
        monkeypatch.setattr(triton_kernels, name, Counted(name))
    inputs = batch(64, 8, 2)
    policy = CapacityPolicy(capacity_factor=1.0, min_expert_load=0)
    with using_backend("cuda"):
        route(inputs, policy)  # its tables are copied once
        launched.clear()
        with Operations() as operations:
            route(inputs, policy)
    assert launched == ["prepare", "threshold", "apply"]
    interpreter = {"set_", "copy_", "new_empty"}
    memory = {"empty", "empty_like", "view", "detach"}
    assert set(operations.seen) <= memory | interpreter, operations.seen


def test_the_usual_choice() -> None:
    inputs = batch(8, 4, 2)
    name = backend_for(inputs).__name__.rpartition(".")[2]
    assert name == ("native" if find_spec("numba") else "plain")
    inputs.topk_weights.requires_grad_()
    assert backend_for(inputs).__name__.endswith("plain")  # which has gradients
    with torch.no_grad():
        assert backend_for(inputs).__name__.rpartition(".")[2] == name


def test_gradients_reach_the_weights() -> None:
    inputs = batch(40, 4, 2)
    inputs.topk_weights.requires_grad_()
    a = route(inputs, CapacityPolicy(capacity_factor=0.5, min_expert_load=0))
    a.topk_weights.sum().backward()
    assert torch.equal(inputs.topk_weights.grad, a.kept.float())


@pytest.mark.parametrize("name", ["sort", "Native"])
def test_an_unknown_backend_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name), using_backend(name):
        pass


def test_a_backend_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "absent", "no_such_library")
    with pytest.raises(ValueError, match="no_such_library"), using_backend("absent"):
        pass
