"""Loads of whole models: balance by rows, per-layer placements and policies, degenerate routing."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from paceline import CapacityPolicy, ExpertPlacement
from paceline.analysis.observe import observe_loads
from paceline.analysis.results import ModelLoads
from paceline.analysis.verdict import model_verdict as verdict
from paceline.batches import Sampling
from paceline.demo.assets import domains, load_model, read_text
from paceline.plan import Plan, PlanError

SMALL = Sampling(tokens=1024, batch_size=8, sequence_length=128)


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    return load_model()


def _promises(result: ModelLoads) -> bool:
    return any("as fast" in line or "waits" in line for line in verdict(result))


@pytest.mark.parametrize(
    "name",
    [n if n == "prose" else pytest.param(n, marks=pytest.mark.full) for n in [*domains(), "mixed"]],
)
def test_real_text_on_a_trained_model_is_not_degenerate(demo: tuple[Any, Any], name: str) -> None:
    texts = {each: read_text(each) for each in domains() if name in (each, "mixed")}
    mixed = Sampling(tokens=9 * 256, batch_size=9, sequence_length=128, mix=True)
    result = observe_loads(*demo, texts, sampling=mixed if name == "mixed" else SMALL)
    assert result.degenerate == []
    assert _promises(result)


@pytest.mark.parametrize(
    "text",
    [
        " the" * 3000,
        *(pytest.param(t, marks=pytest.mark.full) for t in ("0123456789 " * 800, "ab" * 4000)),
    ],
    ids=["word", "digits", "letters"],
)
def test_repeated_text_is_named(demo: tuple[Any, Any], text: str) -> None:
    result = observe_loads(*demo, {"repeated": text}, policy="capacity_factor=1", sampling=SMALL)
    assert any("the very same experts" in reason for reason in result.degenerate)
    assert not _promises(result)
    assert "say nothing about real traffic" in verdict(result)[0]


def test_a_router_that_treats_all_experts_alike_is_named(demo: tuple[Any, Any]) -> None:
    model, tokenizer = copy.deepcopy(demo[0]), demo[1]
    for layer in model.model.layers:
        layer.mlp.gate.weight.data.zero_()
    result = observe_loads(model, tokenizer, {"prose": read_text("prose")}, sampling=SMALL)
    said = " ".join(result.degenerate)
    assert "the very same experts" in said
    assert not _promises(result)


@pytest.mark.parametrize(
    ("hidden", "experts", "k", "dummy"),
    [
        (32, 8, 2, None),
        (256, 64, 8, None),
        (64, 16, 1, None),
        (64, 16, 2, "uniform"),
        (64, 64, 4, "normal"),
    ],
)
def test_models_that_nobody_trained_are_named(
    demo: tuple[Any, Any], hidden: int, experts: int, k: int, dummy: str | None
) -> None:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=len(demo[1]), hidden_size=hidden, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_experts=experts,
        num_experts_per_tok=k, eos_token_id=None,
    )  # fmt: skip
    model = OlmoeForCausalLM(config).eval()
    for weight in model.parameters() if dummy else ():  # normalisation too
        fill = weight.data.uniform_ if dummy == "uniform" else weight.data.normal_
        fill(-1e-3, 1e-3) if dummy == "uniform" else fill(0, 0.02)
    result = observe_loads(model, demo[1], {"prose": read_text("prose")}, sampling=SMALL)
    said = " ".join(result.degenerate)
    assert ("prefers no expert" if dummy else "looks untrained") in said
    assert not _promises(result)


UNEVEN = ExpertPlacement.explicit([0] * 20 + [2] * 5 + [0] * 2 + [3] * 5, num_devices=5)


@pytest.mark.parametrize("placement", [UNEVEN, list(UNEVEN.expert_to_device), 5])
def test_devices_are_compared_by_their_rows(demo: tuple[Any, Any], placement: Any) -> None:
    one = Sampling(tokens=512, batch_size=4, sequence_length=128)
    policy = "capacity_factor=0.9,min_expert_load=0,mode=shadow"
    result = observe_loads(
        *demo, {"prose": read_text("prose")}, placement=placement, policy=policy, sampling=one
    )
    assert result.batches == 1
    for layer in result.layers:
        device, count = np.array(layer.expert_to_device), layer.devices
        rows = np.bincount(device, layer.expert_loads_before, minlength=count)
        left = np.bincount(device, layer.expert_loads_after, minlength=count)
        peak = rows.max() / rows.mean()
        assert layer.device_peak_to_mean_before == pytest.approx(peak)
        assert layer.device_peak_to_mean_after == pytest.approx(left.max() / rows.mean())
        assert layer.straggler_loss_before == pytest.approx(1 - 1 / peak)
        assert layer.busiest_device == int(rows.argmax())
        assert layer.experts_per_device == np.bincount(device, minlength=count).tolist()
    assert "own share" not in " ".join(verdict(result))


def test_layers_may_have_policies_and_placements_of_their_own(demo: tuple[Any, Any]) -> None:
    placements = [ExpertPlacement.contiguous(32, 4), UNEVEN, None, 2]
    capped = CapacityPolicy(capacity_factor=1.0, min_expert_load=0)
    policies = [None, capped, "capacity_factor=0.5,min_expert_load=0", None]
    text = {"prose": read_text("prose")}
    result = observe_loads(*demo, text, placement=placements, policy=policies, sampling=SMALL)
    assert [layer.devices for layer in result.layers] == [4, 5, 32, 2]
    assert [layer.dropped > 0 for layer in result.layers] == [False, True, True, False]
    assert result.placement == "experts placed layer by layer"
    assert result.policy.startswith("mode=observe; capacity_factor=1.0")

    plan = Plan((capped,), (UNEVEN,), layers=4, experts=32, k=4)
    planned = observe_loads(*demo, text, plan=plan, sampling=SMALL)
    assert all(layer.devices == 5 and layer.dropped for layer in planned.layers)
    assert planned.placement == "experts placed as given"
    with pytest.raises(PlanError, match="3 MoE layers"):
        observe_loads(*demo, text, plan=Plan((capped,), layers=3), sampling=SMALL)


def test_a_cap_that_never_applied_is_told_with_its_threshold(demo: tuple[Any, Any]) -> None:
    few = Sampling(tokens=32, batch_size=1, sequence_length=16)
    result = observe_loads(
        *demo, {"prose": read_text("prose")}, policy="capacity_factor=1", sampling=few
    )
    assert result.min_expert_load == 8
    assert result.tokens_an_expert == pytest.approx(16 * 4 / 32)
    assert "from a mean of 8 tokens per expert" in verdict(result)[-1]


@pytest.mark.parametrize("field", ["tokens", "batch_size", "sequence_length"])
@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "3", None])
def test_a_sampling_that_cant_be_is_one_sentence(field: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"{field} must be a whole number") as caught:
        Sampling(**{field: bad})
    assert len(str(caught.value).splitlines()) == 1
