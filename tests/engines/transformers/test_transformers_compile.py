"""An attached model compiles as one graph: nothing of Paceline breaks it or compiles it anew."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import tiny_models
import torch
from model_runs import output

from paceline import attach

CAP = "capacity_factor=1,min_expert_load=0"
BATCHES = [
    tiny_models.inputs(batch=b, length=n, seed=n, pad=3) for b, n in ((2, 24), (2, 31), (3, 17))
]
HAS_COMPILER = any(map(shutil.which, (os.environ.get("CXX", "g++"), "c++", "clang++")))
pytestmark = pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"
)


@pytest.fixture(scope="module")
def model() -> Any:
    tiny = tiny_models.build("mixtral", num_hidden_layers=1)
    tiny.set_experts_implementation("grouped_mm")
    return tiny


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(None, marks=pytest.mark.full),
        "capacity_factor=1,min_expert_load=0",
        pytest.param(f"{CAP},keep=random,pool=request", marks=pytest.mark.full),
        pytest.param(f"{CAP},expand=all,expand_limit=2,protect_first=2", marks=pytest.mark.full),
    ],
)
def test_an_attached_model_compiles_as_one_graph(model: Any, policy: str | None) -> None:
    given = tiny_models.inputs(pad=5)
    graphs = 0

    def backend(graph: Any, example_inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    with attach(model, policy) as pace:
        want = [output(model, given) for _ in range(3)]
        eager = pace.stats().to_dict()["layers"]
    with attach(model, policy) as pace:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        got = [output(compiled, given) for _ in range(3)]
        assert pace.stats().to_dict()["layers"] == eager
    torch._dynamo.reset()
    assert graphs == 1
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("policy", "dynamic"),
    [
        pytest.param(CAP, None, marks=pytest.mark.full),
        pytest.param(None, True, marks=pytest.mark.full),
        pytest.param(CAP, True, marks=pytest.mark.full),
        pytest.param(f"{CAP},pool=request,phase=prefill", True, marks=pytest.mark.full),
        (f"{CAP},expand=all,protect_first=2", True),
    ],
)
def test_batches_of_several_sizes(model: Any, policy: str | None, dynamic: bool | None) -> None:
    """Every size known and none: what an untouched model compiles with, an attached one does."""
    torch._dynamo.reset()
    with attach(model, policy) as pace:
        want = [output(model, given) for given in BATCHES]
        eager = pace.stats().to_dict()["layers"]
    with attach(model, policy) as pace:
        compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=dynamic)
        got = [output(compiled, given) for given in BATCHES]
        assert pace.stats().to_dict()["layers"] == eager
    torch._dynamo.reset()
    for a, b, given in zip(got, want, BATCHES, strict=True):
        real = given["attention_mask"].bool()
        torch.testing.assert_close(a[real], b[real])


@pytest.mark.full
@pytest.mark.skipif(not HAS_COMPILER, reason="inductor needs a C++ compiler")
def test_inductor_compiles_an_attached_model(model: Any) -> None:
    torch._dynamo.reset()
    with attach(model, CAP) as pace:
        want = [output(model, given) for given in BATCHES[:2]]
        eager = pace.stats().layers[0].expert_loads_after
        pace.reset_stats()
        compiled = torch.compile(model, backend="inductor", dynamic=True)
        got = [output(compiled, given) for given in BATCHES[:2]]
        assert pace.stats().layers[0].expert_loads_after == eager
        assert pace.stats().layers[0].dropped > 0
    torch._dynamo.reset()
    for a, b, given in zip(got, want, BATCHES, strict=False):
        real = given["attention_mask"].bool()
        torch.testing.assert_close(a[real], b[real], atol=1e-4, rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_graph_that_breaks_keeps_what_is_known_of_its_tokens(
    model: Any, dynamic: bool | None
) -> None:
    torch._dynamo.reset()
    with attach(model, CAP) as pace:
        want = output(model, BATCHES[0])
        pace.reset_stats()
        pace.watch(lambda *_: torch._dynamo.graph_break())
        compiled = torch.compile(model, backend="eager", dynamic=dynamic)
        got = output(compiled, BATCHES[0])
        assert pace.stats().layers[0].tokens == 45
    real = BATCHES[0]["attention_mask"].bool()
    torch.testing.assert_close(got[real], want[real])
    torch._dynamo.reset()
