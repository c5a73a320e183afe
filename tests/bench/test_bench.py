"""The benchmark's workloads, bounds and reports; no timing is judged."""

from __future__ import annotations

import json
import math
from itertools import permutations
from pathlib import Path

import pytest
import torch

from paceline import CapacityPolicy, ExpertPlacement, attach
from paceline.bench.comparison import parse_policies
from paceline.bench.layer_timing import LayerTimings, compare_layers, emulate_layer
from paceline.bench.model_timing import ModelTimings, compare_models, random_model_named
from paceline.bench.timing import ratios, shuffled, spread
from paceline.bench.workload import (
    SHAPES,
    Shape,
    build_experts,
    skewed_workload,
)

TINY = SHAPES["tiny"]


def test_spread_and_ratios() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"min": 1.0, "median": 2.0, "max": 3.0}
    assert ratios([2.0, 4.0], [1.0, 1.0]) == {"min": 2.0, "median": 3.0, "max": 4.0}
    with pytest.raises(ValueError, match="must be at least one number"):
        spread([])
    with pytest.raises(ValueError, match="must have 1 rounds"):
        ratios([1.0], [1.0, 2.0])
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="must be positive"):
            ratios([1.0], [bad])
    orders = {tuple(shuffled("abc", turn)) for turn in range(40)}
    assert orders == set(permutations("abc"))
    assert shuffled("abc", 3) == shuffled("abc", 3)


@pytest.mark.parametrize("wanted", [1.0, 1.4, 2.0])
def test_synthetic_routing_is_as_skewed_as_asked(wanted: float) -> None:
    shape = Shape("s", 32, 16, 16, 4, 4)
    placement = ExpertPlacement.contiguous(16, 4)
    load = skewed_workload(shape, 4000, wanted, placement, seed=7)
    ids = load.gate(load.hidden).topk_ids
    device = torch.tensor(placement.expert_to_device)[ids]
    share = float((device == 0).float().mean()) * 4
    assert share == pytest.approx(wanted, rel=0.06)


def test_impossible_skew_is_refused() -> None:
    with pytest.raises(ValueError, match="is not possible with 2 of 8 experts per token"):
        skewed_workload(TINY, 8, 9.0, ExpertPlacement.contiguous(8, 4))
    with pytest.raises(ValueError, match="must be at least 1"):
        skewed_workload(TINY, 8, 0.5, ExpertPlacement.contiguous(8, 4))


def test_policies_get_what_a_benchmark_means() -> None:
    own = parse_policies(["capacity_factor=1.0", "none"], shares_batch=False)
    assert list(own) == ["none", "capacity_factor=1.0"]
    policy = own["capacity_factor=1.0"]
    assert policy is not None
    assert (policy.pool, policy.min_expert_load) == ("source", 0)
    named = parse_policies(["capacity_factor=1.0,pool=batch,min_expert_load=4"], False)
    (policy,) = [p for p in named.values() if p is not None]
    assert (policy.pool, policy.min_expert_load) == ("batch", 4)
    with pytest.raises(ValueError, match="caps nothing"):
        parse_policies(["mode=observe"], False)
    with pytest.raises(ValueError, match="they are on all"):
        parse_policies(["capacity_factor=1.0,expand=own_device"], True)
    with pytest.raises(ValueError, match="compensate must be off"):
        parse_policies(["capacity_factor=1.0,compensate=true"], False)


def test_bound_counts_what_does_not_depend_on_load() -> None:
    before = LayerTimings(total=[10.0], rows=[80, 20])
    after = LayerTimings(total=[8.0], rows=[50, 20], bytes_sent=7)
    for result, seconds in ((before, 6.0), (after, 4.0)):
        for stage in result.stages:
            result.stages[stage] = [seconds if stage == "experts" else 1.0]
    first, second = compare_layers({"none": before, "half": after})
    assert first.bound == 1
    assert second.bound == pytest.approx(10 / (4 + 6 * 50 / 80))
    assert second.load_bound == pytest.approx(1.6)
    assert second.speedup["median"] == pytest.approx(1.25)
    assert second.peak_to_mean == pytest.approx(1.0)
    assert second.busiest_share == pytest.approx(50 / 70)


