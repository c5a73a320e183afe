"""Compensated Drop: dropped assignments leave their stand-ins, and nothing else changes."""

from __future__ import annotations

import copy
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_calibration import made_up
from model_runs import IMPLEMENTATIONS, fingerprint, implementation, model_of, output

from paceline import CapacityPolicy, attach
from paceline.plan import Plan
from paceline.stand_ins.calibration_file import Calibration, CalibrationError, LayerCalibration
from paceline.stand_ins.compensation import Compensation

CAP = "capacity_factor=1,unit=expert,min_expert_load=0"
MIXTRAL = "mixtral"
LAYER = made_up(model_of(MIXTRAL)).layers[0]


def stand_in(layer: LayerCalibration, expert: int, x: np.ndarray) -> np.ndarray:
    up, down = layer.up[expert].double().numpy(), layer.down[expert].double().numpy()
    bias, mean = layer.bias[expert].double().numpy(), layer.mean[expert].double().numpy()
    return bias + up @ (down @ (x - mean))


def mixtral_expert(experts: Any, expert: int, x: np.ndarray) -> np.ndarray:
    gate, up = np.split(experts.gate_up_proj[expert].detach().double().numpy() @ x, 2)
    return experts.down_proj[expert].detach().double().numpy() @ (gate / (1 + np.exp(-gate)) * up)


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_a_layer_gives_kept_experts_and_stand_ins(how: str) -> None:
    model, seen, hidden, outs = model_of(MIXTRAL), {}, {}, {}
    found = made_up(model)
    policy = CapacityPolicy.parse(f"{CAP},compensate=true")
    with ExitStack() as stack:
        assert stack.enter_context(implementation(model, how))
        pace = stack.enter_context(attach(model, policy, calibration=found))
        pace.watch(lambda name, inputs, assignment: seen.update({name: (inputs, assignment)}))
        for name in pace.layers:

            def keep(_: Any, args: Any, kwargs: Any, out: Any, name: str = name) -> None:
                hidden[name], outs[name] = (*args, *kwargs.values())[0], out

            experts = model.get_submodule(name).experts
            stack.callback(experts.register_forward_hook(keep, with_kwargs=True).remove)
        output(model, tiny_models.inputs(pad=5))
        layers = pace.layers
    alone = 0
    for name, layer in zip(layers, found.layers, strict=True):
        inputs, assignment = seen[name]
        experts = model.get_submodule(name).experts
        got = outs[name].reshape(-1, 32).numpy()
        for t, x in enumerate(hidden[name].reshape(-1, 32).double().numpy()):
            want, kept = np.zeros(32), assignment.kept[t].tolist()
            for slot, expert in enumerate(inputs.topk_ids[t].tolist()):
                if kept[slot]:
                    weight = float(assignment.topk_weights[t, slot])
                    want += weight * mixtral_expert(experts, expert, x)
                elif inputs.valid[t]:
                    want += float(inputs.topk_weights[t, slot]) * stand_in(layer, expert, x)
            alone += bool(inputs.valid[t]) and not any(kept)
            np.testing.assert_allclose(got[t], want, rtol=1e-3, atol=1e-5)
    assert alone  # some token lost all its experts


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_it_changes_no_load_no_count_and_no_survivor(how: str) -> None:
    """In the first layer, whose inputs are the same."""
    model, given = model_of(MIXTRAL), tiny_models.inputs(pad=5)
    found, seen = made_up(model), []
    with implementation(model, how), attach(model, CAP, calibration=found) as pace:
        first = pace.layers[0]

        def watch(name: str, _: Any, assignment: Any) -> None:
            if name == first:
                seen.append(assignment)

        pace.watch(watch)
        stats, outs = [], []
        for policy in (CAP, f"{CAP},compensate=true"):
            pace.policy = policy
            pace.reset_stats()
            outs.append(output(model, given))
            stats.append(pace.stats().layers[0].to_dict())
    distances = [counts.pop("stand_in_distance") for counts in stats]
    assert distances[0] is None
    assert distances[1] > 0
    assert stats[0] == stats[1]
    assert stats[0]["dropped"] > 0
    for name in ("topk_ids", "topk_weights", "kept"):
        assert torch.equal(*(getattr(one, name) for one in seen))
    assert not torch.equal(*outs)


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "policy", ["capacity_factor=50,min_expert_load=0", f"{CAP},mode=shadow", f"{CAP},mode=observe"]
)
def test_without_a_drop_nothing_changes_to_the_bit(how: str, policy: str) -> None:
    model, given = model_of(MIXTRAL), tiny_models.inputs(pad=5)
    found = made_up(model)
    with implementation(model, how):
        with attach(model, policy) as pace:
            want = output(model, given)
        with attach(model, f"{policy},compensate=true", calibration=found) as pace:
            assert torch.equal(output(model, given), want)
            assert pace.stats().layers[0].forwards == 1


