"""What was ever found harmful is harmless now, and so are small changes of right inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from targets import TARGETS, violations

CORPUS = Path(__file__).with_name("corpus")
FOUND = sorted(path for path in CORPUS.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_was_found_is_harmless(path: Path) -> None:
    assert violations(TARGETS[path.parent.name], path.read_bytes()) == []


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_are_harmless(name: str) -> None:
    target = TARGETS[name]
    assert all(violations(target, data) == [] for data in target.seeds())


TOKENS = [
    b"", b"-1", b"0", b"NaN", b"1e999", b"9" * 400, b"null", b"[]", b"{}", b"\x00", b"\xff" * 8,
    b'"', b",", b"=", b"[" * 3000, b"true", b"\n", "²".encode(), "٣".encode(), b"\x7f" * 8,
]  # fmt: skip


@st.composite
def changed(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A right input with some pieces taken out, put in, or put elsewhere."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([0, 1, 2, 8, 64, len(data)]))
        piece = draw(st.sampled_from(TOKENS) | st.binary(max_size=16))
        data = data[:start] + piece + data[start + length :]
    return data


@pytest.mark.parametrize("name", TARGETS)
def test_small_changes_are_harmless(name: str) -> None:
    target = TARGETS[name]

    @given(changed(target.seeds()))
    def check(data: bytes) -> None:
        assert violations(target, data) == []

    check()
