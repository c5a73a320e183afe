"""The command: what it prints, its exit codes, and one sentence for every bad input."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from commands import COMMANDS, run

import paceline
from paceline.cli.app import FORMER
from paceline.cli.output import sentence
from paceline.shipped import MODEL_FOLDER

RUN = ["--tokens", "1024", "--batch-size", "8", "--sequence-length", "64"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random models with the demo's tokenizer: uneven (10 experts) and dense."""
    import torch
    from transformers import (
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
        OlmoeConfig,
        OlmoeForCausalLM,
    )

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    size = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
    }
    built = {
        "moe": OlmoeForCausalLM(OlmoeConfig(**size, num_experts=10, num_experts_per_tok=3)),
        "dense": LlamaForCausalLM(LlamaConfig(**size)),
    }
    folders = {}
    for name, model in built.items():
        folders[name] = tmp_path_factory.mktemp("models") / name
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "some.txt"
    path.write_text("A straggler is what all the others wait for. " * 400, encoding="utf-8")
    return path


def test_there_are_ten_verbs() -> None:
    verbs = "demo loads record import plan tune eval reorder serve bench"
    assert {name.split()[0] for name in COMMANDS} == set(verbs.split())
    shown = run("--help").stdout
    assert all(f"  {name.split()[0]} " in shown for name in COMMANDS)
    assert not any(f"  {name} " in shown for name in FORMER)


def test_an_option_has_the_same_help_in_every_verb() -> None:
    helps: dict[str, set[str]] = {}
    for command in COMMANDS.values():
        for option in (each for each in command.params if each.opts[0].startswith("-")):
            said = (option.help or "").replace("; may be repeated", "")
            helps.setdefault(option.opts[0], set()).add(said)
    own = {
        "--out",
        "--model",
        "--tokens",
        "--trace",
        "--devices",
    }  # mean another thing in some verbs
    assert {name for name, said in helps.items() if len(said) > 1} == own