def test_detached_the_model_is_as_it_was() -> None:
    model = model_of(MIXTRAL)
    before, found = fingerprint(model), made_up(model)
    with attach(model, f"{CAP},compensate=true", calibration=found):
        output(model, tiny_models.inputs())
    assert fingerprint(model) == before


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 20), st.integers(1, 4), st.booleans())
def test_both_ways_of_computing_it_are_the_formula(
    seed: int, tokens: int, k: int, some: bool
) -> None:
    """Over some of the experts or all, a token's rows that lost nothing may hold anything."""
    rng = torch.Generator().manual_seed(seed)
    experts, hidden, rank = 6, 5, 2

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng)

    layer = replace(
        LAYER,
        experts=("",) * experts,
        bias=random(experts, hidden),
        output_norm=torch.ones(experts),
        residual_norm=torch.ones(experts),
        residual_log=torch.zeros(experts),
        residual_slope=torch.zeros(experts, hidden).bfloat16(),
        up=random(experts, hidden, rank).bfloat16(),
        down=random(experts, rank, hidden).bfloat16(),
        mean=random(experts, hidden),
        ranks=torch.tensor([rank, 0, 1, rank, rank, rank]),
    )
    own = [1, 4, 2] if some else None
    x, out, weights = random(tokens, hidden), random(tokens, hidden), random(tokens, k)
    ids = torch.randint(0, experts + 2, (tokens, k), generator=rng)  # some are zero experts
    dropped = (random(tokens, k) > 0.6) & (ids < experts)
    x[~dropped.any(1)] = torch.nan
    want = out.double().numpy().copy()
    for t, slot in dropped.nonzero().tolist():
        expert = int(ids[t, slot])
        if own is None or expert in own:
            want[t] += float(weights[t, slot]) * stand_in(layer, expert, x[t].double().numpy())
    far: list[float] = []
    for t, slot in dropped.nonzero().tolist():
        expert = int(ids[t, slot])
        if (own is None or expert in own) and layer.ranks[expert]:
            seen = layer.down[expert].double() @ (x[t] - layer.mean[expert]).double()
            far.append(float(seen.square().sum() / layer.ranks[expert]))
    told: list[tuple[float, int]] = []

    def tell(distance: torch.Tensor, count: torch.Tensor) -> None:
        told.append((float(distance), int(count)))

    compensation = Compensation(layer, own, x[:0])
    flat = compensation(out, x, ids, weights, dropped, tell)
    shaped = compensation(out[None], x[None], ids, weights, dropped)
    with patch("torch.compiler.is_compiling", return_value=True):
        static = compensation(out, x, ids, weights, dropped, tell)
    by_kernels = compensation._sorted(
        out, x, compensation._local[torch.where(dropped, ids, -1)], weights, tell
    )
    for distance, count in told:
        assert (distance, count) == (pytest.approx(sum(far), rel=1e-3, abs=1e-6), len(far))
    mine = [own is None or int(e) in own for e in ids[dropped]]
    assert len(told) == (3 if any(mine) else 2)
    for got in (flat, shaped[0], static, by_kernels):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-4)
        same = ~dropped.any(1)
        assert torch.equal(got[same], out[same])


