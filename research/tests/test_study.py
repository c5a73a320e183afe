"""docs/study.md: its commands say what is kept, and its tables are made from that."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUDY = runpy.run_path(str(ROOT / "research" / "study.py"))
PAGE = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")


def alike(found: Any, kept: Any, where: str = "") -> None:
    """Equal up to rounding of floats."""
    assert type(found) is type(kept) or {type(found), type(kept)} == {int, float}, where
    if isinstance(kept, dict):
        assert found.keys() == kept.keys(), where
        for key, value in kept.items():
            alike(found[key], value, f"{where}/{key}")
    elif isinstance(kept, list):
        assert len(found) == len(kept), where
        for index, value in enumerate(kept):
            alike(found[index], value, f"{where}/{index}")
    elif isinstance(kept, float):
        assert found == pytest.approx(kept, rel=1e-6, abs=1e-9), where
    else:
        assert found == kept, where


def test_every_command_says_again_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    STUDY["prepare"](tmp_path)
    kept = STUDY["load"]()
    for name in STUDY["COMMANDS"]:
        found = STUDY["run"](name)
        if name != "loads_demo":
            alike(found, kept[name], name)
            continue
        # what a model generates may differ from machine to machine
        for group, own in zip(found["groups"], kept[name]["groups"], strict=True):
            assert group["phase"] == own["phase"]
            assert group["tokens"] == pytest.approx(own["tokens"], rel=0.2)
            assert group["device_peak_to_mean"] == pytest.approx(
                own["device_peak_to_mean"], rel=0.1
            )


def test_the_page_has_every_command_and_table() -> None:
    for command in [STUDY["RECORD"], *STUDY["COMMANDS"].values()]:
        assert command in PAGE
    for title, table in STUDY["tables"](STUDY["load"]()).items():
        assert table in PAGE, title
