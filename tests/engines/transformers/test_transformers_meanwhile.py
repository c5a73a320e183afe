"""What changes while a forward runs, as another thread may do it: watchers, the attachment."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tiny_models
import torch
from model_runs import fingerprint, model_of, output

from paceline.engines.transformers import attach
from paceline.facts import Facts
from paceline.policy import CapacityPolicy

CAP = CapacityPolicy(capacity_factor=1.0, min_expert_load=0)
GIVEN = tiny_models.inputs(batch=2, length=24)


@pytest.fixture
def model() -> Any:
    return model_of("qwen2_moe")


def once_between(model: Any, do: Any) -> Any:
    """Do something once between the first layer's router and its experts; what takes it back."""
    done: list[Any] = []
    gate = model.model.layers[0].mlp.gate
    return gate.register_forward_hook(lambda *_: done or done.append(do()) or None)


@pytest.mark.parametrize("order", ["hook first", "attach first"])
def test_a_model_detached_in_the_middle_of_a_forward(model: Any, order: str) -> None:
    untouched = fingerprint(model)
    if order == "attach first":
        pace = attach(model, CAP)
        hook = once_between(model, pace.detach)
    else:
        hook = once_between(model, lambda: pace.detach())
        pace = attach(model, CAP)
    output(model, GIVEN)
    hook.remove()
    assert fingerprint(model) == untouched


def test_a_watcher_that_starts_in_the_middle_sees_whole_forwards(model: Any) -> None:
    seen: list[tuple[str, bool]] = []
    with attach(model) as pace:

        def watcher(layer: str, inputs: Any, assignment: Any) -> None:
            seen.append((layer, inputs.scores is not None))

        hook = once_between(model, lambda: pace.watch(watcher, Facts(scores=True)))
        output(model, GIVEN)
        hook.remove()
        assert seen == []
        output(model, GIVEN)
        assert seen == [(layer, True) for layer in pace.layers]


def test_a_watcher_that_ends_in_the_middle_is_not_called_again(model: Any) -> None:
    seen: list[str] = []
    with attach(model) as pace:

        def watcher(layer: str, inputs: Any, assignment: Any) -> None:
            seen.append(layer)
            end()

        end = pace.watch(watcher)
        output(model, GIVEN)
        assert seen == pace.layers[:1]


def test_threads_that_begin_at_once_listen_to_a_router_once(model: Any) -> None:
    untouched = fingerprint(model)
    together = threading.Barrier(8)
    with attach(model, CAP) as pace:
        for layer in pace._layers:
            # as if something had been put on the router: all threads find that they don't hear it
            for _ in range(10):
                layer.router.undo()

                def begin(layer: Any = layer) -> None:
                    together.wait()
                    layer.router.ensure()

                threads = [threading.Thread(target=begin) for _ in range(8)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
    assert fingerprint(model) == untouched


def test_a_forward_that_begins_after_detach_leaves_nothing_on_routers(model: Any) -> None:
    untouched = fingerprint(model)
    pace = attach(model, CAP)
    prepare = pace._state.before_forward  # as a forward read it that goes on after detach
    pace.detach()
    for ensure_heard in prepare:
        ensure_heard()
    assert fingerprint(model) == untouched


def test_a_model_moved_to_half_precision_while_attached_has_unrounded_scores() -> None:
    def scores(when: str) -> Any:
        model = tiny_models.build("qwen2_moe")
        if when == "before":
            model.bfloat16()
        seen: list[Any] = []
        with attach(model, CAP) as pace:
            model.bfloat16()
            pace.watch(lambda layer, inputs, assignment: seen.append(inputs.scores))
            output(model, GIVEN)
        return seen[0]

    after = scores("after")
    assert torch.equal(after, scores("before"))
    assert not torch.equal(after, after.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_rounds_no_scores(dtype: torch.dtype) -> None:
    model = tiny_models.build("qwen2_moe", dtype=dtype)
    seen: list[Any] = []
    heard: list[Any] = []
    gate = model.model.layers[0].mlp.gate
    hook = gate.register_forward_pre_hook(lambda _, args: heard.append(args[0]))
    with attach(model, CAP) as pace, torch.autocast("cpu", torch.bfloat16):
        pace.watch(lambda layer, inputs, assignment: seen.append(inputs.scores))
        heard.clear()
        output(model, GIVEN)
    hook.remove()
    with torch.no_grad():
        given = (heard[0].bfloat16().float(), gate.weight.bfloat16().float())
        exact = torch.nn.functional.linear(*given).softmax(-1)
    torch.testing.assert_close(seen[0], exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["eager", "batched_mm"])
def test_double_precision(how: str) -> None:
    model = tiny_models.build("qwen2_moe")
    model.set_experts_implementation(how)
    with attach(model, CAP):
        single = output(model, GIVEN)
        double = output(model.double(), GIVEN)
    torch.testing.assert_close(double.float(), single, rtol=1e-2, atol=1e-3)
