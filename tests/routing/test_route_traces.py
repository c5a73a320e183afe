"""Routing of real models: the oracle and the invariants on every layer of the traces."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agreement import assert_agrees
from strategies import Case

from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs, route

FILES = {  # name: experts, layers
    "esft_v2lite_intent.npz": (64, 26),
    "esft_v2lite_law.npz": (64, 26),
    "gpt_oss_20b_decode.npz": (32, 24),
}
FACTORS = [0.75, 1.0, 1.1, 1.5]


@cache
def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as stored:
        return {name: stored[name] for name in ("topk_ids", "topk_weights")} | {
            "lengths": stored["sample_lengths"] if "sample_lengths" in stored else np.array([])
        }


def layer_of(folder: Path, name: str, layer: int) -> RoutingInputs:
    """All tokens of a layer; gpt-oss: the 64 sequences of a step after each other."""
    if not (folder / name).is_file():
        pytest.skip(f"{name} is not in {folder}")
    stored = arrays(folder / name)
    ids, weights = stored["topk_ids"][layer], stored["topk_weights"][layer]
    if ids.ndim == 3:  # [sequences, steps, k]
        requests = np.tile(np.arange(ids.shape[0]), ids.shape[1])
        ids, weights = (x.swapaxes(0, 1).reshape(-1, x.shape[-1]) for x in (ids, weights))
    else:
        requests = np.repeat(np.arange(len(stored["lengths"])), stored["lengths"])
    t_weights = torch.from_numpy(np.ascontiguousarray(weights))
    return RoutingInputs(
        topk_ids=torch.from_numpy(np.ascontiguousarray(ids)),
        topk_weights=t_weights,
        topk_scores=t_weights.float(),
        token_request=torch.from_numpy(requests),
        num_experts=FILES[name][0],
        layer=layer,
    )


def rows(inputs: RoutingInputs, chosen: torch.Tensor) -> RoutingInputs:
    changed: dict[str, Any] = {}
    for name in ("topk_ids", "topk_weights", "topk_scores", "token_request"):
        changed[name] = getattr(inputs, name)[chosen]
    return dataclasses.replace(inputs, **changed)


CASES = [(name, layer) for name, (_, layers) in FILES.items() for layer in range(layers)]


@pytest.mark.parametrize(("name", "layer"), CASES)
def test_real_layers_agree_with_the_oracle(traces_dir: Path, name: str, layer: int) -> None:
    whole = layer_of(traces_dir, name, layer)
    T = whole.topk_ids.shape[0]
    start = 64 * (layer * 7 % (T // 64 - 2))
    some = rows(whole, torch.arange(start, start + 128))
    placement = ExpertPlacement.contiguous(FILES[name][0], 8)
    for unit in ("device", "expert"):
        for i, factor in enumerate(FACTORS):
            pool = ("batch", "request")[(layer + i) % 2]
            policy = CapacityPolicy(capacity_factor=factor, unit=unit, pool=pool, min_expert_load=0)
            assert_agrees(Case(some, policy, placement))


@pytest.mark.parametrize(("name", "layer"), CASES)
def test_real_layers_keep_the_invariants(traces_dir: Path, name: str, layer: int) -> None:
    inputs = layer_of(traces_dir, name, layer)
    experts = FILES[name][0]
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


@pytest.mark.parametrize("layer", range(0, 24, 5))
def test_real_decode_steps_agree_with_the_oracle(traces_dir: Path, layer: int) -> None:
    whole = layer_of(traces_dir, "gpt_oss_20b_decode.npz", layer)
    placement = ExpertPlacement.contiguous(32, 4)
    for step in (0, 90, 191):
        some = rows(whole, torch.arange(64 * step, 64 * step + 64))
        for keep in ("score", "random", "last"):
            policy = CapacityPolicy(capacity_factor=1.25, keep=keep, min_expert_load="auto")
            a = assert_agrees(Case(some, policy, placement))
            assert bool((a.capacity < 2**63 - 1).all())  # 64 * 4 / 32 is the CPU's minimum of 8
