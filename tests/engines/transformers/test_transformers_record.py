"""Traces of whole models of many architectures: images, layers that see other rows, padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import multimodal_models as whole
import pytest
import tiny_models
from model_runs import output

from paceline import attach
from paceline.plan import Plan
from paceline.traces import open_trace
from paceline.traces.loads import trace_loads
from paceline.traces.record import Recorder
from paceline.traces.simulate import simulate


def recorded(model: Any, given: dict[str, Any], folder: Path) -> tuple[Any, list[Any]]:
    """Statistics of a forward, and the loads of its traces of counts and of choices."""
    loads = []
    for content in ("counts", "choices"):
        with attach(model) as pace, Recorder(pace, folder / content, content):
            output(model, given)
            stats = pace.stats().layers
        loads.append(trace_loads(open_trace(folder / content), 2).to_dict())
    return stats, loads


def groups_of(loads: dict[str, Any]) -> dict[str, int]:
    """Modality -> assignments in all layers."""
    return {group["modality"]: group["assignments"] for group in loads["groups"]}


@pytest.mark.parametrize("name", tiny_models.FIRST_EIGHT)
def test_counts_are_the_models_own(name: str, tmp_path: Path) -> None:
    model, given = tiny_models.build(name), tiny_models.inputs(pad=5)
    stats, (counts, choices) = recorded(model, given, tmp_path)
    assert counts["layers"] == choices["layers"]
    for layer, said in zip(counts["layers"], stats, strict=True):
        assert layer["name"] == said.name
        assert layer["tokens"] == said.tokens == int(given["attention_mask"].sum())
        assert layer["expert_loads"] == said.expert_loads_before


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "glm4v_moe"])
def test_images_are_told_from_text(name: str, tmp_path: Path) -> None:
    prompt = whole.prompt(name, image=(2, 0, 1))
    stats, (counts, choices) = recorded(whole.build(name), prompt.given, tmp_path)
    k, images = stats[0].assignments // stats[0].tokens, int(prompt.of("image").sum())
    wanted = {
        "image": images * k * len(stats),
        "text": (stats[0].tokens - images) * k * len(stats),
    }
    assert groups_of(counts) == groups_of(choices) == wanted


def test_layers_that_see_other_rows(tmp_path: Path) -> None:
    """ernie4_5_vl_moe gives text and image tokens to experts of their own."""
    package = "ernie4_5_vl_moe"
    prompt = whole.prompt(package, image=(2, 0, 1))
    stats, (counts, choices) = recorded(whole.build(package), prompt.given, tmp_path)
    assert counts["layers"] == choices["layers"]
    images, tokens = int(prompt.of("image").sum()), int(prompt.given["attention_mask"].sum())
    for layer, said in zip(counts["layers"], stats, strict=True):
        seen = images if layer["name"].endswith("vision_moe") else tokens - images
        assert layer["tokens"] == said.tokens == seen
        assert layer["expert_loads"] == said.expert_loads_before
    chunk = next(iter(open_trace(tmp_path / "choices").chunks))
    assert chunk.modality is not None
    for index, layer in enumerate(counts["layers"]):
        valid = chunk.fact("valid", index)
        codes = set(chunk.fact("modality", index)[valid].tolist())
        assert codes == ({1} if layer["name"].endswith("vision_moe") else {0})
    result = simulate(open_trace(tmp_path / "choices"), {"it": Plan(placements=(2,))}).to_dict()
    for got, said in zip(result["plans"]["it"]["layers"], stats, strict=True):
        assert got["expert_loads_after"] == said.expert_loads_before


def test_embeddings_alone_are_of_unknown_modality(tmp_path: Path) -> None:
    """A forward that doesn't tell is not recorded as text; a vision tower's rows are images."""
    model = whole.build("dots3_note")
    prompt = whole.prompt("dots3_note", image=(2, 0, 1))
    for name in ("ids", "embeddings"):
        (tmp_path / name).mkdir()
    _, pair = recorded(model, prompt.given, tmp_path / "ids")
    tower = 2 * len(prompt.given["pixel_values"])
    layers, k = 3, tiny_models.TOP_K
    images, real = int(prompt.of("image").sum()), int(prompt.given["attention_mask"].sum())
    for loads in pair:
        assert groups_of(loads) == {
            "image": (layers * images + tower) * k,
            "text": layers * (real - images) * k,
        }
    for loads in recorded(model, whole.embedded(model, prompt), tmp_path / "embeddings")[1]:
        assert groups_of(loads) == {"unknown": layers * real * k}
