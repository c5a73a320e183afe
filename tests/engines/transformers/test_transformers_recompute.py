"""Training and activation checkpointing: one decision, counted once, the right gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from made_up_calibration import made_up
from model_runs import IMPLEMENTATIONS, implementation
from reference import capped_by_hand
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline import CapacityPolicy, attach
from paceline.traces import open_trace
from paceline.traces.record import Recorder

GIVEN: dict[str, Any] = {**tiny_models.inputs(batch=2, length=24, pad=5), "use_cache": False}
OTHER: dict[str, Any] = {**tiny_models.inputs(batch=2, length=24, seed=2), "use_cache": False}
CAP = CapacityPolicy(capacity_factor=0.7, min_expert_load=0)
POLICIES = {
    "count": CapacityPolicy(mode="observe"),
    "cap": CAP,
    "shadow": CAP.replace(mode="shadow"),
    "random": CAP.replace(keep="random"),
    "requests": CAP.replace(pool="request", unit="expert", protect_first=2),
    "max_active": CapacityPolicy(max_active=1, min_expert_load=10**6),
    "expand": CAP.replace(expand="all", renormalize=True),
    "stand-ins": CAP.replace(compensate=True, keep="contribution"),
}


def loss_of(model: Any, given: dict[str, Any] = GIVEN) -> Tensor:
    return model(**given)[0].square().mean()  # type: ignore[no-any-return]


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, gradient in want.items():
        assert gradient.isfinite().all(), name
        assert torch.equal(found[name], gradient), name


def counts(pace: Any) -> list[Any]:
    layers = pace.stats().layers
    return [(s.forwards, s.expert_loads_before, s.expert_loads_after) for s in layers]


@contextmanager
def training(model: Any, reentrant: bool) -> Iterator[None]:
    """Transformers' own checkpointing, which takes effect in training mode alone."""
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    try:
        yield
    finally:
        model.eval()
        model.activation_checkpointing_disable()


@contextmanager
def blocks(model: Any, reentrant: bool) -> Iterator[None]:
    """MoE blocks repeated by torch's own function, in eval mode."""
    with repeated([layer.mlp for layer in model.model.layers], reentrant):
        yield


@contextmanager
def repeated(modules: list[nn.Module], reentrant: bool) -> Iterator[None]:
    former = [module.__dict__.get("forward") for module in modules]
    for module in modules:
        module.__dict__["forward"] = partial(checkpoint, module.forward, use_reentrant=reentrant)
    try:
        yield
    finally:
        for module, own in zip(modules, former, strict=True):
            module.__dict__.pop("forward") if own is None else module.__dict__.update(forward=own)


@contextmanager
def gradients_of_inputs(model: Any) -> Iterator[None]:
    """Without them reentrant checkpointing has no gradients for the first layers."""
    model.enable_input_require_grads()
    try:
        yield
    finally:
        model.disable_input_require_grads()


Way = Callable[[Any, bool], Any]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", [training, blocks])
@pytest.mark.parametrize("name", POLICIES)
def test_checkpointing_changes_nothing(name: str, way: Way, reentrant: bool) -> None:
    model, policy, seen = tiny_models.build("mixtral"), POLICIES[name], []
    results = []
    for checkpointed in (False, True):
        with attach(model, policy, placement=4, calibration=made_up(model)) as pace:
            seen.clear()
            undo = pace.watch(lambda layer, inputs, a: seen.append(a.kept.clone()))
            with gradients_of_inputs(model):
                if checkpointed:
                    with way(model, reentrant):
                        found = gradients(model, loss_of(model))
                else:
                    found = gradients(model, loss_of(model))
            undo()
            results.append((found, counts(pace), list(seen)))
    (want, want_counts, want_seen), (found, found_counts, found_seen) = results
    assert found_counts == want_counts
    assert len(found_seen) == len(want_seen)
    assert all(map(torch.equal, found_seen, want_seen))
    assert_same(found, want)
    # shared numbers of forwards would hide a policy that did nothing
    loads = [layer[2] != layer[1] for layer in found_counts]
    assert any(loads) == policy.caps


@pytest.mark.parametrize("checkpointed", [False, True])
def test_counting_leaves_training_as_it_is(checkpointed: bool) -> None:
    """Five steps of fine-tuning; every token of every step is counted once."""
    weights = []
    for attached in (False, True):
        model = tiny_models.build("mixtral")
        pace = attach(model, placement=4) if attached else None
        model.train()
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, GIVEN if step % 2 else OTHER).backward()
            optimizer.step()
        weights.append(model.state_dict())
    assert all(map(torch.equal, weights[0].values(), weights[1].values()))
    tokens = 3 * 48 + 2 * 43
    for layer in pace.stats().layers:
        assert (layer.forwards, layer.assignments) == (5, tokens * model.config.num_experts_per_tok)


def test_gradients_of_a_cap_are_those_of_an_oracle() -> None:
    """What is dropped has no gradient; all else has that of a model whose dropped weights are 0."""
    policy = CapacityPolicy(capacity_factor=0.7, unit="expert", min_expert_load=0)
    model = tiny_models.build("mixtral")
    rows = GIVEN["attention_mask"].flatten().bool().numpy()
    with capped_by_hand(model, "0.7", lambda _: (rows, np.zeros(len(rows), int))) as dropped:
        want = gradients(model, loss_of(model))
    assert all(dropped)
    untouched = gradients(model, loss_of(model))
    with attach(model, policy):
        found = gradients(model, loss_of(model))
        model.train()
        assert_same(gradients(model, loss_of(model)), found)
    scale = max(float(gradient.abs().max()) for gradient in want.values())
    for name, gradient in want.items():
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-6 * scale), name
    gates = [name for name in want if "gate.weight" in name]
    assert gates
    assert not any(torch.allclose(untouched[name], want[name], rtol=1e-2) for name in gates)


