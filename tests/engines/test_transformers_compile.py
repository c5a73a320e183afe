"""An attached model compiles as one graph: nothing of Paceline breaks it or compiles it anew."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from helpers import output

from paceline import attach


@pytest.fixture(scope="module")
def model() -> Any:
    tiny = tiny_models.build("mixtral", num_hidden_layers=1)
    tiny.set_experts_implementation("grouped_mm")
    return tiny


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize(
    "policy",
    [
        None,
        "capacity_factor=1,min_expert_load=0",
        "capacity_factor=1,min_expert_load=0,keep=random,pool=request",
        "capacity_factor=1,min_expert_load=0,expand=all,expand_limit=2,protect_first=2",
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
