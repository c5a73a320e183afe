"""Policies and placements per layer, plans, and those who watch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from model_runs import capacity, counted, fingerprint, model_of, output
from torch import Tensor

from paceline import CapacityPolicy, ExpertPlacement, attach, route
from paceline.engines.transformers import CapNeverAppliedWarning
from paceline.facts import Facts
from paceline.plan import Plan, PlanError

CAP = CapacityPolicy(capacity_factor=1, unit="expert", min_expert_load=0)


@pytest.fixture
def model() -> Any:
    return model_of("mixtral")  # three layers, 8 experts, 2 a token


def test_every_layer_follows_its_own_policy(model: Any) -> None:
    given = tiny_models.inputs(pad=5)
    factors = ["0.5", None, "1.5"]
    policies = [
        None if f is None else f"capacity_factor={f},unit=expert,min_expert_load=0" for f in factors
    ]
    with attach(model, policies) as pace:
        counter, _ = counted(model, given)
        stats = pace.stats()
        assert pace.policies[0] == pace.policy
        assert [p.capacity_factor for p in pace.policies] == [0.5, None, 1.5]
    assert stats.policy == "3 policies"
    for layer, factor in zip(stats.layers, factors, strict=True):
        rows = counter.rows(f"{layer.name}.experts")
        if factor is None:
            assert layer.capped_forwards == layer.dropped == 0
        else:
            assert rows.max() <= capacity(factor, 43, 2, 1, 8)
            assert layer.dropped > 0


def test_every_layer_has_its_own_placement(model: Any) -> None:
    given = tiny_models.inputs(batch=4)
    maps = [[0, 1] * 4, [0, 0, 0, 0, 0, 1, 1, 1], [2, 1, 0, 3, 3, 0, 1, 2]]
    with attach(model, "capacity_factor=1,min_expert_load=0", maps) as pace:
        counter, _ = counted(model, given)
        placements, stats = pace.placements, pace.stats().layers
    for expected, placement, layer in zip(maps, placements, stats, strict=True):
        assert list(placement.expert_to_device) == expected
        rows = counter.rows(f"{layer.name}.experts").numpy()
        by_device = np.bincount(expected, weights=rows)
        for device, hosted in enumerate(placement.sizes):
            assert by_device[device] <= capacity("1", 96, 2, hosted, 8)
        assert layer.device_loads_after == by_device.astype(int).tolist()


@pytest.mark.parametrize(
    "placement",
    [4, np.int64(4), ExpertPlacement.contiguous(8, 4), [0, 0, 1, 1, 2, 2, 3, 3], np.arange(8) // 2],
    ids=["int", "numpy", "placement", "list", "array"],
)
def test_a_placement_for_all_layers_in_every_form(model: Any, placement: Any) -> None:
    with attach(model, None, placement) as pace:
        assert set(pace.placements) == {ExpertPlacement.contiguous(8, 4)}


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("4", "placement must be .* got '4'"),
        (True, "placement must be .* got True"),
        ([4, None], "placement must be .* got 2 entries"),
        ([0, 1], "of layer .* got one of 2 experts"),
        ([[0, 1]] * 3, "of layer .* got one of 2 experts"),
        (2.0, "placement must be .* got 2.0"),
        (9, "num_devices must be .* got 9"),
        ({"a": 1}, "placement must be .* got {'a': 1}"),
    ],
)
def test_a_wrong_placement_is_one_sentence(model: Any, placement: Any, message: str) -> None:
    before = fingerprint(model)
    with pytest.raises(ValueError, match=message) as raised:
        attach(model, CAP, placement)
    assert "\n" not in str(raised.value)
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ([CAP], "policy must be .* got 1 entries"),
        ([CAP, 3, CAP], "policy must be .* got int"),
        (7, "policy must be .* got int"),
        ("capacity_factor=-1", "capacity_factor"),
        ([CAP, CAP, "capacity_factor=x"], "capacity_factor"),
    ],
)
def test_a_wrong_policy_is_found_before_any_layer_runs(
    model: Any, policy: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match=message):
        attach(model, policy)
    assert not ran
    for module in model.modules():
        module._forward_hooks.clear()


def test_a_new_policy_that_one_layer_refuses_changes_no_layer(model: Any) -> None:
    with attach(model, CAP) as pace:
        former = pace.policies
        with pytest.raises(ValueError, match="max_experts"):
            pace.policy = [CAP, CAP.replace(expand="all", max_experts=1), CAP]
        assert pace.policies == former


# -- plans -----------------------------------------------------------------------------------------


def test_a_plan_gives_policies_and_placements(model: Any, tmp_path: Path) -> None:
    plan = Plan(
        policies=tuple(CAP.replace(unit="device", capacity_factor=f) for f in (0.5, 1.25, 2)),
        placements=tuple(
            ExpertPlacement.explicit(m) for m in ([0, 1] * 4, [1, 0] * 4, [0] * 4 + [1] * 4)
        ),
        layers=3,
        experts=8,
        k=2,
    )
    plan.save(tmp_path / "plan.toml")
    given = tiny_models.inputs(batch=4)
    with attach(model, plan=Plan.load(tmp_path / "plan.toml")) as pace:
        assert pace.policies == plan.policies
        assert pace.placements == plan.placements
        got = output(model, given)
    with attach(model, plan.policies, plan.placements):
        assert torch.equal(output(model, given), got)
    with attach(model, CAP, 4, plan=plan) as pace:  # what is said beside the plan comes first
        assert set(pace.policies) == {CAP}
        assert set(pace.placements) == {ExpertPlacement.contiguous(8, 4)}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan((CAP, CAP)), "the plan is for 2 MoE layers, the model has 3"),
        (Plan(layers=4), "the plan is for 4 MoE layers, the model has 3"),
        (Plan(layers=1), "the plan is for 1 MoE layers, the model has 3"),
        (Plan(experts=64), "the plan is for 64 experts per layer, layer 0 has 8"),
        (Plan(k=4), "the plan is for 4 experts per token, layer 0 uses 2"),
    ],
)
def test_a_plan_for_another_model_is_refused(model: Any, plan: Plan, message: str) -> None:
    before = fingerprint(model)
    with pytest.raises(PlanError, match=message):
        attach(model, plan=plan)
    assert fingerprint(model) == before


def test_a_plan_that_is_none_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="plan must be a Plan"):
        attach(model, plan="plan.toml")


# -- watching --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, CAP, CAP.replace(mode="shadow"), "capacity_factor=1.5"])
def test_watchers_see_every_forward_and_change_nothing(model: Any, policy: Any) -> None:
    given = tiny_models.inputs(batch=1, length=12, pad=0)
    with attach(model, policy):
        want = output(model, given)
    seen: list[tuple[str, Any, Any]] = []
    with attach(model, policy) as pace:
        undo = pace.watch(lambda *args: seen.append(args))
        assert torch.equal(output(model, given), want)
        counted_so_far = pace.stats().layers
        undo()
        assert torch.equal(output(model, given), want)
        names = pace.layers
    assert [name for name, *_ in seen] == names
    for (_, inputs, assignment), stats in zip(seen, counted_so_far, strict=True):
        again = route(inputs, pace.policy)
        assert torch.equal(again.topk_ids, assignment.topk_ids)
        assert assignment.expert_loads_after.tolist() == stats.expert_loads_after or (
            pace.policy.mode == "shadow"
        )


def test_watchers_get_the_facts_that_they_ask_for(model: Any) -> None:
    given = tiny_models.inputs(pad=5)
    seen: list[Any] = []
    with attach(model) as pace:
        pace.watch(lambda _, inputs, __: seen.append(inputs), Facts(scores=True, request=True))
        output(model, given)
    for inputs in seen:
        assert inputs.token_request.tolist() == [0] * 24 + [1] * 24
        chosen = inputs.scores.gather(1, inputs.topk_ids)
        assert torch.allclose(chosen / chosen.sum(1, keepdim=True), inputs.topk_weights, atol=1e-5)
        assert int(inputs.valid.sum()) == 43


def test_several_watchers_and_an_error_in_one(model: Any) -> None:
    given = tiny_models.inputs()
    with attach(model, CAP) as pace:
        counts = [0, 0]

        def one(*_: Any) -> None:
            counts[0] += 1

        def two(*_: Any) -> None:
            counts[1] += 1
            raise ZeroDivisionError

        pace.watch(one)
        undo = pace.watch(two)
        with pytest.raises(ZeroDivisionError):
            output(model, given)
        undo()
        output(model, given)
        assert counts == [4, 1]
        with pytest.raises(ValueError, match=r"watcher must be a function .*got 3"):
            pace.watch(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("policy", [None, CAP])
def test_experts_can_be_replaced(model: Any, how: str, policy: Any) -> None:
    given = tiny_models.inputs()
    former = model.get_experts_implementation()
    model.set_experts_implementation(how)
    seen: list[tuple[str, Tensor]] = []

    def by_token(layer: str, run: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        seen.append((layer, ids))
        parts = [
            run(hidden[t : t + 1], ids[t : t + 1], weights[t : t + 1]) for t in range(len(ids))
        ]
        return torch.cat(parts)

    try:
        with attach(model, policy) as pace:
            want = output(model, given)
            undo = pace.replace_experts(by_token)
            assert torch.allclose(output(model, given), want, atol=1e-4)
            undo()
            assert torch.equal(output(model, given), want)
        assert [layer for layer, _ in seen] == pace.layers
        assert any((ids == 8).any() for _, ids in seen) == (policy is not None)
    finally:
        model.set_experts_implementation(former)


# -- what is said once, and copies -----------------------------------------------------------------


def test_a_cap_that_never_applied_says_so_once(model: Any) -> None:
    given = tiny_models.inputs(batch=1, length=24)
    with attach(model, "capacity_factor=0.5") as pace:
        output(model, given)
        with pytest.warns(CapNeverAppliedWarning, match="8 tokens"):
            stats = pace.stats()
        assert [layer.min_expert_load for layer in stats.layers] == [8] * 3
        pace.stats()
    with attach(model) as pace:
        output(model, given)
        assert pace.stats().layers[0].min_expert_load is None


@pytest.mark.parametrize("policy", [None, CAP])
def test_a_copy_made_while_attached_is_free_after_detach(policy: Any) -> None:
    model, given = tiny_models.build("mixtral"), tiny_models.inputs()
    kwargs: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    base, text = output(model, given), model.generate(**given, **kwargs)
    with attach(model, policy) as pace:
        capped = output(model, given)
        twin = copy.deepcopy(model)
        assert torch.equal(output(twin, given), capped)
        with pytest.raises(ValueError, match="copied from a model"):
            attach(twin)
        pace.policy = CAP.replace(capacity_factor=0.5)
        assert torch.equal(output(twin, given), capped)  # a copy keeps the policy it had
    assert torch.equal(output(twin, given), base)
    assert torch.equal(twin.generate(**given, **kwargs), text)
    clean = fingerprint(tiny_models.build("mixtral"))
    with attach(twin, CAP) as pace:
        assert torch.equal(output(twin, given), output(twin, given))
        assert pace.stats().layers[0].forwards == 2
    after = fingerprint(twin)
    assert {n: f[1] for n, f in after.items() if n != "config"} == {
        n: f[1] for n, f in clean.items() if n != "config"
    }
    assert torch.equal(output(model, given), base)


def test_a_copy_of_a_copy_is_free_too() -> None:
    model, given = tiny_models.build("mixtral"), tiny_models.inputs()
    base = output(model, given)
    with attach(model, CAP):
        twin = copy.deepcopy(copy.deepcopy(model))
    assert torch.equal(output(twin, given), base)
    attach(twin).detach()


def test_a_wrong_watcher_and_wrong_experts_are_one_sentence(model: Any) -> None:
    wrong: Any = 3
    with attach(model, CAP) as pace:
        for call, message in (
            (lambda: pace.watch(wrong), "watcher must be a function"),
            (lambda: pace.watch(print, wrong), "facts must be Facts, got 3"),
            (lambda: pace.replace_experts(wrong), "experts must be a function"),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        output(model, tiny_models.inputs())


def test_an_attached_model_says_why_it_cannot_be_pickled(tmp_path: Path) -> None:
    model = tiny_models.build("qwen2_moe")
    with attach(model, CAP), pytest.raises(TypeError, match="detach it first"):
        torch.save(model, tmp_path / "model.pt")
    torch.save(model, tmp_path / "model.pt")
