"""Verbs that are killed at any point leave the old file or the new one, and can be run again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from paceline import ExpertPlacement
from paceline.plan import Plan
from paceline.shipped import CALIBRATION_FOLDER
from paceline.stand_ins.calibration_file import Calibration
from paceline.traces import open_trace, sample, save_trace
from paceline.traces.trace import Trace

SMALL = ("--tokens", "256", "--batch-size", "4", "--sequence-length", "32", "--text", "prose")


def files(folder: Path) -> dict[str, bytes]:
    """What a user sees in a folder: temporary files have names that begin with a dot."""
    found = (path for path in folder.rglob("*") if path.is_file())
    visible = (p for p in found if not any(q.startswith(".") for q in p.relative_to(folder).parts))
    return {str(path.relative_to(folder)): path.read_bytes() for path in visible}


def each_is_old_or_new(before: Path, here: Path, done: Path) -> None:
    """Every file is one that was there before, or one of a run that came to its end."""
    old, now, new = files(before), files(here), files(done)
    assert old.keys() <= now.keys() <= new.keys()
    assert all(content in (old.get(name), new[name]) for name, content in now.items())


def whole_or_missing(folder: str) -> Callable[[Path, Path, Path], None]:
    """A folder that comes to be at once."""

    def check(before: Path, here: Path, done: Path) -> None:
        each_is_old_or_new(before, here, done)
        assert not (here / folder).exists() or files(here / folder) == files(done / folder)

    return check


def the_calibration_is_old_or_new(before: Path, here: Path, done: Path) -> None:
    """What is being learned stands beside it, and is found again."""
    path = Path("calibrated", "calibration.safetensors")
    assert (here / path).read_bytes() in ((before / path).read_bytes(), (done / path).read_bytes())
    assert Calibration.load(here / "calibrated").layers
    found = {each.name for each in (here / "calibrated").iterdir() if each.name[0] != "."}
    known = (each for folder in (before, done) for each in (folder / "calibrated").iterdir())
    assert found <= {"unfinished", *(each.name for each in known)}


def the_trace_is_a_beginning(before: Path, here: Path, done: Path) -> None:
    """Of what was recorded all that is there is right, and is found by its reader."""
    if not (here / "trace" / "trace.json").exists():
        return
    names = {name for name in files(here / "trace") if name.startswith("chunk")}
    trace, whole = open_trace(here / "trace"), open_trace(done / "trace")
    found, wanted = list(trace.chunks), list(islice(whole.chunks, len(names)))
    assert len(found) == len(names)
    assert all(a.counts.equal(b.counts) for a, b in zip(found, wanted, strict=True))


def results_are_whole(before: Path, here: Path, done: Path) -> None:
    for path in (here / "out").glob("eval.*"):
        whole = (done / "out" / path.name).read_text()
        if path.suffix == ".json":
            assert json.loads(path.read_text())["texts"] == json.loads(whole)["texts"]
        else:
            assert path.read_text() == whole
    for path in (here / "out" / "state").glob("[!.]*"):
        assert path.read_bytes() == (done / "out" / "state" / path.name).read_bytes()


def old_page(before: Path) -> None:
    narrow = sample("esft_v2lite_law").select_layers([0, 1]).regrouped(64)
    save_trace(Trace(narrow.header, tuple(islice(narrow.chunks, 2)), narrow.where), before / "law")
    (before / "page.html").write_text("the page of a former run")


def a_plan(before: Path) -> None:
    placement = ExpertPlacement.explicit([expert % 8 for expert in range(32)])
    Plan(placements=(placement,)).save(before / "plan.toml")


def old_plan(before: Path) -> None:
    old_page(before)
    a_plan(before)


def old_calibration(before: Path) -> None:
    shutil.copytree(CALIBRATION_FOLDER, before / "calibrated")


def nothing(before: Path) -> None:
    """An empty folder."""


Check = Callable[[Path, Path, Path], None]
RUNS: dict[str, tuple[Callable[[Path], None], Check, tuple[str, ...]]] = {
    "loads": (old_page, each_is_old_or_new, ("loads", "law", "--html", "page.html", "--force")),
    "plan": (
        old_plan, each_is_old_or_new,
        ("plan", "law", "--place-only", "--devices", "8", "--out", "plan.toml", "--force"),
    ),
    "reorder": (
        a_plan, whole_or_missing("out"), ("reorder", "demo", "--plan", "plan.toml", "--out", "out"),
    ),
    "tune": (
        old_calibration, the_calibration_is_old_or_new,
        ("tune", "demo", *SMALL, "--rank", "1", "--only", "stand-ins", "--out", "calibrated",
         "--force"),
    ),
    "record": (
        nothing, the_trace_is_a_beginning, ("record", "demo", *SMALL, "--out", "trace"),
    ),
    "eval": (
        nothing, results_are_whole,
        ("eval", "demo", *SMALL, "--compositions", "one_text", "--policy", "capacity_factor=1",
         "--out", "out"),
    ),
}  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks, and counts on audit hooks of files")
@pytest.mark.parametrize(
    "verb", [v if v == "plan" else pytest.param(v, marks=pytest.mark.full) for v in RUNS]
)
def test_a_killed_verb_leaves_the_old_file_or_the_new_one(verb: str, tmp_path: Path) -> None:
    prepare, check, arguments = RUNS[verb]
    before = tmp_path / "before"
    before.mkdir()
    prepare(before)
    program = [sys.executable, Path(__file__).with_name("killed.py"), tmp_path, "4", *arguments]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    killed = sorted(tmp_path.glob("at-*"))
    assert len(killed) >= 3
    for here in killed:
        check(before, here, tmp_path / "done")
    changed = [here for here in killed if files(here) != files(before)]
    at_once = verb in ("loads", "plan", "reorder")  # one file or folder, which appears at the end
    assert bool(changed) != at_once
