"""Texts, keys and passwords show up in no output, log, error or result: looked for by a canary."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app

CANARY = "kanarienvogel4417"
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY", "OPENAI_API_KEY", "AWS_SECRET")
SAMPLE = "sample:esft_v2lite_law"


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def told(result: Any) -> str:
    """Everything that a verb said, with the traceback of what it didn't expect."""
    error = result.exception
    unexpected = error is not None and not isinstance(error, SystemExit)
    return result.output + ("".join(traceback.format_exception(error)) if unexpected else "")


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in SECRETS:
        monkeypatch.setenv(name, CANARY)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(f"The password is {CANARY}, and the others wait for it.\n" * 40)
    return path


# -- what goes well --------------------------------------------------------------------------------

SMALL = ("--tokens", "256", "--batch-size", "4", "--sequence-length", "32")
WORKS = {
    "loads": ("loads", "demo", *SMALL, "--json", "--html", "OUT.html"),
    "loads with a cap": ("loads", "demo", *SMALL, "--policy", "capacity_factor=1"),
    "record": ("record", "demo", *SMALL, "--content", "scores", "--out", "OUT"),
    "record answers": (
        "record", "demo", "--prompts", "TEXT", "--max-new-tokens", "2", "--content", "choices",
        "--out", "OUT",
    ),
    "tune": ("tune", "demo", *SMALL, "--rank", "1", "--out", "OUT"),
    "eval": (
        "eval", "demo", *SMALL, "--compositions", "one_text", "--policy", "capacity_factor=1",
        "--out", "OUT",
    ),
    "eval grid": (
        "eval", "demo", "--grid", *SMALL, "--factors", "1", "--units", "device", "--out", "OUT",
    ),
    "bench": (
        "bench", "model", "--sequences", "2", "--prompt-tokens", "16", "--new-tokens", "2",
        "--rounds", "1", "--out", "OUT.json", "--html", "OUT.html",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORKS)
def test_no_text_and_no_key_in_what_is_printed_logged_or_written(
    name: str, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if name == "record answers":
        text.write_text("\n".join([f"Who is {CANARY}?"] * 2))
    out = {"TEXT": str(text), "OUT": str(tmp_path / "out")}
    out |= {f"OUT.{ending}": str(tmp_path / f"out.{ending}") for ending in ("html", "json")}
    arguments = [out.get(argument, argument) for argument in WORKS[name]]
    caplog.set_level(logging.DEBUG)
    given = [] if "--prompts" in arguments else ["--text", text]
    result = run(*arguments, *given)
    assert result.exit_code == 0, told(result)
    assert CANARY not in told(result)
    assert CANARY not in caplog.text
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != text]
    assert all(CANARY.encode() not in path.read_bytes() for path in written)


def test_the_traceback_of_a_defect_shows_no_text(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody expects keeps its traceback, which names lines and no values of variables."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a defect")

    block = "transformers.models.olmoe.modeling_olmoe.OlmoeSparseMoeBlock"
    monkeypatch.setattr(f"{block}.forward", fail)
    result = run("record", "demo", *SMALL, "--text", text, "--out", tmp_path / "out")
    assert "a defect" in told(result)
    assert CANARY not in told(result)


# -- files that are something else -----------------------------------------------------------------


def files() -> Iterator[tuple[str, bytes]]:
    """Files with a secret in them, which a user may name by mistake."""
    settings = {"version": 1, "model": CANARY, "policy": {"token": CANARY}, "layers": CANARY}
    answer = {"id": CANARY, "choices": [{"text": CANARY, "routed_experts": CANARY}]}
    routed = [{"type": "meta", "prompt": CANARY}, {"type": "route", "token": CANARY}]
    header = json.dumps({CANARY: {"dtype": CANARY}}).encode()
    yield ".env", f"API_KEY={CANARY}\n".encode()
    yield "keys.json", json.dumps(settings).encode()
    yield "answer.json", json.dumps(answer).encode()
    yield "routed.jsonl", "\n".join(map(json.dumps, routed)).encode()
    yield "keys.toml", f'version = 1\ntoken = "{CANARY}"\n'.encode()
    yield "table.csv", f"layer,expert,{CANARY}\n0,{CANARY},3\n".encode()
    yield "weights.safetensors", len(header).to_bytes(8, "little") + header


def verbs(path: Path, text: Path, out: Path) -> Iterator[tuple[str | Path, ...]]:
    yield "loads", path, "--model-config", path
    yield "loads", SAMPLE, "--plan", path
    yield "loads", SAMPLE, "--placement", path
    yield "record", path, "--text", text, "--out", out
    yield "tune", path, "--text", text, "--out", out
    some = "--text", text, "--only", "factors", "--bound", "1", "--out", out
    yield "tune", path, *some
    yield "tune", "demo", *some, "--plan", path
    yield "tune", "demo", *some, "--calibration", path
    yield "eval", path, "--text", text
    yield "eval", "demo", "--text", text, "--policy", "capacity_factor=1", "--plan", path
    yield "eval", "demo", "--grid", "--text", text, "--calibration", path
    yield "plan", path, "--place-only", "--out", out
    yield "plan", SAMPLE, "--model-config", path
    yield "plan", SAMPLE, "--model-config", path, "--hardware", path
    yield "reorder", path, "--plan", path, "--out", out
    yield "loads", path, "--html", out
    yield "loads", SAMPLE, "--plan", path, "--html", out
    yield "import", path, "--experts", "8", "--k", "2", "--layers", "2", "--out", out
    yield "loads", path, "--policy", "capacity_factor=1"
    yield "loads", SAMPLE, "--sweep", path
    yield "bench", "model", "--model", path
    yield "bench", "layer", "--trace", path
    yield "bench", "layer", "--plan", path
    yield "serve", "demo", "--plan", path


@pytest.mark.parametrize(("name", "content"), list(files()), ids=[name for name, _ in files()])
def test_an_error_about_a_file_shows_nothing_of_it(
    name: str, content: bytes, text: Path, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    folder = tmp_path / "folder"
    folder.mkdir()
    for inside in ("config.json", "trace.json", "calibration.json"):
        (folder / inside).write_bytes(content)
    refused = 0
    for given in (path, folder):
        for arguments in verbs(given, text, tmp_path / "out"):
            result = run(*arguments)
            assert CANARY not in told(result), arguments
            refused += result.exit_code == 2
    assert refused > 30


@pytest.mark.parametrize(
    "arguments",
    [
        ("--api-key", CANARY, "demo"),
        (f"--api-key={CANARY}", "demo"),
        ("demo", "--api-key", CANARY, "--policy", "nonsense"),
        ("demo", f"--api-key={CANARY}", "--devices", "0"),
        ("demo", "--hf-token", CANARY, "--plan", "missing.toml"),
    ],
)
def test_what_serve_refuses_shows_no_key(arguments: tuple[str, ...]) -> None:
    result = run("serve", *arguments)
    assert result.exit_code == 2
    assert CANARY not in told(result)
