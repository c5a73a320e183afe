"""Expert ids come in any integer dtype, also one that doesn't hold the number of experts."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from agreement import listed

from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs, route
from paceline.routing.backends import BACKENDS, using_backend
from paceline.routing.stats import LoadAccumulator

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
POLICIES: dict[str, dict[str, Any]] = {
    "drop": {},
    "expand": {"expand": "all", "expand_limit": 3},
    "compete": {"expand": "own_device", "expand_rule": "compete", "expand_limit": 2},
    "shadow": {"mode": "shadow", "pool": "request"},
    "observe": {"mode": "observe"},
}
INSTALLED = [name for name, library in BACKENDS.items() if not library or find_spec(library)]
SLOW = [pytest.param(name, marks=[pytest.mark.full] * (name == "cuda")) for name in INSTALLED]


def edges(dtype: torch.dtype) -> list[int]:
    """Numbers of experts around the largest id of a dtype, or some usual ones."""
    most = torch.iinfo(dtype).max
    return [most, most + 1, most + 2] if most < 1000 else [7, 300]


def batch(experts: int, tokens: int = 96) -> RoutingInputs:
    """Busy experts at both ends of the ids."""
    rng = np.random.default_rng(experts)
    scores = rng.random((tokens, experts), dtype=np.float32)
    scores[:, [0, experts - 1]] += 0.5
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :2].astype(np.int64)
    weights = np.take_along_axis(scores, ids, 1)
    labels = torch.arange(tokens) % 3
    return RoutingInputs(
        *map(torch.from_numpy, (ids, weights, scores)), token_request=labels, token_source=labels
    )


def typed(inputs: RoutingInputs, dtype: torch.dtype) -> RoutingInputs:
    """The same call with ids of another dtype, and only ids that it holds."""
    fields = {**vars(inputs), "topk_ids": inputs.topk_ids.to(dtype)}
    return RoutingInputs(**fields)


@pytest.mark.parametrize("backend", SLOW)
@pytest.mark.parametrize("name", POLICIES)
def test_the_dtype_of_ids_never_matters(name: str, backend: str) -> None:
    policy = CapacityPolicy(**{"capacity_factor": 0.8, "min_expert_load": 0, **POLICIES[name]})
    few = 24 if backend == "cuda" else 96  # the interpreter is slow
    for dtype in DTYPES if backend != "cuda" else [torch.uint8, torch.int8, torch.uint16]:
        for experts in edges(dtype):
            wide = batch(experts, few)
            fits = wide.topk_ids <= min(torch.iinfo(dtype).max, 2**62)
            wide = RoutingInputs(**{**vars(wide), "topk_ids": torch.where(fits, wide.topk_ids, 1)})
            placement = ExpertPlacement.contiguous(experts, 3)
            with using_backend(backend):
                got = route(typed(wide, dtype), policy, placement)
            want = route(wide, policy, placement)
            assert listed(got) == listed(want), (dtype, experts)
            assert got.expert_loads_before.sum() == wide.topk_ids.numel()
            assert got.expert_loads_before.tolist() == want.expert_loads_before.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_count_ids_of_any_dtype(dtype: torch.dtype) -> None:
    for experts in edges(dtype):
        ids = batch(experts).topk_ids.clamp(max=min(torch.iinfo(dtype).max, 2**62))
        loads = LoadAccumulator("x", ExpertPlacement.contiguous(experts, 2), 2, "cpu")
        loads.observe(ids.to(dtype))
        loads.observe(ids)  # beside others
        loads.observe(ids.to(torch.uint8 if experts <= 256 else torch.uint16))
        want = 3 * np.bincount(ids.flatten().numpy(), minlength=experts)
        assert loads.result().expert_loads_before == want.tolist()


@pytest.mark.parametrize("backend", SLOW)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ids_out_of_range_are_no_assignment(dtype: torch.dtype, backend: str) -> None:
    most, least = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    values = [0, most, 1, least, 2, 3, 4, min(most, 255)]
    array = np.array(values, dtype=str(dtype).removeprefix("torch."))
    ids = torch.from_numpy(array[:, None])
    inputs = RoutingInputs(ids, torch.ones(8, 1), num_experts=4)
    policy = CapacityPolicy(capacity_factor=100, keep="first", min_expert_load=0)
    with using_backend(backend):
        a = route(inputs, policy)
    assert a.kept[:, 0].tolist() == [0 <= v < 4 for v in values]
    assert a.expert_loads_before.tolist() == [values.count(e) for e in range(4)]
    loads = LoadAccumulator("x", ExpertPlacement.per_expert(4), 1, "cpu")
    loads.observe(ids)
    assert loads.result().expert_loads_before == [values.count(e) for e in range(4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64], ids=str)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    ids = torch.zeros(3, 1, dtype=dtype)
    loads = LoadAccumulator("x", ExpertPlacement.per_expert(4), 1, "cpu")
    for refused in (lambda: RoutingInputs(ids, torch.ones(3, 1)), lambda: loads.observe(ids)):
        with pytest.raises(ValueError, match="integer dtype"):
            refused()
