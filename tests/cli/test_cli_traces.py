"""The verbs on traces: record, import, loads; and one sentence for whatever can't be."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from commands import run
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import CapacityPolicy, ExpertPlacement
from paceline.cli.trace_loads import cases as trace_loads_cases
from paceline.plan import Plan
from paceline.traces import ImportOptions, open_trace, sample
from paceline.traces.loads import trace_loads
from paceline.traces.simulate import simulate

SAMPLES = Path(__file__).parents[1] / "traces" / "samples"
CAP = ("--policy", "capacity_factor=1,min_expert_load=0")
COMPLETION = SAMPLES / "vllm/chat_completion.v0.32.json"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Traces of the demo model: counts of a text, choices of answers to prompts."""
    folder = tmp_path_factory.mktemp("recorded")
    prompts = folder / "prompts"
    prompts.write_text('Once upon a time\n\n{"prompt": "def f(x):"}\n{not json\n', encoding="utf-8")
    counts, choices = folder / "counts", folder / "choices"
    result = run("record", "demo", "--out", counts, "--tokens", "1024", "--batch-size", "2")
    assert result.exit_code == 0, result.stderr
    assert "2 forwards of 4 layers" in result.stdout
    result = run(
        "record", "demo", "--out", choices, "--prompts", prompts, "--content", "choices",
        "--max-new-tokens", "5", "--batch-size", "2",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "10 forwards of 4 layers" in result.stdout  # two batches of a prompt and four steps
    return {"counts": counts, "choices": choices}


def test_recorded_traces_are_private_and_tell_what_ran(recorded: dict[str, Path]) -> None:
    for folder in recorded.values():
        for path in (folder, *folder.iterdir()):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    counts, choices = (open_trace(recorded[name]) for name in ("counts", "choices"))
    assert counts.header.model == choices.header.model == "demo"
    found = trace_loads(choices, 8).to_dict()
    assert next((g["phase"], g["tokens"]) for g in found["groups"]) == ("decode", 12)
    requests = {int(r) for chunk in choices.chunks for r in chunk.request}
    assert requests == {0, 1, 2}


def test_loads_of_a_trace_are_those_of_the_library(recorded: dict[str, Path]) -> None:
    for name, arguments in (
        (str(recorded["counts"]), []),
        (str(recorded["choices"]), ["--devices", "4", "--batch-tokens", "8"]),
        ("sample:esft_v2lite_law", ["--batch-tokens", "1024"]),
    ):
        result = run("loads", name, "--json", *arguments)
        assert result.exit_code == 0, result.stderr
        found = json.loads(result.stdout)
        devices = 4 if "4" in arguments else 8
        tokens = int(arguments[-1]) if arguments else None
        wanted = trace_loads(open_trace(name), devices, tokens).to_dict()
        assert {key: found[key] for key in wanted} == json.loads(json.dumps(wanted))
        shown = " ".join(run("loads", name, *arguments).stdout.split())
        for line in found["verdict"]:
            assert line in shown
        for layer in wanted["layers"]:
            assert layer["name"] in shown
            assert f"{layer['device_peak_to_mean']['mean']:.2f}" in shown


def test_loads_of_another_programs_file(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"n_routed_experts": 64, "num_experts_per_tok": 6}')
    for arguments in (["--experts", "64"], ["--model-config", config]):
        result = run("loads", COMPLETION, "--json", *arguments)
        assert result.exit_code == 0, result.stderr
        wanted = trace_loads(open_trace(COMPLETION, ImportOptions(experts=64)), 8).to_dict()
        assert json.loads(result.stdout)["layers"] == json.loads(json.dumps(wanted["layers"]))


def test_an_imported_trace_needs_no_telling(tmp_path: Path) -> None:
    result = run("import", COMPLETION, "--experts", "64", "--out", tmp_path / "trace")
    assert result.exit_code == 0, result.stderr
    assert "choices of 4 layers of 64 experts, 1 batch (request), 40 tokens" in result.stdout
    assert "Note: layer 0: no row names two experts" in result.stdout
    found = json.loads(run("loads", tmp_path / "trace", "--json").stdout)
    wanted = trace_loads(open_trace(COMPLETION, ImportOptions(experts=64)), 8).to_dict()
    assert found["layers"] == json.loads(json.dumps(wanted["layers"]))


def test_loads_of_a_trace_on_a_plans_placement(tmp_path: Path) -> None:
    dealt = ExpertPlacement.explicit([expert % 4 for expert in range(32)])
    Plan(placements=(dealt,)).save(tmp_path / "plan.toml")
    result = run(
        "loads", "sample:gpt_oss_20b_decode", "--placement", tmp_path / "plan.toml", "--json"
    )
    assert result.exit_code == 0, result.stderr
    wanted = trace_loads(sample("gpt_oss_20b_decode"), [dealt]).to_dict()
    assert json.loads(result.stdout)["overall"] == wanted["overall"]


def test_rows_that_repeat_are_said(tmp_path: Path) -> None:
    rows = [{"type": "meta", "model_id": "m", "layers_logged": [0], "top_k": 2, "num_experts": 8}]
    for token in range(100):
        ids = [0, 1] if token % 2 else [2 + token // 2 % 6, 2 + (1 + token // 2) % 6]
        rows.append(
            {"type": "route", "req_id": "r", "token_idx": token, "layer": 0, "topk_ids": ids}
        )
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = " ".join(run("loads", path, "--devices", "4").stdout.split())
    assert "50% of the tokens are one and the same row in every layer" in shown
    assert "without them the busiest device has" in shown


def test_simulate_is_that_of_the_library(tmp_path: Path, recorded: dict[str, Path]) -> None:
    policy = "capacity_factor=1.0,min_expert_load=0"
    plan = Plan((CapacityPolicy(capacity_factor=1.5, min_expert_load=0),), (4,))
    plan.save(tmp_path / "plan.toml")
    arguments = ["--policy", policy, "--plan", tmp_path / "plan.toml", "--devices", "4"]
    result = run("loads", recorded["choices"], "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    plans = {
        "no cap": Plan(placements=(4,)),
        policy: Plan((CapacityPolicy.parse(policy),), (4,)),
        str(tmp_path / "plan.toml"): plan,
    }
    wanted = json.loads(json.dumps(simulate(open_trace(recorded["choices"]), plans).to_dict()))
    assert found["plans"] == wanted["plans"]
    assert found["plans"][policy]["overall"]["dropped"] > 0
    shown = "".join(run("loads", recorded["choices"], *arguments).stdout.split())
    assert "nocap" in shown
    for of_plan in wanted["plans"].values():
        assert f"{of_plan['overall']['gain']:.2f}×" in shown


def test_policies_are_compared_on_every_placement(tmp_path: Path) -> None:
    dealt = ExpertPlacement.explicit([expert % 4 for expert in range(32)])
    for name, placement in (("order", 4), ("dealt", dealt)):
        Plan(placements=(placement,)).save(tmp_path / name)
    order, other = str(tmp_path / "order"), str(tmp_path / "dealt")
    trace = "sample:gpt_oss_20b_decode"
    result = run("loads", trace, *CAP, "--placement", order, "--placement", other, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["reference"] == f"no cap, {order}"
    assert list(found["plans"]) == [
        f"{cap}, {where}" for where in (order, other) for cap in ("no cap", CAP[1])
    ]
    capped = Plan((CapacityPolicy.parse(CAP[1]),), (dealt,))
    plans = {"no cap": Plan(placements=(4,)), "capped": capped}
    wanted = simulate(sample("gpt_oss_20b_decode"), plans).plans["capped"]
    assert found["plans"][f"{CAP[1]}, {other}"]["overall"]["gain"] == wanted.overall.gain


@settings(max_examples=30)
@given(
    devices=st.integers(1, 16),
    order=st.permutations(range(16)),
    factor=st.none() | st.sampled_from([1.0, 1.25, 2.0]),
    seed=st.integers(0, 99),
)
def test_a_gain_is_over_no_cap_on_the_plans_own_devices(
    devices: int, order: list[int], factor: float | None, seed: int
) -> None:
    """Counted by hand: a plan file for any number of devices, no other option."""
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.ones(16) / 2) + 1e-3
    ids = np.stack([rng.choice(16, 2, replace=False, p=share / share.sum()) for _ in range(64)])
    in_order = ExpertPlacement.contiguous(16, devices)
    own = ExpertPlacement.explicit([in_order.expert_to_device[e] for e in order], devices)
    cap = CapacityPolicy(mode="observe")
    if factor is not None and devices > 1:
        cap = CapacityPolicy(capacity_factor=factor, min_expert_load=0, keep="first")

    def rows(where: ExpertPlacement) -> list[int]:
        hosts = [where.expert_to_device[expert] for expert in ids.ravel().tolist()]
        return [hosts.count(device) for device in range(devices)]

    reference, after = max(rows(in_order)), rows(own)
    if cap.mode == "enforce":
        assert factor is not None
        most = [math.ceil(factor * ids.size * size / 16) for size in own.sizes]
        after = [min(both) for both in zip(after, most, strict=True)]
    with TemporaryDirectory() as folder:
        trace, path = Path(folder, "trace.npz"), Path(folder, "plan.toml")
        np.savez(trace, topk_ids=ids[None])
        Plan((cap,), (own,)).save(path)
        found = simulate(
            open_trace(trace, ImportOptions(experts=16)), trace_loads_cases([], [path], [], None)
        )
    plan = found.plans[str(path)]
    assert plan.devices == found.plans["no cap"].devices == devices
    assert found.plans["no cap"].overall.busiest_rows_after == reference
    assert plan.overall.gain == reference / max(after)


def test_plans_for_other_devices_are_not_compared(tmp_path: Path) -> None:
    plans = {}
    for devices in (4, 8):
        plans[devices] = tmp_path / f"{devices}.toml"
        Plan((CapacityPolicy.parse(CAP[1]),), (devices,)).save(plans[devices])
    trace = "sample:gpt_oss_20b_decode"
    for options in (
        ["--plan", plans[4], "--devices", "8"],
        ["--plan", plans[4], "--plan", plans[8]],
        ["--plan", plans[4], "--placement", plans[8]],
        ["--placement", plans[4], "--placement", plans[8]],
    ):
        result = run("loads", trace, *CAP, *options)
        assert result.exit_code == 2, result.stdout
        said = " ".join(result.stderr.split())
        assert "plans must be for the same number of devices" in said
        assert "4 (" in said
        assert "8 (" in said
    shown = run("loads", trace, "--plan", plans[4]).stdout
    assert "on 4 devices" in " ".join(shown.split())


def test_simulate_without_repeats(tmp_path: Path) -> None:
    trace = "sample:esft_v2lite_intent"
    results = {}
    for extra in ([], ["--without", "repeats"], ["--without", "commonest"]):
        result = run("loads", trace, *CAP, "--batch-tokens", "1024", "--json", *extra)
        assert result.exit_code == 0, result.stderr
        overall = json.loads(result.stdout)["plans"]["no cap"]["overall"]
        results[" ".join(extra)] = overall["assignments"]
    assert results[""] == 4096 * 6 * 6
    assert results["--without repeats"] < results["--without commonest"] < results[""]


BAD = {
    "no such trace": (["loads", "{tmp}/none.npz", *CAP], "there is no trace"),
    "a typo beside facts of a trace": (["loads", "{tmp}/x.npz", "--experts", "64"], "no trace"),
    "a typo like a hub name": (["loads", "traces/mondy", "--experts", "64"], "there is no trace"),
    "a typo beside a text": (
        ["loads", "mondy", "--text", "{tmp}/e", "--batch-tokens", "8"], "there is no trace mondy",
    ),
    "a typo in a file's name": (["loads", "mondy.json", "--text", "{tmp}/e"], "there is no trace"),
    "unknown sample": (["loads", "sample:none"], "sample must be one of esft"),
    "counts simulated": (["loads", "{counts}", *CAP], "holds counts"),
    "counts cut": (["loads", "{counts}", "--batch-tokens", "8"], "can't be cut"),
    "no experts": (["loads", "{completion}"], "--experts"),
    "other k": (["loads", "{completion}", "--experts", "64", "--k", "4"], "k=4 was given"),
    "negative experts": (["loads", "{completion}", "--experts", "-1"], "experts must be from 1 to"),
    "no config": (["loads", "{completion}", "--model-config", "{tmp}/x"], "can't be read"),
    "shadow of a trace": (["loads", "sample:esft_v2lite_law", "--shadow"], "is for a model"),
    "two plans on a page": (
        ["loads", "sample:esft_v2lite_law", *CAP, *CAP, "--html", "{tmp}/x"], "must be given once",
    ),
    "placed twice": (
        ["loads", "sample:esft_v2lite_law", *CAP, "--placement", "x", "--devices", "4"],
        "give one of them",
    ),
    "trace option on a model": (["loads", "demo", "--batch-tokens", "8"], "is for a trace"),
    "too many devices": (["loads", "sample:esft_v2lite_law", "--devices", "65"], "65"),
    "no devices": (["loads", "sample:esft_v2lite_law", "--devices", "0"], "at least 1"),
    "no batch": (["loads", "sample:esft_v2lite_law", "--batch-tokens", "0"], "at least 1"),
    "bad policy": (["loads", "sample:esft_v2lite_law", "--policy", "speed=9"], "speed"),
    "no scores": (
        ["loads", "sample:esft_v2lite_law", "--policy", "gamma=1,expand=all,min_expert_load=0"],
        "scores of all experts",
    ),
    "bad rows": (["loads", "sample:esft_v2lite_law", "--without", "all"], "commonest"),
    "no plan": (["loads", "sample:esft_v2lite_law", "--plan", "{tmp}/x.toml"], "x.toml"),
    "folder in use": (["record", "demo", "--out", "{counts}"], "is not empty"),
    "folder nowhere": (["record", "demo", "--out", "{tmp}/a/b"], "can't be written"),
    "text and prompts": (
        ["record", "demo", "--out", "{tmp}/t", "--text", "prose", "--prompts", "x"],
        "give one of them",
    ),
    "no prompts": (["record", "demo", "--out", "{tmp}/t", "--prompts", "{tmp}/x"], "can't be read"),
    "empty prompts": (["record", "demo", "--out", "{tmp}/t", "--prompts", "{tmp}/e"], "is empty"),
    "prompts without": (["record", "demo", "--out", "{tmp}/t", "--prompts", "{tmp}/j"], "line 1"),
    "no new tokens": (
        ["record", "demo", "--out", "{tmp}/t", "--prompts", "x", "--max-new-tokens", "0"],
        "at least 1",
    ),
    "import into use": (["import", "{counts}", "--out", "{counts}"], "is not empty"),
    "import of nothing": (["import", "{tmp}/none", "--out", "{tmp}/t"], "there is no trace"),
    "a pickle": (["loads", "{tmp}/p"], "is a pickle"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(
    case: str, recorded: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "e").write_text("\n")
    (tmp_path / "j").write_text('{"question": "?"}\n')
    (tmp_path / "p").write_bytes(b"\x80\x04N.")
    arguments, expected = BAD[case]
    names = {"tmp": tmp_path, "completion": COMPLETION, **recorded}
    result = run(*(argument.format(**names) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert expected in " ".join(result.stderr.split())
    assert len(result.stderr.strip().splitlines()) == 1