@pytest.mark.parametrize("name", ["stand-ins", "expand", "renormalize"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    """Along a direction, of a policy whose choice doesn't change on the way."""
    model = tiny_models.build("mixtral", dtype=torch.float64)
    model.set_experts_implementation("eager")
    norm = model.model.layers[0].post_attention_layernorm.weight
    policy = POLICIES.get(name, CAP.replace(renormalize=True)).replace(keep="first")
    with attach(model, policy, placement=4, calibration=made_up(model)):
        slope = gradients(model, loss_of(model))["model.layers.0.post_attention_layernorm.weight"]
        direction = torch.randn(norm.shape, generator=torch.Generator().manual_seed(0)).to(norm)
        losses = []
        for side in (1, -1):
            with torch.no_grad():
                norm += side * 1e-4 * direction
                losses.append(loss_of(model))
                norm -= side * 1e-4 * direction
    assert float(slope @ direction) == pytest.approx(float(losses[0] - losses[1]) / 2e-4, rel=5e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_several_forwards_wait_for_one_backward(reentrant: bool) -> None:
    """Each keeps its own padding and policy, in whatever order they are computed again."""
    model = tiny_models.build("mixtral")
    unpadded = {**GIVEN, "attention_mask": None}

    def run(pace: Any) -> dict[str, Tensor]:
        first = loss_of(model)
        second = loss_of(model, unpadded)  # the same choice in the first layer
        pace.policy = CAP.replace(capacity_factor=0.5)
        third = loss_of(model)
        pace.policy = CapacityPolicy(mode="observe")
        first.backward(retain_graph=True)
        return gradients(model, first + 2 * second + 3 * third)

    with gradients_of_inputs(model):
        with attach(model, CAP, placement=4) as pace:
            want, counted = run(pace), counts(pace)
        with attach(model, CAP, placement=4) as pace, training(model, reentrant):
            assert_same(run(pace), want)
            assert counts(pace) == counted


def test_records_end_with_their_graph() -> None:
    model = tiny_models.build("mixtral")
    with attach(model, CAP, placement=4) as pace:
        held = pace._state.recomputation._forwards
        loss = loss_of(model)
        assert len(held) == 1
        loss.backward()
        del loss
        with torch.no_grad():
            loss_of(model)
        assert len(held) == 0


def test_a_recorder_sees_a_forward_once(tmp_path: Path) -> None:
    model = tiny_models.build("mixtral")
    with attach(model) as pace, Recorder(pace, tmp_path / "trace", content="choices"):
        with training(model, False):
            loss_of(model).backward()
        loss_of(model, OTHER).backward()
    assert sum(len(chunk.starts) - 1 for chunk in open_trace(tmp_path / "trace").chunks) == 2


@pytest.mark.parametrize("policy", [None, CAP])
def test_the_whole_model_computed_again(policy: CapacityPolicy | None) -> None:
    model = tiny_models.build("mixtral")

    def run(embeddings: Tensor) -> Tensor:
        return loss_of(model, {**GIVEN, "input_ids": None, "inputs_embeds": embeddings})

    embeddings = model.get_input_embeddings()(GIVEN["input_ids"]).detach().requires_grad_()
    with attach(model, policy, placement=4) as pace:
        want = gradients(model, run(embeddings))
        counted = counts(pace)
        pace.reset_stats()
        assert_same(gradients(model, checkpoint(run, embeddings, use_reentrant=False)), want)
        assert counts(pace) == counted
        # its first forward can't be told from inference
        again = checkpoint(run, embeddings, use_reentrant=True)
        if policy is None:
            assert_same(gradients(model, again), want)
        else:
            with pytest.raises(RuntimeError, match="its first forward is unknown"):
                again.backward()
            assert torch.equal(loss_of(model), loss_of(model))  # and it goes on


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_by_itself_computed_again(reentrant: bool) -> None:
    model = tiny_models.build("mixtral")
    block = model.model.layers[0].mlp
    hidden = torch.randn(1, 40, model.config.hidden_size, requires_grad=True)
    with attach(model, CAP, placement=4, token_valid=torch.ones(1, 40).bool()) as pace:
        want = gradients(model, block(hidden).square().mean())
        again = checkpoint(block, hidden, use_reentrant=reentrant).square().mean()
        if reentrant:
            with pytest.raises(RuntimeError, match="its first forward is unknown"):
                again.backward()
        else:
            assert_same(gradients(model, again), want)
        assert pace.stats().layers[0].forwards == 2


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "jamba"])
def test_other_architectures(name: str, how: str, dtype: torch.dtype) -> None:
    model = tiny_models.build(name, dtype=dtype)
    with implementation(model, how) as known, gradients_of_inputs(model):
        if not known:
            pytest.skip(f"{name} has experts of its own")
        with attach(model, CAP, placement=4) as pace:
            model.train()
            want, counted = gradients(model, loss_of(model)), counts(pace)
            model.eval()
        for reentrant in (False, True):
            with attach(model, CAP, placement=4) as pace, training(model, reentrant):
                assert_same(gradients(model, loss_of(model)), want)
                assert counts(pace) == counted
