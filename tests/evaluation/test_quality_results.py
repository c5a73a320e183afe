"""The figures of caps that come with the package are those that were measured."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from paceline.demo.assets import shipped_sweep
from paceline.evaluation.results import read_sweep

ROOT = Path(__file__).resolve().parents[2]


def test_what_the_demo_page_shows_is_what_was_measured() -> None:
    shipped = shipped_sweep()
    assert shipped is not None
    measured = ROOT / "benchmarks" / "results" / "sweep.json"
    assert shipped == read_sweep(measured)
    assert {point.compensate for point in shipped.points} == {False, True}


def test_the_tables_of_the_page_are_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as Python itself does for a program
    made = runpy.run_path(str(ROOT / "benchmarks" / "quality_tables.py"))
    text = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
    assert text.count("<!-- end of ") == len(made["tables"]())
    assert made["page"](text) == text, "run python benchmarks/quality_tables.py --write"
