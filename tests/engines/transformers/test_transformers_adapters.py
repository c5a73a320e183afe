"""Scores are those of the router as it runs: under adapters, wrappers and hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import tiny_models
import torch
import torch.nn.functional as F
from model_runs import counted, output
from torch import Tensor, nn

from paceline import CapacityPolicy, attach

CAP = CapacityPolicy(capacity_factor=0.7, unit="expert", min_expert_load=0)
GIVEN = tiny_models.inputs(batch=2, length=24)


class Watched:
    """The logits that the block gets from whatever stands where its router was, and the scores."""

    def __init__(self, model: nn.Module, pace: Any) -> None:
        self.logits: list[Tensor] = []
        self.scores: list[Tensor] = []
        self._undo = pace.watch(lambda _, inputs, __: self.scores.append(inputs.scores))
        for block in model.modules():
            if block._modules.get("experts") is not None and block._modules.get("gate") is not None:
                self._follow(block)

    def _follow(self, block: Any) -> None:
        run = type(block).forward

        def forward(hidden: Tensor) -> Any:
            gate = block.gate
            outs: list[Any] = []
            original = gate.__class__.__call__

            class Seen(gate.__class__):  # type: ignore[misc, name-defined]
                def __call__(self, *args: Any, **kwargs: Any) -> Any:
                    outs.append(original(self, *args, **kwargs))
                    return outs[-1]

            former, gate.__class__ = gate.__class__, Seen
            try:
                return run(block, hidden)
            finally:
                gate.__class__ = former
                out = outs[-1]
                self.logits.append(out[0] if isinstance(out, tuple) else out)

        block.__dict__["forward"] = forward

    def check(self, rule: Callable[[Tensor], Tensor], tolerance: float) -> None:
        assert len(self.logits) == len(self.scores) > 0
        for logits, scores in zip(self.logits, self.scores, strict=True):
            torch.testing.assert_close(scores, rule(logits.float()), atol=tolerance, rtol=tolerance)


def softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def lora(model: Any, scale: float = 8.0) -> Any:
    """A LoRA on every router's weight, large enough to change whom it chooses."""
    config = peft.LoraConfig(
        r=2,
        lora_alpha=2 * scale,
        target_modules=[],
        target_parameters=["gate.weight"],
        init_lora_weights=False,
    )
    return peft.get_peft_model(model, config).eval()


def logits_of(model: Any) -> Tensor:
    return output(model, {**GIVEN, "use_cache": False})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("when", ["before", "while attached"])
def test_an_adapter_on_the_router_is_heard(dtype: torch.dtype, when: str) -> None:
    model = tiny_models.build("mixtral", dtype=dtype)
    adapted = lora(model) if when == "before" else model
    with attach(adapted, CAP) as pace:
        if when != "before":
            plain = logits_of(adapted)
            adapted = lora(model)
            assert not torch.equal(logits_of(adapted), plain), "the adapter changes nothing"
        seen = Watched(model, pace)
        logits_of(adapted)
        seen.check(softmax, 1e-5 if dtype is torch.float32 else 1e-6)
        stats = pace.stats().layers
        assert all(layer.dropped > 0 for layer in stats)


def test_adapters_are_scaled_and_switched_while_attached() -> None:
    model = tiny_models.build("mixtral", dtype=torch.bfloat16)
    adapted = lora(model)
    adapted.add_adapter("other", adapted.peft_config["default"])
    with attach(adapted, CAP) as pace:
        seen = Watched(model, pace)
        outputs = [logits_of(adapted)]
        adapted.set_adapter("other")
        outputs.append(logits_of(adapted))
        with adapted.disable_adapter():
            outputs.append(logits_of(adapted))
        for module in model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("other", 3.0)
        outputs.append(logits_of(adapted))
        seen.check(softmax, 1e-6)
    assert len({tuple(o.flatten()[:50].tolist()) for o in outputs}) == 4


