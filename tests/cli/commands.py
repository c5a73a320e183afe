"""Shared by tests of the command: run it in this process, and have every verb read a path."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer import _click as click
from typer.main import get_command
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.shipped import MODEL_FOLDER

SAMPLE = "sample:esft_v2lite_law"
ROOT = Path(__file__).parents[2]


def _commands() -> Iterator[tuple[str, click.Command]]:
    for name, command in get_command(app).commands.items():
        if command.hidden:
            continue
        if name == "bench":
            yield from ((f"bench {each}", inner) for each, inner in command.commands.items())
        else:
            yield name, command


COMMANDS = dict(_commands())
"""Every command that help shows, with its words: `loads`, `bench layer`."""


def examples() -> dict[str, list[str]]:
    """Verb or page -> the commands of paceline that its help or its text shows, as printed."""
    found = {}
    for name, command in COMMANDS.items():
        shown = (command.help or "").split("Examples:")[1].strip().splitlines()
        found[name] = [line.strip().split("  then:")[0].strip() for line in shown]
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        blocks = re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        text = "\n".join(blocks).replace("\\\n", " ")
        lines = re.findall(r"^(?:.* -m )?paceline .*?(?= #|;|\||&&| > |$)", text, re.MULTILINE)
        found[page.name] = [line.strip() for line in lines]
    return {where: lines for where, lines in found.items() if lines}


def split(line: str) -> tuple[str, list[str]]:
    """Return the command that a line names, and its arguments."""
    words = shlex.split(line.partition("paceline ")[2])
    name = next(n for n in COMMANDS if words[: n.count(" ") + 1] == n.split())
    return name, words[name.count(" ") + 1 :]


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
