"""What must be in place before a worker serves."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang_runs import HERE

sys.path.insert(0, str(HERE / "stubs"))  # torchvision, which SGLang imports

from paceline.engines.sglang import control, hooks, plugin


def test_a_hook_that_was_not_applied_stops_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang only logs a hook that it can't apply."""
    monkeypatch.setenv("PACELINE_POLICY", "capacity_factor=1")
    applied = set(hooks.HOOKS) - {"sglang.srt.layers.moe.topk.select_experts"}
    monkeypatch.setattr(hooks.HookRegistry, "_patched", applied)
    with pytest.raises(RuntimeError, match=r"did not apply the hook on .*select_experts"):
        hooks._loaded(None, SimpleNamespace(is_draft_worker=False))


def test_a_version_is_refused_by_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugin.check_version() in plugin.RUN_WITH
    select = "sglang.srt.layers.moe.topk:select_experts"
    with pytest.raises(plugin.UnsupportedSglang, match=f"parameter gate of {select}"):
        plugin.check_version({select: ("gate",)})
    monkeypatch.setattr(plugin, "RUN_WITH", ("0.5.1",))
    with pytest.raises(plugin.UnsupportedSglang, match="PACELINE_UNTESTED_SGLANG=1"):
        plugin.check_version()
    monkeypatch.setenv("PACELINE_POLICY", "capacity_factor=1")
    with pytest.raises(SystemExit, match=r"paceline: sglang .* is not supported"):
        plugin.register()
    monkeypatch.setenv(plugin.UNTESTED, "1")
    plugin.check_version()


def test_without_a_setting_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks.HookRegistry, "_hooks", registered := {})
    plugin.register()
    assert not registered


@pytest.mark.parametrize("number", [3, -1, 2.5, float("nan"), float("inf"), 1e300])
def test_a_number_under_which_nothing_is_asked_does_nothing(
    number: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may call SGLang's /set_internal_state can send any number."""
    monkeypatch.setenv(control.FOLDER, str(tmp_path))
    assert control.answer(SimpleNamespace(), number) is False
    monkeypatch.delenv(control.FOLDER)
    assert control.answer(SimpleNamespace(), number) is False
    assert not list(tmp_path.iterdir())


def test_a_worker_that_fails_answers_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception there would end the server."""
    monkeypatch.setenv(control.FOLDER, str(tmp_path))
    (tmp_path / "7.json").write_text('{"method": "paceline_describe", "args": []}')
    assert control.answer(SimpleNamespace(), 7) is False
    (answered,) = tmp_path.glob("7-*.json")
    assert "AttributeError" in answered.read_text()
    assert answered.stat().st_mode & 0o077 == 0