class Scaled(nn.Module):
    """A wrapper that somebody puts where the router was."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.inner = router

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        logits, _, ids = self.inner(hidden)
        logits = logits * 0.25
        weights, ids = logits.softmax(-1).topk(ids.shape[1], -1)
        return logits, weights / weights.sum(-1, keepdim=True), ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrapper_put_around_the_router_while_attached_is_heard(dtype: torch.dtype) -> None:
    model = tiny_models.build("mixtral", dtype=dtype)
    with attach(model, CAP) as pace:
        for layer in model.model.layers:
            layer.mlp.gate = Scaled(layer.mlp.gate)
        seen = Watched(model, pace)
        logits_of(model)
        seen.check(softmax, 1e-6)
        for layer in model.model.layers:
            layer.mlp.gate = layer.mlp.gate.inner
        logits_of(model)
        seen.check(softmax, 1e-6 if dtype is torch.float32 else 1e-2)
    for layer in model.model.layers:
        assert "forward" not in layer.mlp.gate.__dict__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ["hook first", "attach first"])
def test_a_hook_that_changes_logits_is_heard(dtype: torch.dtype, order: str) -> None:
    model = tiny_models.build("mixtral", dtype=dtype)

    def biased(module: nn.Module, args: Any, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits = out[0] + torch.linspace(-3, 3, out[0].shape[1], dtype=dtype)
        weights, ids = logits.float().softmax(-1).topk(out[2].shape[1], -1)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(out[1].dtype), ids

    gates = [layer.mlp.gate for layer in model.model.layers]
    if order == "hook first":
        handles = [gate.register_forward_hook(biased) for gate in gates]
    with attach(model, CAP) as pace:
        if order != "hook first":
            handles = [gate.register_forward_hook(biased) for gate in gates]
        seen = Watched(model, pace)
        logits_of(model)
        seen.check(softmax, 1e-6)
        for handle in handles:
            handle.remove()
        logits_of(model)
        seen.check(softmax, 1e-6 if dtype is torch.float32 else 1e-2)
    assert not any(gate._forward_hooks for gate in gates)


def test_weights_that_change_while_attached_are_those_that_count() -> None:
    """Merged adapters change the weight in place."""
    model = tiny_models.build("mixtral", dtype=torch.bfloat16)
    with attach(model, CAP) as pace:
        logits_of(model)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.gate.weight.mul_(-1.5)
        scores: list[Tensor] = []
        inputs: list[Tensor] = []
        hook = model.model.layers[0].mlp.gate.register_forward_pre_hook(
            lambda _, args: inputs.append(args[0].reshape(-1, args[0].shape[-1]))
        )
        pace.watch(lambda _, given, __: scores.append(given.scores))
        logits_of(model)
        hook.remove()
    exact = F.linear(inputs[0].float(), model.model.layers[0].mlp.gate.weight.float()).softmax(-1)
    torch.testing.assert_close(scores[0], exact, atol=1e-6, rtol=1e-5)  # unrounded


ONE_EXPERT = [
    ("mixtral", {}, "softmax"),
    ("qwen3_moe", {"norm_topk_prob": True}, "softmax"),
    ("deepseek_v3", {}, "sigmoid"),
    ("gpt_oss", {}, "softmax"),
    ("olmoe", {"norm_topk_prob": False}, "softmax"),
]


@pytest.mark.parametrize(("name", "options", "rule"), ONE_EXPERT)
def test_one_expert_a_token_has_its_rule(name: str, options: dict[str, Any], rule: str) -> None:
    model = tiny_models.build(name, num_experts_per_tok=1, **options)
    before = {k: dict(m.__dict__) for k, m in model.named_modules()}
    with attach(model, CAP) as pace:
        assert {(s.scoring, s.level) for s in pace.support} == {(rule, "full")}
        counter, out = counted(model, GIVEN)
        assert out.isfinite().all()
        for layer in pace.stats().layers:
            assert layer.dropped > 0
            assert counter.rows(f"{layer.name}.experts").tolist() == layer.expert_loads_after
    for key, module in model.named_modules():
        for attribute in ("top_k", "num_experts_per_tok"):
            assert module.__dict__.get(attribute) == before[key].get(attribute)


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen3_moe"])
def test_every_expert_for_every_token_has_its_rule(name: str) -> None:
    model = tiny_models.build(name, num_experts_per_tok=8)
    with attach(model, CAP) as pace:
        assert {(s.scoring, s.level) for s in pace.support} == {("softmax", "full")}
        seen: list[Any] = []
        pace.watch(lambda _, inputs, __: seen.append(inputs))
        output(model, GIVEN)
        for inputs in seen:
            ratio = inputs.topk_weights / inputs.scores.gather(1, inputs.topk_ids.long())
            torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), atol=1e-4, rtol=1e-4)
        for layer in pace.stats().layers:
            assert max(layer.expert_loads_after) <= 34  # 0.7 of 48 tokens, rounded up


def test_one_expert_that_hides_its_rule_says_so() -> None:
    """A router that can't be told to choose two."""
    model = tiny_models.build("mixtral", num_experts_per_tok=1)
    for layer in model.model.layers:
        gate = layer.mlp.gate
        run = type(gate).forward
        gate.hidden_k, gate.top_k = 1, None

        def forward(hidden: Tensor, gate: Any = gate, run: Any = run) -> Any:
            gate.top_k = gate.hidden_k
            try:
                return run(gate, hidden)
            finally:
                gate.top_k = None

        gate.forward = forward
        layer.mlp.top_k = None
    with attach(model) as pace:
        assert {s.reason for s in pace.support} == {
            "one expert per token, always weighted alike, hides the scoring rule"
        }
    with pytest.raises(ValueError, match="always weighted alike"):
        attach(model, CAP)
    attach(model, CAP.replace(keep="first")).detach()
