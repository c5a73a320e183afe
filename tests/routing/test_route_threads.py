"""Statistics lose and double nothing when threads share them, and a copy is on its own."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs, route
from paceline.routing.stats import LoadAccumulator

THREADS, TURNS, ROWS = 4, 300, 3


@pytest.fixture(autouse=True)
def _often() -> Iterator[None]:
    """Threads take turns as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def accumulator() -> LoadAccumulator:
    return LoadAccumulator("x", ExpertPlacement.contiguous(4, 2), 1, "cpu")


def ids_of(expert: int) -> torch.Tensor:
    return torch.full((ROWS, 1), expert)


def together(*works: Callable[[], None]) -> None:
    """Run them at once; what one raises is raised here."""
    raised: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            start.wait()
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def test_threads_that_count_and_read_at_once_lose_nothing() -> None:
    loads = accumulator()
    policy = CapacityPolicy(capacity_factor=1, keep="first", min_expert_load=0)

    def observe(expert: int) -> None:
        for _ in range(TURNS):
            loads.observe(ids_of(expert))

    def add(expert: int) -> None:
        for _ in range(TURNS // 10):
            inputs = RoutingInputs(ids_of(expert), torch.ones(ROWS, 1), num_experts=4)
            loads.add(route(inputs, policy, loads.placement))

    def read() -> None:
        seen = 0
        for _ in range(TURNS // 10):
            now = loads.result()
            assert now.tokens == ROWS * now.forwards  # of one moment
            assert sum(now.expert_loads_before) == now.assignments == now.tokens
            assert now.forwards >= seen
            seen = now.forwards

    together(
        *[lambda e=expert: observe(e) for expert in range(THREADS)],
        *[lambda e=expert: add(e) for expert in range(2)],
        read, read,
    )  # fmt: skip
    got = loads.result()
    observed, added = TURNS, TURNS // 10
    assert got.forwards == THREADS * observed + 2 * added
    assert got.expert_loads_before == [ROWS * (observed + added)] * 2 + [ROWS * observed] * 2
    assert got.dropped == 2 * added * (ROWS - 2)  # ceil(3 / 2) may stay of 3


def test_what_a_reset_forgets_is_forgotten_once() -> None:
    """Forwards between resets: none is counted before and after the same reset."""
    loads = accumulator()
    done = threading.Event()

    def observe() -> None:
        for _ in range(4 * TURNS):
            loads.observe(ids_of(1))
        done.set()

    def reset() -> None:
        while not done.is_set():
            loads.reset()
            got = loads.result()
            assert got.forwards * ROWS == got.tokens == got.expert_loads_before[1]

    together(observe, reset)
    assert loads.result().forwards <= 4 * TURNS
    loads.reset()
    loads.observe(ids_of(2))
    assert loads.result().expert_loads_before == [0, 0, ROWS, 0]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_copy_counts_on_its_own(how: Callable[[LoadAccumulator], LoadAccumulator]) -> None:
    loads = accumulator()
    loads.min_expert_load = 8.0
    loads.observe(ids_of(0))
    loads.result()  # counted, and one that waits:
    loads.observe(ids_of(1))
    twin = how(loads)
    assert twin.result() == loads.result()
    assert twin.result().min_expert_load == 8.0
    twin.observe(ids_of(2))
    loads.observe(ids_of(3))
    assert twin.result().expert_loads_before == [3, 3, 3, 0]
    assert loads.result().expert_loads_before == [3, 3, 0, 3]


def test_copies_made_while_threads_count_are_of_one_moment() -> None:
    loads = accumulator()

    def observe() -> None:
        for _ in range(2 * TURNS):
            loads.observe(ids_of(1))

    def copied() -> None:
        for _ in range(TURNS // 10):
            got = copy.deepcopy(loads).result()
            assert got.tokens == ROWS * got.forwards == got.expert_loads_before[1]

    together(observe, observe, copied, copied)
    assert loads.result().forwards == 4 * TURNS


def test_counts_begun_in_inference_mode_go_on_outside() -> None:
    with torch.inference_mode():
        loads = accumulator()
        loads.observe(ids_of(0))
        loads.reset()
        twin = copy.copy(loads)
        loads.observe(ids_of(0))
    for one in (loads, twin):
        one.observe(ids_of(1))
        assert one.result().expert_loads_before[1] == ROWS


def test_the_resolved_minimum_load_is_reported() -> None:
    loads = accumulator()
    assert loads.result().min_expert_load is None
    loads.min_expert_load = 64.0
    assert loads.result().to_dict()["min_expert_load"] == 64.0
