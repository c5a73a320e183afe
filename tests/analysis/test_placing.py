"""Placing from traces: what is fitted on what, and figures recomputed with plain numpy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from paceline import ExpertPlacement, traces
from paceline.analysis import placement_search
from paceline.analysis.expert_map import ExpertMap
from paceline.analysis.placing import PlacementSpec, place
from paceline.analysis.traffic import Part, batch_loads, batches_of, pieces_of
from paceline.cli.app import app
from paceline.plan import Plan
from paceline.traces import Trace, sample

RUN = CliRunner()
SAMPLE = Path(traces.__file__).parent / "sample" / "esft_v2lite_law.npz"


def ids() -> np.ndarray:
    """[layers, tokens, k] of the sample, read without the package."""
    return np.load(SAMPLE)["topk_ids"]


def loads(tokens: int) -> np.ndarray:
    """[layers, batches, 64] of every so many tokens in turn, the last with what is left."""
    every = ids()
    starts = range(0, every.shape[1], tokens)
    return np.array(
        [
            [np.bincount(layer[s : s + tokens].ravel(), minlength=64) for s in starts]
            for layer in every
        ]
    )


def busiest(table: np.ndarray, layer: ExpertMap) -> np.ndarray:
    """[batches] rows of the busiest device, one device after the other."""
    size = len(layer.slots) // layer.num_devices
    columns = [table[:, list(layer.slots[d : d + size])].sum(1) for d in range(0, 64, size)]
    return np.max(columns, axis=0)


def test_the_second_half_is_judged_with_the_first_halfs_placement() -> None:
    maps, said = place(sample("esft_v2lite_law"), PlacementSpec(devices=8), batch_tokens=512)
    table, pieces = loads(512), loads(64)
    half = table.shape[1] // 2
    shape = placement_search.Shape(64, 8)
    fitted = [placement_search.search_map(layer[: half * 8], shape) for layer in pieces]
    mean = table[:, half:].sum((1, 2)) / 8
    want = {
        "search": [busiest(t[half:], m).sum() for t, m in zip(table, fitted, strict=True)],
        "in_order": [busiest(t[half:], ExpertMap.contiguous(64, 8)).sum() for t in table],
    }
    for way, rows in want.items():
        figures = said.second_half.ways[way]
        assert figures.layers == pytest.approx(list(np.array(rows) / mean))
        assert figures.overall == pytest.approx(sum(rows) / mean.sum())
        assert figures.device_peak_to_mean == pytest.approx(np.mean(np.array(rows) / mean))
    assert said.second_half.batches == table.shape[1] - half
    # what is handed out is fitted on all
    assert maps == [placement_search.search_map(layer, shape) for layer in pieces]


def test_another_trace_is_judged_with_all_of_this_one() -> None:
    other = sample("esft_v2lite_intent")
    maps, said = place(sample("esft_v2lite_law"), PlacementSpec(8), judge=other)
    want = []
    for tables, _ in batch_loads(batches_of(other, None), Part(0, 99)):
        want += [(busiest(t, m).sum(), t.sum() / 8) for t, m in zip(tables, maps, strict=True)]
    rows, means = np.sum(want, axis=0)
    assert said.other_trace.ways["search"].overall == pytest.approx(rows / means)
    assert any("esft_v2lite_intent" in line for line in said.verdict)
    with pytest.raises(ValueError, match="of one model"):
        place(sample("esft_v2lite_law"), PlacementSpec(8), judge=sample("gpt_oss_20b_decode"))


def test_pieces_are_parts_of_batches() -> None:
    trace = batches_of(sample("esft_v2lite_law"), 100)  # 64 and 36 tokens
    every = ids()
    found = pieces_of(trace, Part(3, 5))
    for layer, table in enumerate(found):
        want = [
            np.bincount(every[layer, a:b].ravel(), minlength=64)
            for a, b in ((300, 364), (364, 400), (400, 464), (464, 500))
        ]
        assert (table == np.array(want)).all()


def test_many_pieces_are_merged_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.analysis.traffic.MAX_PIECES", 5)
    trace = batches_of(sample("esft_v2lite_law"), 64)
    found = pieces_of(trace, Part(0, 64))
    assert 5 <= len(found[0]) < 10
    assert (found[0].sum(0) == loads(64)[0].sum(0)).all()
    whole = loads(64)[0]
    merged = whole.reshape(-1, 64 // len(found[0]), 64).sum(1)
    assert (found[0] == merged).all()


def test_steps_of_decode_are_their_own_pieces() -> None:
    found = pieces_of(sample("gpt_oss_20b_decode"), Part(0, 10))
    assert found[0].shape == (10, 32)


def test_one_batch_is_said_to_be_one() -> None:
    trace = sample("esft_v2lite_law").regrouped(4096)
    forwards = Trace(trace.header.model_copy(update={"batches": "forward"}), trace.chunks)
    _, said = place(forwards, PlacementSpec(8))
    assert said.second_half is None
    assert "one batch can't tell" in said.verdict[0]


def test_the_command_writes_a_plan_and_maps(tmp_path: Path) -> None:
    config = {"n_group": 1, "hidden_size": 2048, "moe_intermediate_size": 1408,
              "num_hidden_layers": 28, "num_experts": 64, "num_experts_per_tok": 6}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["plan", "sample:esft_v2lite_law", "--place-only", "--replicas", "8", "--json"]
    arguments += ["--model-config", str(tmp_path), "--maps", str(tmp_path / "maps")]
    ran = RUN.invoke(app, [*arguments, "--out", str(tmp_path / "plan.toml")])
    assert ran.exit_code == 0, ran.output
    said = json.loads(ran.stdout)
    layers = len(said["layers"])
    # 8 replicas on 8 devices are one expert per device and layer, in bfloat16
    assert said["replica_gb_a_device"] == pytest.approx(layers * 3 * 2048 * 1408 * 2 / 1e9)
    located = json.loads((tmp_path / "maps" / "sglang_expert_location.json").read_text())
    rows = located["physical_to_logical_map"]
    assert len(rows) == 28
    balancer = yaml.safe_load((tmp_path / "maps" / "tensorrt_llm_load_balancer.yaml").read_text())
    numbers = [int(name.removeprefix("layer ")) for name in said["layers"]]
    for number, slots in zip(numbers, said["slots"], strict=True):
        assert rows[number] == slots == balancer["initial_global_assignments"][number]
    plan = Plan.load(tmp_path / "plan.toml")
    assert (plan.placements, plan.layers) == ((8,), layers)
    assert [list(row) for row in plan.slots] == said["slots"]
    alone = [a for a in arguments if a not in ("--replicas", "8")]
    ran = RUN.invoke(app, [*alone, "--force", "--out", str(tmp_path / "plan.toml")])
    assert ran.exit_code == 0, ran.output
    plan = Plan.load(tmp_path / "plan.toml")
    said = json.loads(ran.stdout)
    for index, slots in enumerate(said["slots"]):
        placement = plan.placement_of(index)
        assert isinstance(placement, ExpertPlacement)
        assert [placement.expert_to_device[e] for e in slots] == [s // 8 for s in range(64)]


def test_groups_come_from_the_config(tmp_path: Path) -> None:
    config = {"n_group": 4, "num_experts": 64, "num_experts_per_tok": 6, "num_hidden_layers": 28}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["plan", "sample:esft_v2lite_law", "--place-only", "--json"]
    arguments += ["--model-config", str(tmp_path)]
    said = json.loads(RUN.invoke(app, arguments).stdout)
    assert said["groups"] == 4
    for slots in said["slots"]:
        blocks = np.array(slots).reshape(4, 16) // 16
        assert (blocks == blocks[:, :1]).all()
    text = RUN.invoke(app, arguments[:3])
    assert "EPLB" in text.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sample:esft_v2lite_law", "--devices", "65"], "num_devices must be from 1 to 64"),
        (["sample:esft_v2lite_law", "--devices", "0"], "--devices must be at least 1"),
        (["sample:none"], "sample must be one of"),
        (["./nowhere"], "nowhere"),
        (["sample:esft_v2lite_law", "--out", "no/where/plan.toml"], "there is no folder"),
        (["sample:esft_v2lite_law", "--precision", "int3"], "--precision"),
        (["sample:esft_v2lite_law", "--batch-tokens", "0"], "tokens must be at least 1"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], said: str) -> None:
    ran = RUN.invoke(app, ["plan", "--place-only", *arguments])
    assert ran.exit_code == 2
    assert said in ran.stderr
    assert "Traceback" not in ran.output
