"""`paceline bench`: placements and plans, and one sentence for every bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from paceline.cli.app import app

LAYER = ["bench", "layer", "--shape", "tiny", "--tokens", "64", "--rounds", "1"]
SIZES = ["--sequences", "4", "--prompt-tokens", "16", "--new-tokens", "2", "--rounds", "1"]
MODEL = ["bench", "model", *SIZES]
PLANS = {
    "placed": "[placement]\nnum_devices = 3\nexpert_to_device = [2, 0, 0, 0, 0, 0, 0, 2]\n",
    "two": "[[placements]]\nnum_devices = 5\n[[placements]]\nnum_devices = 2\n",
    "four": "[[placements]]\nnum_devices = 8\n" * 3 + "[[placements]]\nnum_devices = 2\n",
    "capped": "[policy]\ncapacity_factor = 1.0\nmin_expert_load = 0\n",
    "each": "[[policies]]\nmode = 'observe'\n" * 3
    + "[[policies]]\ncapacity_factor = 0.5\nmin_expert_load = 0\n",
    "other": "[model]\nk = 7\n",
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plans")
    for name, content in PLANS.items():
        (folder / f"{name}.toml").write_text(f"version = 1\n{content}", encoding="utf-8")
    return {name: folder / f"{name}.toml" for name in PLANS}


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def results(*arguments: str | Path) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_layer_with_a_placement_and_a_policy_from_files(
    plans: dict[str, Path], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    found = results(*LAYER, "--placement", plans["placed"], "--html", page)
    assert found["placement_file"] == str(plans["placed"])
    assert found["devices"]["count"] == 3
    assert found["devices"]["placement"] == "experts placed as given"
    assert found["devices"]["expert_to_device"] == [2, 0, 0, 0, 0, 0, 0, 2]
    before = found["policies"][0]
    assert before["loads"][1] == 0  # it hosts nothing
    assert before["peak_to_mean"] == pytest.approx(max(before["loads"]) * 3 / (3 * 64 * 2))
    assert before["peak_to_mean"] == pytest.approx(2.0, rel=0.1)
    assert "experts placed as given" in page.read_text(encoding="utf-8")
    capped = results(*LAYER, "--plan", plans["capped"], "--devices", "4")
    assert [row["policy"] for row in capped["policies"]] == ["none", "plan"]
    assert capped["plan_policies"] == ["capacity_factor=1.0,min_expert_load=0.0"]
    assert capped["policies"][1]["dropped_share"] > 0
    second = results(*LAYER, "--placement", plans["two"], "--layer", "1", "-p", "capacity_factor=1")
    assert second["devices"]["count"] == 2


def test_a_model_with_a_placement_and_a_policy_a_layer(plans: dict[str, Path]) -> None:
    found = results(*MODEL, "--placement", plans["four"], "-p", "capacity_factor=1")
    assert found["devices"]["count"] == 8
    assert found["placement_file"] == str(plans["four"])
    rows = results(*MODEL, "--plan", plans["each"], "--devices", "4")["policies"]
    assert [row["policy"] for row in rows] == ["none", "plan"]
    assert rows[1]["rows"] < rows[0]["rows"]


BAD: dict[str, tuple[list[str], str]] = {
    "devices": ([*LAYER, "--devices", "100"], "num_devices must be from 1 to 8"),
    "skew": ([*LAYER, "--peak-to-mean", "nan"], "at least 1"),
    "too much skew": ([*LAYER, "--peak-to-mean", "inf"], "is not possible"),
    "nothing to compare": ([*LAYER, "-p", "mode=observe"], "caps nothing"),
    "bad policy": ([*LAYER, "-p", "speed=9"], "got speed"),
    "batch": ([*LAYER, "--batch", "x"], "own or shared"),
    "no trace": ([*LAYER, "--trace", "{tmp}/none.npz"], "there is no trace"),
    "a folder": ([*LAYER, "--trace", "{tmp}"], "holds no known trace"),
    "no plan": ([*LAYER, "--placement", "{tmp}/none.toml"], "can't be read"),
    "no placement": ([*LAYER, "--placement", "{capped}"], "must hold placement or placements"),
    "placed twice": ([*LAYER, "--placement", "{placed}", "--devices", "3"], "give one of them"),
    "no such layer": ([*LAYER, "--placement", "{two}", "--layer", "5"], "the plan has 2 layers"),
    "another k": ([*LAYER, "--plan", "{other}"], "the plan is for k=7"),
    "requests": ([*LAYER, "-p", "capacity_factor=1,pool=request"], "needs token_request"),
    "out": ([*LAYER, "--out", "{tmp}"], "it is a folder"),
    "plot": ([*LAYER, "--html", "{tmp}/no/x.html"], "there is no folder"),
    "layer of a model": (
        ["bench", "layer", "--model", "demo", "--layer", "77"],
        "one of the 4 MoE layers",
    ),
    "two routings": ([*LAYER, "--model", "demo", "--trace", "x.npz"], "give one of them"),
    "text alone": ([*LAYER, "--text", "x"], "needs --model"),
    "shape": (["bench", "layer", "--shape", "64,32,8,9,2"], "k and devices at most experts"),
    "random": (["bench", "model", "--model", "random:1,2,3"], "hidden a multiple of 64"),
    "text": (["bench", "model", "--text", "{tmp}/none.txt"], "can't be read"),
    "long": ([*MODEL, "--prompt-tokens", "5000", "--sequences", "1"], "at most 512 tokens"),
    "many": ([*MODEL, "--new-tokens", "9999"], "at most 512 tokens"),
    "devices of a model": ([*MODEL, "--devices", "100"], "num_devices must be from 1 to 32"),
    "plan of a model": ([*MODEL, "--plan", "{two}"], "the model has 4"),
    "policies of a model": ([*MODEL, "--plan", "{pair}"], "got 2 entries"),
}


RARE = ("layer of a model", "text", "long", "many", "devices of a model", "policies of a model")
"""Cases that load the demo model; one like them is in the first tier."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.full if case in RARE else ()) for case in BAD]
)
def test_bad_input_is_one_sentence(case: str, plans: dict[str, Path], tmp_path: Path) -> None:
    pair = tmp_path / "pair.toml"
    pair.write_text("version = 1\n" + "[[policies]]\ncapacity_factor = 1.0\n" * 2)
    options, expected = BAD[case]
    done = run(*(option.format(tmp=tmp_path, pair=pair, **plans) for option in options))
    assert done.exit_code == 2, done.output
    assert expected in " ".join(done.stderr.split())
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_requests_of_a_model_are_its_sequences() -> None:
    options = ["bench", "layer", "--model", "demo", "--tokens", "128", "--rounds", "1"]
    options += ["--devices", "8"]
    caps = ["-p", "capacity_factor=1,pool=request", "-p", "capacity_factor=1,pool=batch"]
    rows = results(*options, *caps)["policies"]
    assert rows[1]["dropped_share"] > rows[2]["dropped_share"] > 0
    assert np.isclose(rows[2]["peak_to_mean"], 1, atol=0.01)
