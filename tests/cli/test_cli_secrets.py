"""Texts, keys and passwords show up in no output, log, error or result: looked for by a canary."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import commands_that_read, run

CANARY = "kanarienvogel4417"
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY", "OPENAI_API_KEY", "AWS_SECRET")
FIRST = ("loads", "record answers", "eval", "keys.json", "weights.safetensors")
"""Cases that every run of the tests has; `make test-all` has the others too."""


def told(result: Any) -> str:
    """Everything that a verb said, with the traceback of what it didn't expect."""
    error = result.exception
    unexpected = error is not None and not isinstance(error, SystemExit)
    return result.output + ("".join(traceback.format_exception(error)) if unexpected else "")


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
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
    "tune": ("tune", "demo", *SMALL, "--rank", "1", "--only", "stand-ins", "--out", "OUT"),
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


@pytest.mark.parametrize(
    "name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.full) for n in WORKS]
)
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


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param(*file, id=file[0], marks=[] if file[0] in FIRST else pytest.mark.full)
        for file in files()
    ],
)
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
        for arguments in commands_that_read(given, text, tmp_path / "out"):
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
