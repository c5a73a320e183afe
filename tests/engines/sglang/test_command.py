"""The command line of SGLang that `paceline serve --engine sglang` makes; needs no SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.engines.sglang.command import DEMO_FLAGS, NO_CACHE, sglang_flags


@pytest.mark.parametrize(
    ("policy", "more", "off"),
    [
        ("mode=observe", [], False),
        ("capacity_factor=1", [], False),  # no pool named: one per request
        ("capacity_factor=1,pool=request", [], False),
        ("capacity_factor=1,pool=batch", [], True),
        ("max_active=2", [], True),
        ("capacity_factor=1,pool=batch", [NO_CACHE], False),  # not twice
        ("capacity_factor=1,pool=batch,mode=shadow", [], False),
    ],
)
def test_the_radix_cache_is_off_where_requests_share_a_budget(
    policy: str, more: list[str], off: bool
) -> None:
    flags = sglang_flags("m", ["--port", "1", *more], {"PACELINE_POLICY": policy})
    assert flags[:4] == ["--model-path", "m", "--port", "1"]
    assert flags.count(NO_CACHE) == off + len(more)
    accepted = {"PACELINE_POLICY": policy, "PACELINE_ACCEPT_SHARED_BUDGET": "1"}
    assert NO_CACHE not in sglang_flags("m", [], accepted)


def test_the_embedded_model_gets_what_it_needs_and_the_user_did_not_say() -> None:
    observe = {"PACELINE_POLICY": "mode=observe"}
    flags = sglang_flags("demo", ["--dtype=bfloat16", "--device", "cuda"], observe)
    assert "--dtype" not in flags
    assert flags.count("--device") == 1
    assert all(name in flags for name in DEMO_FLAGS if name != "--dtype")
    assert not set(DEMO_FLAGS) & set(sglang_flags("./demo-like", [], observe))


def test_a_missing_engine_and_a_bad_policy_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.engines.sglang.command.find_spec", lambda name: None)
    serve = ["serve", "demo", "--engine", "sglang"]
    ran = CliRunner().invoke(app, serve)
    assert (ran.exit_code, ran.stderr.strip()) == (
        2, "paceline: --engine sglang needs SGLang: pip install sglang."
    )  # fmt: skip
    ran = CliRunner().invoke(app, [*serve, "--policy", "capacity_factor=0"])
    assert ran.exit_code == 2
    assert "capacity_factor must be a number > 0" in ran.stderr
