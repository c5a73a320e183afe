"""Routing of real models: the oracle and the invariants on every layer of the traces."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from agreement import assert_agrees
from real_traces import NAMES, arrays
from strategies import Case

from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs, route

EXPERTS = dict(zip(NAMES, (64, 64, 32), strict=True))
FACTORS = [0.75, 1.0, 1.1, 1.5]


def layer_of(name: str, layer: int) -> RoutingInputs:
    """All tokens of a layer; gpt-oss: the 64 sequences of a step after each other."""
    stored = arrays(name)
    ids, weights = stored["topk_ids"][layer], stored["topk_weights"][layer]
    if ids.ndim == 3:  # [sequences, steps, k]
        requests = np.tile(np.arange(ids.shape[0]), ids.shape[1])
        ids, weights = (x.swapaxes(0, 1).reshape(-1, x.shape[-1]) for x in (ids, weights))
    else:
        lengths = stored["sample_lengths"]
        requests = np.repeat(np.arange(len(lengths)), lengths)
    t_weights = torch.from_numpy(np.ascontiguousarray(weights))
    return RoutingInputs(
        topk_ids=torch.from_numpy(np.ascontiguousarray(ids)),
        topk_weights=t_weights,
        topk_scores=t_weights.float(),
        token_request=torch.from_numpy(requests),
        num_experts=EXPERTS[name],
        layer=layer,
    )


def rows(inputs: RoutingInputs, chosen: torch.Tensor) -> RoutingInputs:
    changed: dict[str, Any] = {}
    for name in ("topk_ids", "topk_weights", "topk_scores", "token_request"):
        changed[name] = getattr(inputs, name)[chosen]
    return dataclasses.replace(inputs, **changed)


# one layer of each model in the first tier
CASES = [
    pytest.param(name, layer, marks=[pytest.mark.full] * (layer != 3))
    for name in NAMES
    for layer in range(len(arrays(name)["topk_ids"]))
]


@pytest.mark.parametrize(("name", "layer"), CASES)
def test_real_layers_agree_with_the_oracle(name: str, layer: int) -> None:
    whole = layer_of(name, layer)
    T = whole.topk_ids.shape[0]
    start = 64 * (layer * 7 % (T // 64 - 2))
    some = rows(whole, torch.arange(start, start + 128))
    placement = ExpertPlacement.contiguous(EXPERTS[name], 8)
    for unit in ("device", "expert"):
        for i, factor in enumerate(FACTORS):
            pool = ("batch", "request")[(layer + i) % 2]
            policy = CapacityPolicy(capacity_factor=factor, unit=unit, pool=pool, min_expert_load=0)
            assert_agrees(Case(some, policy, placement))


@pytest.mark.parametrize(("name", "layer"), CASES)
def test_real_layers_keep_the_invariants(name: str, layer: int) -> None:
    inputs = layer_of(name, layer)
    experts = EXPERTS[name]
    placement = ExpertPlacement.contiguous(experts, 8)
    for unit in ("device", "expert"):
        policy = CapacityPolicy(unit=unit, min_expert_load=0, capacity_factor=1.0)
        previous = torch.zeros_like(inputs.topk_ids, dtype=torch.bool)
        for factor in (0.75, 1.1, 2.0):
            a = route(inputs, policy.replace(capacity_factor=factor), placement)
            assert torch.equal(a.loads_after, torch.minimum(a.loads_before, a.capacity))
            assert not (previous & ~a.kept).any()
            assert a.kept.sum() == a.loads_after.sum() == a.expert_loads_after.sum()
            hosts = torch.tensor(placement.expert_to_device)
            unit_of = hosts if unit == "device" else torch.arange(experts)
            worst_kept = torch.full((a.capacity.shape[1],), torch.inf)
            best_lost = torch.full((a.capacity.shape[1],), -torch.inf)
            units = unit_of[inputs.topk_ids.long()].flatten()
            scores, kept = inputs.topk_scores.flatten(), a.kept.flatten()
            worst_kept.scatter_reduce_(0, units[kept], scores[kept], "amin")
            best_lost.scatter_reduce_(0, units[~kept], scores[~kept], "amax")
            assert (worst_kept >= best_lost).all()
            previous = a.kept


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(layer, marks=[pytest.mark.full] * (layer > 0))
        for layer in range(0, len(arrays(NAMES[2])["topk_ids"]), 5)
    ],
)
def test_real_decode_steps_agree_with_the_oracle(layer: int) -> None:
    whole = layer_of(NAMES[2], layer)
    placement = ExpertPlacement.contiguous(32, 4)
    steps = whole.topk_ids.shape[0] // 64
    for step in (0, steps // 2, steps - 1):
        some = rows(whole, torch.arange(64 * step, 64 * step + 64))
        for keep in ("score", "random", "last"):
            policy = CapacityPolicy(capacity_factor=1.25, keep=keep, min_expert_load="auto")
            a = assert_agrees(Case(some, policy, placement))
            assert bool((a.capacity < 2**63 - 1).all())  # 64 * 4 / 32 is the CPU's minimum of 8
