"""What attach accepts and refuses: by what a model does, in one sentence, leaving it untouched."""

from __future__ import annotations

from functools import partial
from typing import Any

import made_up
import pytest
import tiny_models
import torch
from made_up import Block, Model
from model_runs import capacity, counted, fingerprint, loads, model_of
from row_counter import RowCounter
from torch import nn

from paceline import CapacityPolicy, ExpertPlacement, attach

CAP = CapacityPolicy(capacity_factor=1, unit="expert", min_expert_load=0)


def made(block: Any = Block) -> Any:
    model = Model(block).eval()
    model.config = type("Config", (), {"to_dict": lambda self: {}})()
    return model


@pytest.mark.parametrize(
    ("block", "scoring"),
    [
        (Block, "softmax"),
        (made_up.KeywordBlock, "softmax"),
        (partial(Block, router=made_up.SigmoidRouter), "sigmoid"),
        (partial(Block, experts=made_up.ClampingExperts), "softmax"),
    ],
)
def test_a_new_architecture_that_follows_the_seam_just_works(block: Any, scoring: str) -> None:
    model, ids = made(block), made_up.tokens()
    before, want = fingerprint(model), model(ids)
    _, chosen = _first_choice(model, ids)
    with attach(model) as pace:
        assert torch.equal(model(ids), want)
        assert [s.scoring for s in pace.support] == [scoring] * 2
        assert [s.level for s in pace.support] == ["full"] * 2
        pace.policy = CAP
        counter, _ = counted(model, {"input_ids": ids})
    rows = counter.rows("layers.0.experts")
    cap = capacity("1", ids.numel(), made_up.TOP_K, 1, made_up.EXPERTS)
    every = torch.ones(ids.numel(), dtype=torch.bool)
    assert torch.equal(rows, loads(chosen, every, made_up.EXPERTS).clamp(max=cap))
    assert rows.sum() < ids.numel() * made_up.TOP_K
    assert fingerprint(model) == before
    assert torch.equal(model(ids), want)


def _first_choice(model: Any, ids: torch.Tensor) -> Any:
    with torch.no_grad():
        return model.layers[0].gate(model.embed(ids).reshape(-1, made_up.HIDDEN))[-2:]


def test_a_factor_of_each_expert_allows_dropping_by_score_but_no_expansion() -> None:
    model = made(partial(Block, router=made_up.ScaledRouter))
    with attach(model, CAP) as pace:
        assert (pace.support[0].scoring, pace.support[0].level) == ("softmax", "drop only")
        with pytest.raises(ValueError, match=r"expand=all is not possible for layer layers.0"):
            pace.policy = CAP.replace(expand="all")


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (partial(Block, router=made_up.RandomRouter), "proportional to no known scoring"),
        (partial(made_up.BareBlock, router=made_up.NoLogitsRouter), "returns no logits"),
    ],
)
def test_without_a_scoring_rule_everything_but_scores_works(block: Any, reason: str) -> None:
    model, ids = made(block), made_up.tokens()
    with pytest.raises(
        ValueError, match=f"keep=score is not possible for layer layers.0: .*{reason}"
    ):
        attach(model, CAP)
    for keep in ("weight", "first", "last", "random"):
        with attach(model, CAP.replace(keep=keep)) as pace:
            model(ids)
            assert pace.stats().layers[0].dropped > 0
            assert pace.support[0].level == "drop only"


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (made_up.NeverCalls, "layers.0 can't be handled: its forward doesn't call its experts"),
        (made_up.DenseScores, "layers.0 can't be handled: its experts are given choices of shape"),
        (
            made_up.Unrouted,
            r"layers.0 \(Unrouted\) can't be handled: .* no child named gate or router",
        ),
    ],
)
def test_what_only_looks_like_the_seam_is_refused(block: Any, reason: str) -> None:
    model = made(block)
    before = fingerprint(model)
    with pytest.raises(ValueError, match=reason):
        attach(model)
    assert fingerprint(model) == before


def test_one_layer_that_fails_leaves_the_others_untouched() -> None:
    model = made()
    model.layers.append(made_up.NeverCalls().eval())
    before = fingerprint(model)
    with pytest.raises(ValueError, match=r"layers\.2"):
        attach(model)
    assert fingerprint(model) == before


def test_experts_that_turn_out_never_to_run_are_an_error() -> None:
    model = made_up.Positioned(made_up.NeedsMore).eval()
    with (
        attach(model),
        pytest.raises(RuntimeError, match=r"layers\.0 can't be handled: its router ran"),
    ):
        model(made_up.tokens())
    model(made_up.tokens())


def test_a_dense_model_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match="Dense has no Mixture-of-Experts layer: it is a dense model"
    ):
        attach(made_up.Dense().eval())


def test_experts_outside_the_seam_are_not_overlooked() -> None:
    model = made()
    model.tail = made_up.Experts()
    with pytest.raises(ValueError, match=r"layer tail \(Experts\) can't be handled"):
        attach(model)


