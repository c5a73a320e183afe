"""The examples in docstrings are run, and what is public has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
MODULES = sorted(
    ".".join(["paceline", *path.relative_to(ROOT).with_suffix("").parts])
    for path in ROOT.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)
PUBLIC = [
    paceline.CapacityPolicy,
    *(getattr(paceline.CapacityPolicy, name)
      for name in ("parse", "from_json", "from_toml", "to_json", "to_toml", "replace")),
    paceline.ExpertPlacement,
    *(getattr(paceline.ExpertPlacement, name)
      for name in ("contiguous", "explicit", "per_expert", "experts_of")),
    paceline.RoutingInputs, paceline.Assignment, paceline.route, paceline.register_keep,
]  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_examples_say_what_happens(module: str) -> None:
    outcome = doctest.testmod(
        importlib.import_module(module.removesuffix(".__init__")),
        optionflags=doctest.NORMALIZE_WHITESPACE,
    )
    assert outcome.attempted > 0
    assert outcome.failed == 0, "see what it printed"


@pytest.mark.parametrize("public", PUBLIC, ids=lambda p: p.__qualname__)
def test_what_is_public_ends_with_an_example(public: object) -> None:
    doc = inspect.getdoc(public) or ""
    assert ">>> " in doc.rsplit("\n\n", 1)[-1], doc
