"""Every example of every --help, README and docs: run as printed, in a folder with its files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commands import COMMANDS, examples, run, split

from paceline.analysis.hardware import PRESETS, save_hardware
from paceline.shipped import MODEL_FOLDER, TEXT_FOLDER

NOT_RUN = {
    "serve": "starts a server of vLLM: tests/engines/vllm",
    "torchrun": "needs several processes: tests/engines/transformers/expert_parallel",
    "allenai/": "needs a model of the hub",
    "Qwen/": "needs a model of the hub",
    "deepseek-ai/": "needs a model of the hub",
    "mistralai/": "needs a model of the hub",
    "hellaswag": "needs data of the hub",
    "paceline demo": "takes minutes: make demo",
    "completions.jsonl": "reads a file of an engine: tests/traces",
    "response.json": "reads a file of an engine: tests/traces",
    "expert_distribution_recorder": "reads a file of an engine: tests/traces",
    "expert_scores/law": "reads files of a study: tests/traces",
    "rank0": "reads recordings of several ranks: tests/traces",
}
"""Part of a command -> why it is only parsed."""

QUICK = {
    "paceline loads sample:esft_v2lite_law --policy capacity_factor=1.0 --policy max_active=3",
    "paceline loads monday --judge friday --html page.html",
    "paceline plan sample:esft_v2lite_law --place-only --out plan.toml",
    "paceline plan monday --judge friday --place-only --best-of --out plan.toml",
    "paceline plan trace --model-config model --devices 8 --hardware h100 --out plan.toml",
    "paceline reorder ./my-moe --plan plan.toml --out ./my-moe-placed",
    "paceline record ./my-moe --text a.txt --text b.txt --out trace --content choices",
}
"""Examples of the first tier, one or two per verb; all others run in `make test-all`."""

LINES = [(where, line) for where, lines in examples().items() for line in lines]


def _reason(line: str) -> str | None:
    return next((why for part, why in NOT_RUN.items() if part in line), None)


RUN = list(dict.fromkeys(line for _, line in LINES if _reason(line) is None))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_verb_has_json_and_examples(name: str) -> None:
    assert name == "serve" or any("--json" in option.opts for option in COMMANDS[name].params)
    assert any(f"paceline {name}" in line for line in examples()[name])


def test_every_example_parses() -> None:
    assert len(LINES) > 80
    for _, line in LINES:
        name, arguments = split(line)
        COMMANDS[name].make_context(name, arguments)
    assert set(RUN) >= QUICK
    assert all(any(part in line for _, line in LINES) for part in NOT_RUN)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the examples read: a model, texts, traces, plans."""
    folder = tmp_path_factory.mktemp("files")

    def made(*arguments: str | Path) -> str:
        ran = run(*arguments)
        assert ran.exit_code == 0, ran.output
        return str(ran.stdout)

    for name in ("my-moe", "model"):
        (folder / name).symlink_to(MODEL_FOLDER)
    texts = {"a": "prose", "b": "german", "prompts": "prose", "questions": "german"}
    for name, text in texts.items():
        content = (TEXT_FOLDER / f"{text}.txt").read_text(encoding="utf-8")
        (folder / f"{name}.txt").write_text(content[:12_000], encoding="utf-8")
    (folder / "prompts.jsonl").write_text('{"prompt": "A straggler is"}\n' * 8, encoding="utf-8")
    for name, text in {"monday": "a", "friday": "b"}.items():
        of = (
            "--text",
            folder / f"{text}.txt",
            "--tokens",
            "4096",
            "--batch-size",
            "4",
            "--content",
            "scores",
        )
        made("record", MODEL_FOLDER, *of, "--out", folder / name)
    for name in ("trace", "other", "demo_trace"):
        shutil.copytree(folder / "monday", folder / name)
    made("plan", folder / "monday", "--place-only", "--out", folder / "plan.toml")
    capped = (folder / "plan.toml").read_text(encoding="utf-8")
    capped += "\n[policy]\ncapacity_factor = 1.25\n"
    (folder / "plan.toml").write_text(capped, encoding="utf-8")
    lines = (folder / "questions.txt").read_text(encoding="utf-8").splitlines()
    (folder / "questions.txt").write_text("\n".join(lines[:8]) + "\n", encoding="utf-8")
    for name in ("mine", "calibrated"):
        (folder / name).mkdir()
        shutil.copy(folder / "plan.toml", folder / name / "plan.toml")
    for name in ("intent", "law"):
        out = folder / f"{name}.toml"
        made("plan", f"sample:esft_v2lite_{name}", "--place-only", "--out", out)
    planned = made("plan", folder / "monday", "--model-config", MODEL_FOLDER, "--json")
    (folder / "plan.json").write_text(planned, encoding="utf-8")
    v2lite = {"hidden_size": 2048, "num_hidden_layers": 27, "moe_intermediate_size": 1408,
              "n_routed_experts": 64, "num_experts_per_tok": 6}  # fmt: skip
    gpt_oss = {"hidden_size": 2880, "num_hidden_layers": 24, "intermediate_size": 2880,
               "num_local_experts": 32, "num_experts_per_tok": 4}  # fmt: skip
    for name, sizes in {"v2lite": v2lite, "gpt_oss": gpt_oss}.items():
        (folder / f"{name}.json").write_text(json.dumps(sizes), encoding="utf-8")
    for name in ("monday", "tuesday", "wednesday"):
        counts = json.dumps({"logical_count": [[40, 80, 60, 20], [12, 90, 48, 50]]})
        (folder / f"{name}.json").write_text(counts, encoding="utf-8")
    save_hardware(PRESETS["h20"], folder / "here.json", {})
    return folder


@pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=() if line in QUICK else pytest.mark.full) for line in RUN],
)
def test_an_example_runs_as_printed(
    line: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, arguments = split(line)
    written = [arguments[i + 1] for i, each in enumerate(arguments) if each in ("--out", "--maps")]
    for file in files.iterdir():
        if file.name not in written:
            (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    ran = run(*name.split(), *arguments)
    assert ran.exit_code == 0, ran.output
    shown = [each for each in ran.stdout.splitlines() if not each.startswith(("Written:", "Next:"))]
    assert max(map(len, shown)) <= 80
    for out in written:
        assert (tmp_path / out).exists()