def test_training_compiled_attached_and_offloaded_models_are_refused() -> None:
    model = made()
    with pytest.raises(ValueError, match="Model is in training mode"):
        attach(model.train())
    model.eval()
    with pytest.raises(ValueError, match="already compiled"):
        attach(torch.compile(model))
    model.layers[0].compile()
    with pytest.raises(ValueError, match="already compiled"):
        attach(model)
    model = made()
    with attach(model), pytest.raises(ValueError, match="already attached"):
        attach(model)
    with attach(model):
        pass
    with pytest.raises(ValueError, match="meta device"):
        attach(made().to("meta"))
    with pytest.raises(ValueError, match="model must be a torch module"):
        attach("mixtral")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"policy": CAP.replace(pool="source")}, "needs to know the device .* token_source"),
        ({"policy": CAP.replace(expand="own_device")}, "needs to know the device .* token_source"),
        ({"policy": CAP, "placement": 9}, "num_devices must be .* got 9"),
        (
            {"policy": CAP, "placement": ExpertPlacement.contiguous(4, 2)},
            "placement must be .* got one of 4 experts",
        ),
        ({"policy": "capacity_factor=1,min_expert_load=0", "placement": 1}, "can never bind"),
        ({"policy": "capacity_factor=1,expand=all,max_experts=1"}, "max_experts must be .* got 1"),
        ({"policy": CAP.replace(drop_first="image")}, "reads text alone"),
        ({"policy": "config"}, "has no capacity_policy"),
        ({"policy": "nonsense"}, "nonsense"),
        ({"policy": 1.25}, "policy must be .* got float"),
        ({"token_source": "tokens"}, "token_source must be None, .*got 'tokens'"),
    ],
)
def test_a_bad_argument_is_one_sentence_and_changes_nothing(kwargs: Any, reason: str) -> None:
    model = made()
    before = fingerprint(model)
    with pytest.raises(ValueError, match=reason) as caught:
        attach(model, **kwargs)
    assert "\n" not in str(caught.value)
    assert fingerprint(model) == before


def test_an_error_in_a_forward_leaves_a_model_that_still_works() -> None:
    model, ids = made(), made_up.tokens()
    with attach(model, CAP) as pace:
        want = model(ids)
        with pytest.raises(IndexError):
            model(ids + 1000)
        assert pace._state.context is None
        assert torch.equal(model(ids), want)
        with pytest.raises(ValueError, match="attention_mask"):
            model(ids, attention_mask=torch.ones(1, 2, 3))
        assert torch.equal(model(ids), want)
    pace.detach()  # twice is once
    with pytest.raises(ValueError, match="detached"):
        pace.policy = CAP


def test_probing_disturbs_neither_random_state_nor_hooks_nor_buffers() -> None:
    model = model_of("deepseek_v3")
    calls: list[str] = []
    hooks = [m.register_forward_hook(lambda *_: calls.append("hook")) for m in model.modules()]
    buffers = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    attach(model).detach()
    assert torch.equal(torch.get_rng_state(), state)
    assert not calls
    assert all(torch.equal(v, buffers[k]) for k, v in model.state_dict().items())
    for hook in hooks:
        hook.remove()


def test_a_forward_put_there_by_somebody_else_is_used_and_put_back() -> None:
    model, given = model_of("mixtral"), tiny_models.inputs()
    experts = next(m for n, m in model.named_modules() if n.endswith("experts"))
    calls, original = [], experts.forward

    def other(*args: Any) -> Any:
        calls.append(len(args[1]))
        return original(*args)

    experts.forward = other
    try:
        with attach(model, CAP):
            model(**given)
            assert calls
        assert experts.__dict__["forward"] is other
    finally:
        del experts.forward


@pytest.mark.parametrize("how", ["eager", "grouped_mm", "batched_mm"])
def test_models_that_accelerate_spread_over_devices_keep_their_hooks(how: str) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model, given = tiny_models.build("mixtral"), tiny_models.inputs()
    with attach(model, CAP):
        want = model(**given).logits
    for module in list(model.modules()):
        if next(module.parameters(recurse=False), None) is not None:
            hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu", io_same_device=True))
    model.set_experts_implementation(how)
    before = fingerprint(model)
    with attach(model, CAP):
        counter, logits = counted(model, given)
        torch.testing.assert_close(logits, want)
        cap = capacity("1", 48, 2, 1, 8)
        assert max(counter.rows("model.layers.0.mlp.experts")) == cap
    assert fingerprint(model) == before


def test_the_row_counter_sees_what_an_untouched_model_computes() -> None:
    """Without Paceline the instrument counts every assignment, whatever runs the experts."""
    from model_runs import IMPLEMENTATIONS, choices, implementation, output

    for name in ("mixtral", "gpt_oss"):
        model, given = model_of(name), tiny_models.inputs(pad=5)
        for how in IMPLEMENTATIONS:
            with implementation(model, how):
                counter = RowCounter(model)
                with counter:
                    output(model, given)
                for layer, (ids, _) in choices(model, given).items():
                    assert torch.equal(
                        counter.rows(layer), torch.bincount(ids.flatten(), minlength=8)
                    )


def test_a_plain_module_without_config_can_be_attached() -> None:
    model = nn.Sequential(Block(), Block()).eval()
    hidden = torch.randn(2, 12, made_up.HIDDEN)
    with attach(model, CAP) as pace:
        model(hidden)
        assert pace.stats().layers[0].dropped > 0
        assert pace.stats().layers[0].tokens == 24