@pytest.mark.parametrize("name", FORMER)
def test_a_former_verb_names_the_new_command(name: str) -> None:
    for arguments in ([], ["--help"], ["trace", "--devices", "8"]):
        result = run(name, *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == f"paceline: `paceline {name}` is now `{FORMER[name]}`.\n"


def test_version_and_module_entry() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == run("--version").stdout
    assert done.stdout.strip() == paceline.__version__


def test_help_loads_no_heavy_library() -> None:
    """The verbs themselves import torch, transformers and plotly only when they run."""
    code = (
        "import sys; from paceline.cli.app import app; "
        "print([m for m in ('torch', 'transformers', 'plotly') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_loads_of_the_demo_model() -> None:
    result = run("loads", "demo", *RUN)
    assert result.exit_code == 0, result.stderr
    assert "An average device waits" in " ".join(result.stdout.split())
    assert "dropped" not in result.stdout


def test_json_is_json_and_adds_up() -> None:
    result = run("loads", "demo", "--text", "german", "--text", "python", "--mix", "--json", *RUN)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["tokens_by_text"] == {"german": 512, "python": 512}
    assert found["policy"] is None
    for layer in found["layers"]:
        assert sum(layer["expert_loads_before"]) == 1024 * 4
        assert layer["device_loads_before"][layer["busiest_device"]] == max(
            layer["device_loads_before"]
        )
        assert layer["dropped"] == 0
    assert found["overall"]["straggler_loss_before"] == pytest.approx(
        1 - 1 / found["overall"]["device_peak_to_mean_before"]
    )


def test_policy_is_applied_and_shadow_only_counts() -> None:
    policy = ("--policy", "capacity_factor=1,min_expert_load=0", "--json", *RUN)
    enforced = json.loads(run("loads", "demo", *policy).stdout)
    shadow = json.loads(run("loads", "demo", "--shadow", *policy).stdout)
    assert enforced["overall"]["dropped_share"] > 0
    assert enforced["overall"]["device_peak_to_mean_after"] <= 1.01
    assert shadow["mode"] == "shadow"
    # In shadow nothing changes, so the first layer, which sees the same input, counts the same.
    assert shadow["layers"][0]["dropped"] == enforced["layers"][0]["dropped"]
    assert "would drop" in shadow["verdict"][1]


def test_several_policies_of_a_model_are_tried_on_its_own_choices() -> None:
    policies = ("capacity_factor=1,min_expert_load=0", "capacity_factor=1,unit=expert")
    result = run("loads", "demo", *RUN, "-p", policies[0], "-p", policies[1], "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["trace"], found["reference"]) == ("demo", "no cap")
    assert list(found["plans"]) == ["no cap", *policies]
    alone = json.loads(run("loads", "demo", *RUN, "-p", policies[0], "--json").stdout)
    # the first layer has the same input with and without a cap
    first = found["plans"][policies[0]]["layers"][0]
    assert first["dropped"] == alone["layers"][0]["dropped"] > 0
    assert found["plans"]["no cap"]["overall"]["gain"] == 1


def test_loads_of_a_saved_model_with_uneven_devices(
    models: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    html = tmp_path / "loads.html"
    arguments = ("--text", text, "--devices", "4", "--html", html, "--json", *RUN)
    result = run("loads", models["moe"], *arguments)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert [layer["experts_per_device"] for layer in found["layers"]] == [[3, 3, 2, 2]] * 2
    assert "looks untrained" in found["verdict"][0]
    assert "as fast" not in " ".join(found["verdict"])
    page = unescape(html.read_text(encoding="utf-8"))
    assert found["verdict"][0] in page
    assert stat.S_IMODE(html.stat().st_mode) == 0o600
    table = page.split('<table id="layers">')[1].split("</table>")[0]
    for layer in found["layers"]:
        assert f"<td>{layer['device_peak_to_mean_before']:.2f}\u00d7</td>" in table


def test_short_text_is_one_short_sequence(models: dict[str, Path], tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Only a few words here.", encoding="utf-8")
    result = run("loads", models["moe"], "--text", short, "--devices", "2", "--json", *RUN)
    assert result.exit_code == 0, result.stderr
    assert 2 <= json.loads(result.stdout)["tokens_by_text"][str(short)] < 64


BAD = {
    "missing text": (["{moe}", "--text", "{tmp}/none.txt"], "none.txt can't be read"),
    "no text": (["{moe}"], "--text FILE"),
    "empty text": (["{moe}", "--text", "{tmp}/empty.txt"], "is empty"),
    "binary text": (["{moe}", "--text", "{tmp}/binary.txt"], "not UTF-8"),
    "folder as text": (["{moe}", "--text", "{tmp}"], "can't be read"),
    "dense model": (["{dense}", "--text", "{text}"], "Mixture-of-Experts"),
    "too many devices": (["{moe}", "--text", "{text}", "--devices", "11"], "11"),
    "no devices": (["{moe}", "--text", "{text}", "--devices", "0"], "at least 1"),
    "bad policy": (["{moe}", "--text", "{text}", "--policy", "speed=9"], "speed"),
    "bad factor": (["{moe}", "--text", "{text}", "--policy", "capacity_factor=-1"], "-1"),
    "shadow alone": (["{moe}", "--text", "{text}", "--shadow"], "--policy"),
    "no such folder": (["{tmp}/none", "--text", "{text}"], "no model folder"),
    "folder without model": (["{tmp}", "--text", "{text}"], "config.json is missing"),
    "file as model": (["{text}", "--text", "{text}"], "is a file"),
    "broken config": (["{tmp}/broken", "--text", "{text}"], "can't load the model"),
    "hub without network": (["someone/no-such-moe", "--text", "{text}"], "can't be reached"),
    "sequence too long": (["{moe}", "--text", "{text}", "--sequence-length", "600"], "512"),
    "no tokens": (
        ["{moe}", "--text", "{text}", "--tokens", "0"],
        "tokens must be a whole number >= 2, got 0",
    ),
    "page nowhere": (["{moe}", "--text", "{text}", "--html", "{tmp}/none/x.html"], "no folder"),
    "no such file": (
        ["{moe}", "--text", "{text}", "--placement", "{tmp}/none.toml"],
        "can't be read",
    ),
    "no plan": (["{moe}", "--text", "{text}", "--plan", "{text}"], "is not TOML"),
    "no placement": (
        ["{moe}", "--text", "{text}", "--placement", "{capped}"],
        "must hold placement or placements",
    ),
    "placed twice": (
        ["{moe}", "--text", "{text}", "--placement", "{placed}", "--devices", "2"],
        "give one of them",
    ),
    "placed by both": (
        ["{moe}", "--text", "{text}", "--placement", "{placed}", "--plan", "{capped}"],
        "give one of them",
    ),
    "plan and devices": (
        ["{moe}", "--text", "{text}", "--plan", "{placed}", "--devices", "2"],
        "give one of them",
    ),
    "two policies": (
        ["{moe}", "--text", "{text}", "--plan", "{capped}", "--policy", "capacity_factor=1"],
        "give one of them",
    ),
    "another model": (
        ["{moe}", "--text", "{text}", "--plan", "{other}"],
        "the plan is for 32 experts per layer",
    ),
    "page is a folder": (["{moe}", "--text", "{text}", "--html", "{tmp}"], "it is a folder"),
    "unknown option": (["{moe}", "--nonsense"], "nonsense"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(
    case: str, models: dict[str, Path], plans: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x80")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{not json")
    arguments, expected = BAD[case]
    names = {"tmp": tmp_path, "text": text, **models, **plans}
    result = run("loads", *(argument.format(**names) for argument in arguments), "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert expected in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    if case != "unknown option":
        assert len(result.stderr.strip().splitlines()) == 1


PLANS = {
    "placed": "[placement]\nnum_devices = 3\nexpert_to_device = [2, 0, 0, 0, 0, 0, 0, 0, 0, 2]\n",
    "layers": "[[placements]]\nnum_devices = 5\n[[placements]]\nnum_devices = 2\n",
    "capped": "[policy]\ncapacity_factor = 1.0\nmin_expert_load = 0\n",
    "other": "[model]\nexperts = 32\n[placement]\nnum_devices = 2\n",
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plans")
    for name, content in PLANS.items():
        (folder / f"{name}.toml").write_text(f"version = 1\n{content}", encoding="utf-8")
    return {name: folder / f"{name}.toml" for name in PLANS}


def test_loads_with_placements_and_plans_from_files(
    models: dict[str, Path], plans: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    def found(*options: str | Path) -> Any:
        result = run("loads", models["moe"], "--text", text, *options, "--json", *RUN)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    html = tmp_path / "x.html"
    placed = found("--placement", plans["placed"], "--html", html)
    assert placed["placement_file"] == str(plans["placed"])
    assert [layer["experts_per_device"] for layer in placed["layers"]] == [[8, 0, 2]] * 2
    page = html.read_text(encoding="utf-8")
    assert "3 devices, experts placed as given" in page
    own = found("--placement", plans["layers"])
    assert [layer["devices"] for layer in own["layers"]] == [5, 2]
    capped = found("--plan", plans["capped"], "--devices", "2")
    assert capped["plan_file"] == str(plans["capped"])
    assert capped["policy"] == "capacity_factor=1.0,min_expert_load=0.0"
    assert [layer["devices"] for layer in capped["layers"]] == [2, 2]
    assert found("--plan", plans["capped"], "--shadow")["mode"] == "shadow"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root reads everything")
def test_unreadable_folder(models: dict[str, Path], text: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    result = run("loads", locked, "--text", text)
    assert result.exit_code == 2
    assert "can't be read" in result.stderr


def test_sentence_is_one_line() -> None:
    assert sentence(ValueError("two\n lines")) == "two lines"
    assert sentence(FileNotFoundError(2, "No such file", "x.txt")) == "x.txt: No such file"
    assert sentence(ValueError()) == "ValueError"


def test_tune_makes_a_plan_in_one_run(tmp_path: Path) -> None:
    texts = ("--text", "prose", "--text", "german", "--tokens", "1024")
    sizes = ("--batch-size", "2", "--sequence-length", "128", "--rank", "1")
    result = run("tune", "demo", *texts, *sizes, "--devices", "8", "--bound", "0.75", "--json",
                 "--out", tmp_path / "tuned")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["schema"] == "paceline-ladder/1"
    assert found["fit"]["schema"] == "paceline-calibrate/1"
    plan = paceline.Plan.load(found["plan"])
    factors = [policy.capacity_factor for policy in plan.policies]
    (rung,) = found["rungs"]
    assert rung["policies"] == [str(policy) for policy in plan.policies]
    assert found["chosen"] == rung["bound"] == 0.75
    assert sum(factors) / len(factors) <= 0.75
    assert all(policy.compensate for policy in plan.policies)
    assert len(plan.placements) == 4
    assert plan.calibration_folder().resolve() == (tmp_path / "tuned").resolve()