def test_amdahl_bound_of_a_model() -> None:
    rows = compare_models(
        {
            "none": ModelTimings([2.0], [1.0], [1.0], 80, 100),
            "cap": ModelTimings([1.6], [1.0], [0.6], 40, 60),
        },
        tokens=64,
        new_tokens=3,
        sequences=4,
    )
    assert rows[1].bound == pytest.approx(1 / (0.5 + 0.5 * 0.5))
    assert rows[0].decode_tokens_a_second == {"min": 8, "median": 8, "max": 8}
    assert rows[1].prefill_tokens_a_second["median"] == 40


def test_emulated_loads_are_those_of_the_policy() -> None:
    placement = ExpertPlacement.contiguous(TINY.experts, 4)
    loads = [skewed_workload(TINY, 64, 2.0, placement, seed=s) for s in range(4)]
    policies: dict[str, CapacityPolicy | None] = parse_policies(
        ["capacity_factor=1.0", "capacity_factor=1.5,expand=own_device"], False
    )
    experts = build_experts(TINY, TINY.experts)
    results = emulate_layer(loads, experts, placement, policies, rounds=2)
    whole = 4 * 64 * TINY.k
    assert sum(results["none"].rows) == whole
    capped = results["capacity_factor=1.0"]
    assert max(capped.rows) == 4 * (64 * TINY.k // 4)
    assert capped.dropped == pytest.approx(1 - sum(capped.rows) / whole)
    assert 0 < capped.gate_mass < 1
    expanded = results["capacity_factor=1.5,expand=own_device"]
    assert max(expanded.rows) <= 4 * -(-64 * TINY.k * 3 // 8)
    for result in results.values():
        assert len(result.total) == 2
        for turn in range(2):
            spent = sum(times[turn] for times in result.stages.values())
            assert spent == pytest.approx(result.total[turn])


def test_verbs_write_results_and_a_plot(tmp_path: Path) -> None:
    runner = pytest.importorskip("typer.testing").CliRunner()
    from paceline.cli.app import app

    out, plot = tmp_path / "layer.json", tmp_path / "layer.html"
    options = ["--shape", "tiny", "--tokens", "32", "--rounds", "1", "--out", str(out)]
    done = runner.invoke(app, ["bench", "layer", *options, "--html", str(plot), "--json"])
    assert done.exit_code == 0, done.output
    results = json.loads(out.read_text())
    assert json.loads(done.stdout) == results
    assert results["devices"]["kind"] == "emulated devices"
    assert results["policies"][0]["policy"] == "none"
    assert "Speed-up over no cap" in plot.read_text()
    bad = runner.invoke(app, ["bench", "layer", "--shape", "nothing"])
    assert bad.exit_code == 2
    assert "shape must be one of" in bad.output
    bad = runner.invoke(app, ["bench", "layer", *options[:-1], str(tmp_path / "no" / "x.json")])
    assert bad.exit_code == 2
    assert "there is no folder" in bad.output


def test_model_verb_on_the_demo_model(tmp_path: Path) -> None:
    runner = pytest.importorskip("typer.testing").CliRunner()
    from paceline.cli.app import app

    out, plot = tmp_path / "model.json", tmp_path / "model.html"
    sizes = ["--sequences", "8", "--prompt-tokens", "16", "--new-tokens", "2", "--rounds", "1"]
    done = runner.invoke(app, ["bench", "model", *sizes, "--out", str(out), "--html", str(plot)])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["policies"]
    assert rows[0]["rows"] == 4 * 8 * 16 * 4  # layers, sequences, tokens, k
    assert rows[2]["busiest_rows"] < rows[0]["busiest_rows"]


def test_a_random_model_is_as_large_and_as_skewed_as_its_name_says() -> None:
    model = random_model_named("random:64,32,8,2,3")
    config = model.config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (64, 32, 3)
    assert (config.num_experts, config.num_experts_per_tok) == (8, 2)
    with attach(model, placement=2) as pace, torch.no_grad():
        model(torch.randint(1, config.vocab_size, (4, 128)))
        for layer in pace.stats().layers:
            assert layer.device_peak_to_mean_before == pytest.approx(1.6, abs=0.15)


@pytest.mark.parametrize("name", ["random:", "random:64,32,8,2", "random:60,32,8,2,1", "rand"])
def test_a_random_model_that_cant_be_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="hidden a multiple of 64"):
        random_model_named(name)