def test_a_stand_in_that_overflows_harms_no_other() -> None:
    """Where every token is multiplied with every stand-in, infinity times nothing is nothing."""
    down = LAYER.down.clone()
    down[5] = 3e38
    compensation = Compensation(
        replace(LAYER, down=down, mean=0 * LAYER.mean), None, LAYER.bias[:0]
    )
    x, out = torch.full((2, 32), 100.0), torch.zeros(2, 32)
    ids, dropped = torch.tensor([[1, 5], [5, 2]]), torch.tensor([[True, False], [False, True]])
    with patch("torch.compiler.is_compiling", return_value=True):
        got = compensation(out, x, ids, torch.ones(2, 2), dropped)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, compensation(out, x, ids, torch.ones(2, 2), dropped))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_it_is_given_stays_as_it_was_and_has_a_gradient(dtype: torch.dtype) -> None:
    """Some ask for the gradients of a model's inputs, or keep what its experts gave."""
    rng = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(dtype).requires_grad_()

    given = out, x, weights = random(9, 32), random(9, 32), random(9, 2)
    ids, dropped = torch.arange(18).view(9, 2) % 8, torch.arange(18).view(9, 2) % 3 == 0
    compensation, found = Compensation(LAYER, None, x[:0].detach()), []
    before = [t.detach().clone() for t in given]
    for compiling in (False, True):
        with patch("torch.compiler.is_compiling", return_value=compiling):
            got = compensation(out, x, ids, weights, dropped)
        found.append(torch.autograd.grad(got.float().square().sum(), given))
    for t, same in zip(given, before, strict=True):
        assert torch.equal(t, same)
    near = 1e-4 if dtype is torch.float32 else 0.1
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=near, atol=near * float(other.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_it_follows_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    model, given = copy.deepcopy(model_of(MIXTRAL)), tiny_models.inputs()
    model.set_experts_implementation("eager")  # the only one that knows float64
    found = made_up(model)  # of the float32 model: bfloat16 is the same one, rounded
    policy = f"{CAP},compensate=true"
    with attach(model, policy, calibration=found):
        want = output(model, given)
    with attach(model.to(dtype), policy, calibration=found):
        got = output(model, given)
    assert got.dtype is dtype
    assert torch.isfinite(got).all()
    if dtype is torch.float64:
        torch.testing.assert_close(got.float(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("keep", ["contribution", pytest.param("score", marks=pytest.mark.full)])
def test_it_compiles_as_one_graph(keep: str) -> None:
    model = tiny_models.build(MIXTRAL, num_hidden_layers=1)
    model.set_experts_implementation("grouped_mm")
    found, given = made_up(model), tiny_models.inputs(pad=5)
    torch._dynamo.reset()
    with attach(model, f"{CAP},compensate=true,keep={keep}", calibration=found) as pace:
        want = output(model, given)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(output(compiled, given), want)
        assert pace.stats().layers[0].dropped > 0
    torch._dynamo.reset()


@pytest.mark.parametrize("compensate", [False, True])
def test_contribution_ranks_by_weight_times_what_dropping_leaves(compensate: bool) -> None:
    """Inside devices of two experts; an expert that the calibration never saw has the mean norm.

    With stand-ins the norm is the one that is expected at the token, its logarithm linear in it.
    """
    model, seen, states = model_of(MIXTRAL), {}, {}
    found = made_up(model)
    unseen = replace(
        found.layers[0],
        output_norm=found.layers[0].output_norm.clone(),
        residual_slope=found.layers[0].residual_slope.clone(),
    )
    unseen.output_norm[3] = unseen.residual_slope[3] = 0
    found = replace(found, layers=(unseen, *found.layers[1:]))
    policy = f"capacity_factor=1,min_expert_load=0,keep=contribution,compensate={compensate}"
    with attach(model, policy, 4, calibration=found) as pace:
        pace.watch(lambda name, inputs, assignment: seen.update({name: (inputs, assignment)}))
        hooks = [
            model.get_submodule(layer.name).register_forward_pre_hook(
                lambda _, args, name=layer.name: states.update({name: args[0]})
            )
            for layer in found.layers
        ]
        output(model, tiny_models.inputs(pad=5))
        for hook in hooks:
            hook.remove()
    lost = 0
    for layer in found.layers:
        inputs, assignment = seen[layer.name]
        constants = (layer.residual_log if compensate else layer.output_norm).tolist()
        if layer is unseen:
            constants[3] = sum(constants[:3] + constants[4:]) / 7
        x = states[layer.name].reshape(-1, layer.mean.shape[1])

        def norm(
            token: int, expert: int, layer: Any = layer, x: Any = x, c: Any = constants
        ) -> float:
            if not compensate:
                return float(c[expert])
            slope = layer.residual_slope[expert].double()
            far = float(slope @ (x[token] - layer.mean[expert]).double())
            return math.exp(c[expert] + far)

        metric: dict[tuple[int, bool], list[float]] = {}
        for t, chosen in enumerate(inputs.topk_ids.tolist()):
            for slot, expert in enumerate(chosen):
                if inputs.valid[t]:
                    kept = bool(assignment.kept[t, slot])
                    value = float(inputs.topk_weights[t, slot]) * norm(t, expert)
                    metric.setdefault((expert // 2, kept), []).append(value)
        for device in range(4):
            dropped = metric.get((device, False), [])
            lost += len(dropped)
            if dropped:
                assert max(dropped) <= min(metric[device, True]) * (1 + 1e-5)
    assert lost
    with pytest.raises(ValueError, match="keep=contribution needs a calibration"):
        attach(model, policy.replace(",compensate=True", ""), 4)


def test_a_plan_names_the_calibration(tmp_path: Path) -> None:
    model, given = model_of(MIXTRAL), tiny_models.inputs()
    found, policy = made_up(model), CapacityPolicy.parse(f"{CAP},compensate=true")
    found.save(tmp_path / "found")
    Plan((policy,), calibration="found").save(tmp_path / "plan.toml")
    with attach(model, policy, calibration=found):
        want = output(model, given)
    with attach(model, plan=Plan.load(tmp_path / "plan.toml")):
        assert torch.equal(output(model, given), want)
    with attach(model, policy, calibration=tmp_path / "found"):
        assert torch.equal(output(model, given), want)


def test_without_a_calibration_that_fits_it_is_an_error(tmp_path: Path) -> None:
    model = copy.deepcopy(model_of(MIXTRAL))
    before, found, policy = fingerprint(model), made_up(model), f"{CAP},compensate=true"

    def refused(calibration: Any, said: str, kind: type[ValueError] = CalibrationError) -> None:
        with pytest.raises(kind, match=said):
            attach(model, policy, calibration=calibration)
        assert fingerprint(model) == before

    refused(None, "compensate=true needs a calibration", ValueError)
    refused(7, "calibration must be a Calibration", ValueError)
    refused(tmp_path, "there is no calibration in")
    other = Calibration("OlmoeForCausalLM", ("a",), (1,), "texts", found.layers)
    refused(other, "must be a OlmoeForCausalLM as in the calibration, got MixtralForCausalLM")
    refused(
        replace(found, layers=found.layers[:2]),
        "must have 2 MoE layers as in the calibration, got 3",
    )
    wider = replace(found.layers[0], k=5)
    refused(replace(found, layers=(wider, *found.layers[1:])), "8 experts, 5 per token")
    with attach(model, CAP) as pace:
        with pytest.raises(ValueError, match="needs a calibration"):
            pace.policy = policy
        assert not pace.policy.compensate
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 2, 1] *= 1.5
    refused(found, "those of the experts of layer model.layers.1.mlp differ")
    with torch.no_grad():
        weight = model.model.layers[0].mlp.gate.weight
        weight[:2] = weight[:2].flip(0)
    refused(found, "those of the router of layer model.layers.0.mlp differ")
