"""Bad calls are refused in one sentence that names the argument and what is allowed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs, register_keep, route


def call(**changes: Any) -> RoutingInputs:
    """A good call, changed."""
    scores = torch.rand(6, 4)
    weights, ids = scores.topk(2, dim=1)
    good: dict[str, Any] = {"topk_ids": ids, "topk_weights": weights, "scores": scores}
    return RoutingInputs(**{**good, **changes})


def policy(**changes: Any) -> CapacityPolicy:
    return CapacityPolicy(**{"capacity_factor": 0.5, "min_expert_load": 0, **changes})


TWO = ExpertPlacement.contiguous(4, 2)
BAD: list[tuple[str, dict[str, Any], dict[str, Any], ExpertPlacement | None, str]] = [
    ("float ids", {"topk_ids": torch.rand(6, 2)}, {}, None, "topk_ids"),
    ("ids of numpy", {"topk_ids": np.zeros((6, 2), int)}, {}, None, "topk_ids"),
    ("ids in a list", {"topk_ids": [[0, 1]] * 6}, {}, None, "topk_ids"),
    ("no ids", {"topk_ids": None}, {}, None, "topk_ids"),
    ("no weights", {"topk_weights": None}, {}, None, "topk_weights"),
    ("weights of numpy", {"topk_weights": np.ones((6, 2))}, {}, None, "topk_weights"),
    ("weights of 8 bits", {"topk_weights": torch.ones(6, 2).to(torch.float8_e5m2)}, {}, None,
     "topk_weights"),
    ("complex weights", {"topk_weights": torch.ones(6, 2).cfloat()}, {}, None, "topk_weights"),
    ("scores of numpy", {"scores": np.ones((6, 4))}, {}, None, "scores"),
    ("scores in a list", {"scores": [[0.5] * 4] * 6}, {}, None, "scores"),
    ("complex scores", {"scores": torch.ones(6, 4).cfloat()}, {}, None, "scores"),
    ("integer scores", {"scores": torch.ones(6, 4).int()}, {}, None, "scores"),
    ("topk_scores of numpy", {"topk_scores": np.ones((6, 2))}, {}, None, "topk_scores"),
    ("norms of numpy", {"expert_norms": np.ones(4)}, {}, None, "expert_norms"),
    ("norms of other tokens", {"expert_norms": torch.ones(9, 4)}, {}, None, "expert_norms"),
    ("norms of a cube", {"expert_norms": torch.ones(1, 1, 4)}, {}, None, "expert_norms"),
    ("norms of other experts", {"expert_norms": torch.ones(5)}, {}, None, "5 from expert_norms"),
    ("no norms", {}, {"keep": "contribution"}, None, "expert_norms"),
    ("valid in a list", {"valid": [True] * 6}, {}, None, "valid"),
    ("valid of numpy", {"valid": np.ones(6, bool)}, {}, None, "valid"),
    ("one flag for all", {"valid": True}, {}, None, "valid"),
    ("decode of numpy", {"token_decode": np.ones(6, bool)}, {}, None, "token_decode"),
    ("requests in a list", {"token_request": [0] * 6}, {}, None, "token_request"),
    ("complex requests", {"token_request": torch.ones(6).cfloat()}, {}, None, "token_request"),
    ("a number as sources", {"token_source": 1}, {}, None, "token_source"),
    ("text as priorities", {"token_priority": "high"}, {}, None, "token_priority"),
    ("weights elsewhere", {"topk_weights": torch.ones(6, 2, device="meta")}, {}, None,
     "topk_weights"),
    ("scores elsewhere", {"scores": torch.ones(6, 4, device="meta")}, {}, None, "scores"),
    ("valid elsewhere", {"valid": torch.ones(6, device="meta").bool()}, {}, None, "valid"),
    ("half an expert", {"num_experts": 4.5}, {}, None, "num_experts"),
    ("experts as text", {"num_experts": "4"}, {}, None, "num_experts"),
    ("experts as a bool", {"num_experts": True}, {}, None, "num_experts"),
    ("no expert", {"scores": None, "num_experts": 0}, {}, None, "num_experts"),
    ("layer as text", {"layer": "first"}, {}, None, "layer"),
    ("no layer", {"layer": None}, {}, None, "layer"),
    ("half a step", {"step": 0.5}, {}, None, "step"),
    ("several steps", {"step": torch.arange(6)}, {}, None, "step"),
    ("step of a float", {"step": torch.tensor(0.5)}, {}, None, "step"),
    ("flat ids", {"topk_ids": torch.zeros(6, dtype=torch.int64)}, {}, None, "topk_ids"),
    ("bool ids", {"topk_ids": torch.zeros(6, 2, dtype=torch.bool)}, {}, None, "topk_ids"),
    ("weights of other shape", {"topk_weights": torch.rand(6, 3)}, {}, None, "topk_weights"),
    ("integer weights", {"topk_weights": torch.ones(6, 2).long()}, {}, None, "topk_weights"),
    ("scores of other tokens", {"scores": torch.rand(5, 4)}, {}, None, "scores"),
    ("flat scores", {"scores": torch.rand(6)}, {}, None, "scores"),
    ("topk_scores of other k", {"topk_scores": torch.rand(6, 3)}, {}, None, "topk_scores"),
    ("valid of other length", {"valid": torch.ones(5, dtype=torch.bool)}, {}, None, "valid"),
    ("valid of two axes", {"valid": torch.ones(6, 1, dtype=torch.bool)}, {}, None, "valid"),
    ("source of other length", {"token_source": torch.zeros(5).long()}, {"pool": "source"}, TWO,
     "token_source"),
    ("request of other length", {"token_request": torch.zeros(7).long()}, {"pool": "request"},
     TWO, "token_request"),
    ("priority of other length", {"token_priority": torch.zeros(7).long()}, {}, TWO,
     "token_priority"),
    ("decode of other length", {"token_decode": torch.zeros(7).bool()}, {"phase": "prefill"}, TWO,
     "token_decode"),
    ("valid of numbers", {"valid": torch.ones(6)}, {}, None, "valid"),
    ("valid of integers", {"valid": torch.ones(6).long()}, {}, None, "valid"),
    ("decode of integers", {"token_decode": torch.ones(6).long()}, {"phase": "prefill"}, TWO,
     "token_decode"),
    ("priority of floats", {"token_priority": torch.ones(6)}, {}, TWO, "token_priority"),
    ("source of bools", {"token_source": torch.ones(6).bool()}, {"pool": "source"}, TWO,
     "token_source"),
    ("request of floats", {"token_request": torch.ones(6)}, {"pool": "request"}, TWO,
     "token_request"),
    ("source beyond the devices", {"token_source": torch.full((6,), 2)}, {"pool": "source"}, TWO,
     "token_source"),
    ("negative source", {"token_source": torch.tensor([0, 0, -1, 0, 0, 0])}, {"pool": "source"},
     TWO, "token_source"),
    ("source beyond, expanding", {"token_source": torch.full((6,), 2)}, {"expand": "own_device"},
     TWO, "token_source"),
    ("no source", {}, {"pool": "source"}, TWO, "token_source"),
    ("no request", {}, {"pool": "request"}, TWO, "token_request"),
    ("no scores", {"scores": None, "num_experts": 4}, {}, TWO, "score"),
    ("no own device", {}, {"expand": "own_device"}, TWO, "token_source"),
    ("no scores to expand", {"scores": None, "topk_scores": torch.rand(6, 2), "num_experts": 4},
     {"expand": "all"}, TWO, "scores"),
    ("fewer experts than k", {}, {"expand": "all", "max_experts": 1}, TWO, "max_experts"),
    ("placement of other experts", {}, {}, ExpertPlacement.contiguous(8, 2), "placement"),
    ("num_experts against scores", {"num_experts": 5}, {}, None, "num_experts"),
    ("num_experts against placement", {"scores": None, "num_experts": 5}, {"keep": "weight"}, TWO,
     "num_experts"),
    ("experts unknown", {"scores": None}, {"keep": "weight"}, None, "num_experts"),
    ("one device", {}, {"capacity_factor": 1.0}, ExpertPlacement.contiguous(4, 1), "device"),
    ("one device, larger", {}, {"capacity_factor": 2}, ExpertPlacement.contiguous(4, 1), "device"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("inputs", "fields", "placement", "named"), [b[1:] for b in BAD], ids=[b[0] for b in BAD]
)
def test_bad_calls_are_refused(
    inputs: dict[str, Any], fields: dict[str, Any], placement: ExpertPlacement | None, named: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (what it says is looked at below)
        route(call(**inputs), policy(**fields), placement)
    message = str(caught.value)
    assert named in message
    assert "\n" not in message
    assert len(message) < 300


def test_arguments_of_another_kind_are_refused() -> None:
    good, cap = call(), policy()
    for wrong, named in (
        (lambda: route(None, cap), "inputs"),
        (lambda: route(vars(good), cap), "inputs"),
        (lambda: route(good, "capacity_factor=1"), "policy"),
        (lambda: route(good, None), "policy"),
        (lambda: route(good, cap, 4), "placement"),
        (lambda: route(good, cap, [0, 0, 1, 1]), "placement"),
        (lambda: register_keep(3, lambda inputs: inputs.topk_weights), "name"),
        (lambda: register_keep("test_no_function", 3), "test_no_function"),
    ):
        with pytest.raises(ValueError, match=named) as caught:
            wrong()
        assert "\n" not in str(caught.value)


def test_whole_numbers_of_other_libraries_are_taken() -> None:
    numbers = {"num_experts": np.int64(4), "layer": np.int32(2), "step": np.uint8(3)}
    random = policy(keep="random")
    taken = call(**numbers)
    assert (taken.num_experts, taken.layer, taken.step) == (4, 2, 3)
    same = dataclasses.replace(taken, num_experts=4, layer=2, step=torch.tensor(3))
    assert torch.equal(route(taken, random).kept, route(same, random).kept)


def test_one_device_may_be_capped_below_its_mean_or_by_expert() -> None:
    one = ExpertPlacement.contiguous(4, 1)
    assert route(call(), policy(capacity_factor=0.5), one).loads_after.tolist() == [[6]]
    assert route(call(), policy(capacity_factor=2, unit="expert"), one).capacity.shape == (1, 4)
    for off in (None, float("inf")):
        assert route(call(), policy(capacity_factor=off), one).kept.all()


def test_a_registered_metric_cannot_be_combined_with_expansion() -> None:
    register_keep("test_error_metric", lambda inputs: inputs.topk_weights.float())
    named = policy(keep="test_error_metric")
    assert route(call(), named, TWO).kept.any()
    with pytest.raises(ValueError, match="expand"):
        route(call(), CapacityPolicy(**{**named.model_dump(), "expand": "all"}), TWO)


def test_a_registered_metric_of_another_shape_is_refused() -> None:
    for wrong in (lambda i: i.topk_weights[:, 0], lambda i: i.topk_ids, lambda i: [0.5]):
        register_keep("test_error_shape", wrong)
        with pytest.raises(ValueError, match="test_error_shape"):
            route(call(), policy(keep="test_error_shape"), TWO)


@pytest.mark.parametrize("name", ["score", "weight", "first", "last", "random", "order"])
def test_a_metric_cannot_take_a_name_of_the_policies(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        register_keep(name, lambda inputs: inputs.topk_weights)


def test_a_refused_call_changes_nothing() -> None:
    inputs = call()
    copies = {k: v.clone() for k, v in vars(inputs).items() if isinstance(v, torch.Tensor)}
    with pytest.raises(ValueError, match="token_source"):
        route(inputs, policy(pool="source"), TWO)
    for name, value in copies.items():
        assert torch.equal(getattr(inputs, name), value)


def test_the_results_and_the_inputs_share_no_memory() -> None:
    inputs = dataclasses.replace(call())
    a = route(inputs, policy(capacity_factor=None))
    a.topk_weights.zero_()
    a.topk_ids.zero_()
    assert (inputs.topk_weights != 0).any()
    assert (inputs.topk_ids != 0).any()
