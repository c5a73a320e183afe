"""Forwards of one attached model that overlap in several threads, and policies that change live."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tiny_models
import torch
from model_runs import model_of, output
from torch import Tensor

from paceline import CapacityPolicy, attach

CAP = CapacityPolicy(capacity_factor=0.8, min_expert_load=0)
POLICIES = [
    None,
    CAP,
    CAP.replace(pool="request"),
    CAP.replace(mode="shadow"),
    CAP.replace(protect_first=3, phase="prefill"),
    CAP.replace(expand="all", expand_limit=2),
]


@pytest.fixture
def model() -> Any:
    return model_of("mixtral")


def overlapping(model: Any, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """`second` starts while `first` is inside the model, and ends after it."""
    inside, go = threading.Event(), threading.Event()
    names = threading.local()

    def meet(module: Any, args: Any, out: Any) -> None:
        who = getattr(names, "who", None)
        if who == "first":
            inside.set()
            go.wait(60)
        elif who == "second":
            go.set()
            names.other.join(60)
        names.who = None

    def run(who: str, what: Callable[[], Any], other: threading.Thread | None) -> None:
        names.who, names.other = who, other
        try:
            results[who] = what()
        except Exception as error:
            results[who] = error
            inside.set()
            go.set()

    results: dict[str, Any] = {}
    hook = model.model.embed_tokens.register_forward_hook(meet)
    a = threading.Thread(target=run, args=("first", first, None))
    b = threading.Thread(target=run, args=("second", second, a))
    try:
        a.start()
        assert inside.wait(60)
        b.start()
        b.join(120)
        a.join(120)
    finally:
        hook.remove()
    return results["first"], results["second"]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_overlapping_forwards_get_their_own_facts(model: Any, policy: Any) -> None:
    a = tiny_models.inputs(batch=2, length=40, seed=1)
    b = tiny_models.inputs(batch=2, length=40, seed=2, pad=30)  # of one shape
    c = tiny_models.inputs(batch=3, length=24, seed=3, pad=5)
    given = (a, b, c)

    def runs(index: int) -> Callable[[], Tensor]:
        return lambda: output(model, given[index])

    with attach(model, policy) as pace:
        want = [runs(index)() for index in range(3)]
        for left, right in ((0, 1), (1, 2), (2, 0)):
            pace.reset_stats()
            got = overlapping(model, runs(left), runs(right))
            for one, index in zip(got, (left, right), strict=True):
                if isinstance(one, Exception):
                    raise one
                assert torch.equal(one, want[index])
            tokens = sum(int(given[i]["attention_mask"].sum()) for i in (left, right))
            assert [s.tokens for s in pace.stats().layers] == [tokens] * 3
            assert pace._state.context is None
        assert torch.equal(output(model, b), want[1])


def test_a_forward_that_fails_beside_another_leaves_nothing_stale(model: Any) -> None:
    good, other = tiny_models.inputs(batch=2, length=40), tiny_models.inputs(batch=3, length=24)
    with attach(model, CAP) as pace:
        want = output(model, good), output(model, other)

        def failing() -> Tensor:
            handle = model.model.layers[1].mlp.gate.register_forward_hook(fail)
            try:
                return output(model, other)
            finally:
                handle.remove()

        main = threading.get_ident()

        def fail(*_: Any) -> None:
            if threading.get_ident() != main and not failed:
                failed.append(True)
                raise ZeroDivisionError

        failed: list[bool] = []
        results = overlapping(model, lambda: output(model, good), failing)
        assert sum(isinstance(r, ZeroDivisionError) for r in results) == 1
        assert torch.equal(output(model, good), want[0])
        assert torch.equal(output(model, other), want[1])
        assert pace._state.context is None
        assert not pace._state.thread.router


def test_generations_in_two_threads_end_their_own_rows(model: Any) -> None:
    a, b = (
        tiny_models.inputs(batch=4, length=6, seed=1),
        tiny_models.inputs(batch=4, length=9, seed=2),
    )
    kwargs: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    # tokens that some rows come across, so that they end early
    ends = [int(model.generate(**g, **kwargs, eos_token_id=None)[1, -4]) for g in (a, b)]
    runs = [
        lambda g=g, end=end: model.generate(**g, **kwargs, eos_token_id=end)
        for g, end in zip((a, b), ends, strict=True)
    ]
    with attach(model, CAP.replace(phase="prefill")) as pace:
        want, tokens = [], []
        for run in runs:
            pace.reset_stats()
            want.append(run())
            tokens.append(pace.stats().layers[0].tokens)
        pace.reset_stats()
        got = overlapping(model, *runs)
        assert all(map(torch.equal, got, want))
        assert pace.stats().layers[0].tokens == sum(tokens)


def test_many_threads_and_a_policy_that_changes_meanwhile(model: Any) -> None:
    """Every forward runs whole under one of the policies that were in force while it ran."""
    torch.manual_seed(0)
    batches = [
        tiny_models.inputs(batch=b, length=n, seed=n, pad=b) for b, n in ((1, 24), (2, 17), (4, 31))
    ]
    policies = [None, CAP, CAP.replace(pool="request", capacity_factor=0.5)]
    allowed = []
    for policy in policies:
        with attach(model, policy):
            allowed.append([output(model, given) for given in batches])
    with attach(model) as pace:
        stop = threading.Event()

        def work(number: int) -> int:
            runs = 0
            while not stop.is_set() or runs < 5:
                index = (number + runs) % len(batches)
                got = output(model, batches[index])
                assert any(torch.equal(got, want[index]) for want in allowed)
                runs += 1
            return runs

        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(work, n) for n in range(4)]
            for turn in range(30):
                pace.policy = policies[turn % len(policies)]
            stop.set()
            runs = sum(job.result() for job in jobs)
        assert [s.forwards for s in pace.stats().layers] == [runs] * len(pace.layers)
        assert pace._state.context is None


def test_random_drops_of_threads_are_those_of_forwards_in_some_order(model: Any) -> None:
    given = tiny_models.inputs(batch=2, length=24)
    policy = CAP.replace(keep="random")
    with attach(model, policy):
        want = [output(model, given) for _ in range(6)]
    with attach(model, policy), ThreadPoolExecutor(3) as pool:
        got = [job.result() for job in [pool.submit(output, model, given) for _ in range(6)]]
    left = list(range(6))
    for one in got:
        left.remove(next(i for i in left if torch.equal(one, want[i])))
    assert not left
