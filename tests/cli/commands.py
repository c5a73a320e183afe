"""Shared by tests of the command: run it in this process, and have every verb read a path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.shipped import MODEL_FOLDER

SAMPLE = "sample:esft_v2lite_law"


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def commands_that_read(path: Path, text: Path, out: Path) -> Iterator[tuple[str | Path, ...]]:
    """Every verb, given a path in the place of each file or folder that it reads."""
    cap = "--policy", "capacity_factor=1"
    texts = "--text", text
    factors = *texts, "--only", "factors", "--bound", "1", "--out", out
    yield "loads", path
    yield "loads", path, "--model-config", path
    yield "loads", path, *cap
    yield "loads", path, "--html", out
    yield "loads", SAMPLE, "--plan", path
    yield "loads", SAMPLE, "--placement", path
    yield "loads", SAMPLE, "--plan", path, "--html", out
    yield "loads", SAMPLE, "--judge", path, "--html", out
    yield "loads", SAMPLE, "--sweep", path
    yield "record", path, *texts, "--out", out
    yield "import", path, "--experts", "8", "--k", "2", "--layers", "2", "--out", out
    yield "plan", path, "--place-only", "--out", out
    yield "plan", SAMPLE, "--model-config", path
    yield "plan", SAMPLE, "--model-config", MODEL_FOLDER, "--hardware", path
    yield "tune", path, *texts, "--out", out
    yield "tune", path, *factors
    yield "tune", "demo", *factors, "--plan", path
    yield "tune", "demo", *factors, "--calibration", path
    yield "eval", path, *texts, *cap
    yield "eval", "demo", *texts, *cap, "--plan", path
    yield "eval", "demo", "--grid", *texts, "--calibration", path
    yield "reorder", path, "--plan", path, "--out", out
    yield "serve", "demo", "--plan", path
    yield "bench", "model", "--model", path
    yield "bench", "layer", "--trace", path
    yield "bench", "layer", "--plan", path
