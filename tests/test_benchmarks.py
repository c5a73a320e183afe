"""Programs in benchmarks/: what they committed is what pages show, and what they count is right."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.demo.assets import shipped_decode, shipped_sweep
from paceline.evaluation.sweep_results import read_sweep
from paceline.reporting.quality_figures import decode_figure

ROOT = Path(__file__).parent.parent


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a program's definitions with its neighbours importable, as Python does for a program."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return lambda name: runpy.run_path(str(ROOT / "benchmarks" / name))


def test_the_demo_shows_what_was_measured(program: Any) -> None:
    found, made = shipped_decode(), program("active_experts.py")
    assert found is not None
    shipped = found.to_dict()
    measured = (ROOT / "benchmarks" / "results" / "active_experts.json").read_text("utf-8")
    assert shipped == made["shipped"](json.loads(measured)), (
        "run python benchmarks/active_experts.py --ship"
    )
    figure = decode_figure(shipped)
    batches = {point["batch"] for point in shipped["points"]}
    assert len(figure["data"]) == 3 * len(batches)
    shown = {(trace["name"], x) for trace in figure["data"] for x in trace["x"]}
    assert len(shown) == len(shipped["points"])


def test_the_demo_page_shows_the_measured_sweep() -> None:
    shipped = shipped_sweep()
    assert shipped is not None
    assert shipped == read_sweep(ROOT / "benchmarks" / "results" / "sweep.json"), (
        "run python benchmarks/quality.py sweep --ship"
    )
    assert {point.compensate for point in shipped.points} == {False, True}


@pytest.mark.parametrize(("page", "tables"), [("decode", "active"), ("quality", "quality")])
def test_the_tables_of_a_page_are_of_the_results(program: Any, page: str, tables: str) -> None:
    made = program(f"{tables}_tables.py")
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    for name in made["tables"]():
        assert text.count(f"<!-- end of {name} -->") == 1
    assert made["page"](text) == text, f"run python benchmarks/{tables}_tables.py --write"


def test_weights_read_are_counted_below_the_engine(program: Any) -> None:
    made = program("decode_models.py")
    shape = made["Shape"]("small", 32, 16, 8, 2, 4)
    model = made["random_model"](shape, 2, torch.float32)
    ids = torch.arange(3).unsqueeze(1)
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
        for layer in model.model.layers
    ]
    with torch.no_grad(), made["WeightsRead"](model) as read:
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    expected = [len(torch.unique(found)) for found in chosen]
    assert [int(found.sum()) for found in read.experts.values()] == expected
    expert = 3 * 32 * 16 * 4
    attention, router, head = 4 * 32 * 32 * 4, 8 * 32 * 4, 512 * 32 * 4
    assert read.bytes == sum(expected) * expert + 2 * (attention + router) + head
