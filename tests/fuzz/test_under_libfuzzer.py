"""The hook on comparisons, and what is kept of a search; libFuzzer itself isn't needed."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import fuzz
import numpy as np
import pytest
from under_libfuzzer import COMPARE, without_leak


def test_only_plain_values_are_shown_to_libfuzzer() -> None:
    shown: list[tuple[Any, Any]] = []

    def native(left: Any, right: Any, how: int, counter: int, constant: bool) -> bool:
        shown.append((left, right))
        return bool(COMPARE[how](left, right))

    compare = without_leak(native)
    array = np.arange(3)
    # the numbers that bytecode has for <, <=, ==, !=, >, >=
    for how, name in enumerate(("lt", "le", "eq", "ne", "gt", "ge")):
        wanted = getattr(operator, name)
        assert compare(1, 2, how, 0, False) == wanted(1, 2)
        assert (compare(array, 1, how, 0, True) == wanted(array, 1)).all()
    assert shown == [(1, 2)] * 6


def test_finds_are_kept_and_slow_inputs_are_not(tmp_path: Path) -> None:
    found, corpus = tmp_path / "finds", tmp_path / "corpus"
    found.mkdir()
    for name, data in (("timeout-1", b"a"), ("slow-unit-1", b"b"), ("0123", b"c")):
        (found / name).write_bytes(data)
    fuzz.keep(found, corpus)
    assert sorted(path.read_bytes() for path in corpus.iterdir()) == [b"a", b"c"]
    assert not list(found.iterdir())


def test_figures_of_one_target_stand_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fuzz.json"
    monkeypatch.setattr(fuzz, "version", lambda _: "1.0")  # Atheris is where `make fuzz` puts it
    one = {"inputs": 5, "minutes": 0.5, "peak_megabytes": 400, "finds": []}
    fuzz.write_down(path, "plan", one)
    fuzz.write_down(path, "http_body", {**one, "finds": ["an error"]})
    fuzz.write_down(path, "plan", {**one, "inputs": 7})
    kept = fuzz.json.loads(path.read_text())
    assert (kept["inputs"], kept["finds"]) == (12, 1)
    assert set(kept["targets"]) == {"plan", "http_body"}
