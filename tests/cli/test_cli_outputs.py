"""Outputs: tried before the work, never replaced unasked, and printed when the disk fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import SAMPLE, run

from paceline.cli import output
from paceline.placement import ExpertPlacement
from paceline.plan import Plan
from paceline.shipped import CALIBRATION_FOLDER

CAP = "--policy", "capacity_factor=1"
SMALL = (
    *("--text", "prose", "--tokens", "256"),
    *("--batch-size", "2", "--sequence-length", "64"),
)
PLACE = "plan", SAMPLE, "--place-only"
TUNE = "tune", "demo", *SMALL, "--rank", "1", "--only", "stand-ins"


def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make everything that costs time fail."""

    def fails(*_: Any, **__: Any) -> None:
        pytest.fail("the work began")

    for name in (
        *("cli.record.load", "cli.loads.load", "cli.tune.load", "cli.eval.load", "cli.bench.load"),
        *("cli.plan.read_trace", "cli.import_trace.read_trace", "cli.trace_loads.read_trace"),
        *("demo.page.run_demo", "bench.hardware.measure", "checkpoint.folder.open_checkpoint"),
        "bench.run.bench_layer",
    ):
        monkeypatch.setattr(f"paceline.{name}", fails)


def refused(*arguments: str | Path) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, (arguments, result.output, result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    return line


VERBS: dict[str, tuple[tuple[str, ...], str]] = {
    "demo": (("demo",), "--out"),
    "loads of a model": (("loads", "demo"), "--html"),
    "loads of a trace": (("loads", SAMPLE), "--html"),
    "figures": (("loads", SAMPLE), "--figures"),
    "record": (("record", "demo"), "--out"),
    "import": (("import", SAMPLE), "--out"),
    "plan": (PLACE, "--out"),
    "maps": (PLACE, "--maps"),
    "tune": (("tune", "demo"), "--out"),
    "eval": (("eval", "demo", *CAP), "--out"),
    "reorder": (("reorder", "demo", "--plan", "nowhere.toml"), "--out"),
    "bench layer": (("bench", "layer"), "--out"),
    "page of bench layer": (("bench", "layer"), "--html"),
    "bench model": (("bench", "model"), "--out"),
    "bench hardware": (("bench", "hardware"), "--out"),
}


@pytest.mark.parametrize("name", VERBS)
@pytest.mark.parametrize("where", ["closed", "a/file", "long"])
def test_outputs_are_tried_before_the_work(
    name: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_work(monkeypatch)
    (verb, option), out = VERBS[name], tmp_path / "out"
    if where == "closed":

        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "somewhere")

        monkeypatch.setattr("paceline.files.tempfile.mkstemp", refuse)
    elif where == "a/file":
        (tmp_path / "file").write_text("in the way")
        out = tmp_path / "file" / "out"
    else:
        out = tmp_path / ("x" * 300)
    line = refused(*verb, option, out)
    assert line.startswith(f"paceline: {option} {out} can't be written: "), line
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.iterdir())) == (where == "a/file")


@pytest.mark.skipif(not Path(os.devnull).is_char_device(), reason="needs a device file")
def test_a_device_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_work(monkeypatch)
    link = tmp_path / "null"
    link.symlink_to(os.devnull)
    assert "it is no plain file" in refused("loads", SAMPLE, "--html", link)


@pytest.mark.parametrize(
    "verb",
    [("demo", "--out"), ("tune", "demo", "--out"), ("loads", "demo", "--html"),
     ("loads", SAMPLE, "--html"), ("bench", "layer", "--html"),
     ("eval", "demo", "--grid", "--out")],
    ids=" ".join,
)  # fmt: skip
def test_a_library_for_pages_is_missed_before_the_work(
    verb: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_work(monkeypatch)
    found = output.find_spec
    monkeypatch.setattr(output, "find_spec", lambda name: None if name == "plotly" else found(name))
    assert "a page needs plotly: pip install 'paceline[cli]'" in refused(*verb, tmp_path / "out")


FILES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "plan": (PLACE, "--out", ""),
    "maps": (PLACE, "--maps", "sglang_expert_location.json"),
    "bench layer": (("bench", "layer"), "--out", ""),
    "bench model": (("bench", "model"), "--out", ""),
    "bench hardware": (("bench", "hardware"), "--out", ""),
    "tune": (("tune", "demo"), "--out", "calibration.safetensors"),
    "tune, its plan": (("tune", "demo", "--devices", "8"), "--out", "plan.toml"),
    "factors": (("tune", "demo", "--only", "factors", "--bound", "1"), "--out", "plan.toml"),
    "eval": (("eval", "demo", *CAP), "--out", "eval.json"),
    "grid": (("eval", "demo", "--grid"), "--out", "sweep.json"),
    "page of bench layer": (("bench", "layer"), "--html", ""),
    "page of a model": (("loads", "demo"), "--html", ""),
    "page of a trace": (("loads", SAMPLE), "--html", ""),
    "figures": (("loads", SAMPLE), "--figures", "waits.svg"),
}


@pytest.mark.parametrize("name", FILES)
def test_no_verb_replaces_what_another_run_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_work(monkeypatch)
    verb, option, inside = FILES[name]
    out = tmp_path / "out"
    path = out / inside if inside else out
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    line = refused(*verb, option, out)
    assert line.startswith(f"paceline: {option} {out}")
    assert line.endswith("give another, or --force to replace it.")
    assert path.read_text() == "{}"
    with pytest.raises(pytest.fail.Exception, match="the work began"):
        run(*verb, option, out, "--force")


def test_the_demo_replaces_its_own_page_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_work(monkeypatch)
    demo = "demo", "--quick", "--out", tmp_path
    (tmp_path / "index.html").write_text("mine")
    assert "holds a page that is no demo's" in refused(*demo)
    (tmp_path / "results.json").write_text('{"schema": "paceline-eval/1"}')
    assert "holds a page that is no demo's" in refused(*demo)
    (tmp_path / "results.json").write_text('{"schema": "paceline-demo/1"}')
    with pytest.raises(pytest.fail.Exception, match="the work began"):
        run(*demo)


def test_a_plan_is_replaced_by_force(tmp_path: Path) -> None:
    out = tmp_path / "plan.toml"
    out.write_text("another")
    assert run(*PLACE, "--out", out, "--force").exit_code == 0
    assert "version" in out.read_text()


@pytest.mark.full
def test_tune_replaces_no_other_models_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where layers of some other run are unfinished; its own run goes on, and says so."""
    from paceline.calibration import collect

    out = tmp_path / "tuned"
    shutil.copytree(CALIBRATION_FOLDER, out)
    (out / "plan.toml").write_text("the plan of the other")
    other = out / "unfinished" / "other" / "0"
    other.mkdir(parents=True)
    before = (out / "calibration.safetensors").read_bytes()
    assert "calibration.safetensors exists: give another" in refused(*TUNE, "--out", out)
    assert (out / "calibration.safetensors").read_bytes() == before

    keep = collect.Unfinished.keep

    def stop_after_two(self: Any, index: int, layer: Any) -> None:
        keep(self, index, layer)
        if index == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(collect.Unfinished, "keep", stop_after_two)
        assert run(*TUNE, "--out", out, "--force").exit_code == 130
    assert (out / "calibration.safetensors").read_bytes() == before
    goes_on = run(*TUNE, "--out", out)
    assert goes_on.exit_code == 0, goes_on.stderr
    assert "2 layers had been fitted before: going on" in goes_on.stderr
    assert (out / "calibration.safetensors").read_bytes() != before
    assert [path.name for path in (out / "unfinished").iterdir()] == ["other"]
    assert (out / "plan.toml").exists()
    assert run(*TUNE, "--out", out, "--force").exit_code == 0
    assert not (out / "plan.toml").exists()  # it named the calibration that was replaced


@pytest.mark.full
def test_eval_replaces_its_own_result_and_what_it_covers(tmp_path: Path) -> None:
    out = tmp_path / "out"
    judge = "eval", "demo", *SMALL, "--compositions", "one_text", "--out", out
    assert run(*judge, *CAP).exit_code == 0
    again = run(*judge, *CAP)
    assert again.exit_code == 0
    assert "batches had been computed before" in again.stderr
    other = "--policy", "capacity_factor=2"
    line = refused(*judge, *other)
    assert "holds eval.json of another policy, capacity_factor=1.0: give another" in line
    assert "another number of devices, 8" in refused(*judge, *CAP, "--devices", "4")
    assert run(*judge, *CAP, *other).exit_code == 0
    assert run(*judge, *other, "--force").exit_code == 0
    found = json.loads((out / "eval.json").read_text())
    found["subject"]["weights"] = "of an earlier training"
    (out / "eval.json").write_text(json.dumps(found))
    assert "results of demo with other weights" in refused(*judge, *other)
    grid = "eval", "demo", *SMALL, "--grid", "--units", "device", "--keeps", "score", "--out", out
    assert run(*grid, "--expands", "none", "--factors", "1").exit_code == 0
    assert run(*grid, "--expands", "none", "--factors", "1,0.5").exit_code == 0
    assert "another policy" in refused(*grid, "--expands", "none", "--factors", "0.5")


QUICK = "plan", "maps"
FULL: dict[str, Callable[[Path], tuple[str | Path, ...]]] = {
    "plan": lambda out: (*PLACE, "--out", out),
    "maps": lambda out: (*PLACE, "--maps", out),
    "loads of a trace": lambda out: ("loads", SAMPLE, "--html", out),
    "loads of a model": lambda out: ("loads", "demo", *SMALL, "--html", out),
    "eval": lambda out: ("eval", "demo", *SMALL, *CAP, "--compositions", "one_text", "--out", out),
    "tune": lambda out: (
        *("tune", "demo", *SMALL, "--rank", "1", "--tokens", "1024"),
        *("--devices", "8", "--bound", "1", "--out", out),
    ),
}


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in FULL]
)
def test_what_was_computed_is_printed_when_the_disk_is_full(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last writes fail: what a run keeps on its way is another matter."""
    out, to_disk = tmp_path / "out", "paceline.files._to_disk"

    def full(path: Path) -> None:
        if path.is_file() and "unfinished" not in path.parts and "state" not in path.parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(to_disk, full)
    result = run(*FULL[name](out), "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("paceline: --")
    assert str(out) in line
    assert line.endswith("can't be written: No space left on device.")
    assert not list(tmp_path.rglob("*.part*"))


# -- a policy that had no effect -------------------------------------------------------------------

FROM = "The policy capped nothing: its cap applies from a mean of"


def spoken(result: Any) -> str:
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def test_a_policy_that_capped_nothing_says_so(tmp_path: Path) -> None:
    few = "--tokens", "64", "--batch-size", "1", "--sequence-length", "16"
    far, near = "capacity_factor=1,min_expert_load=50", "capacity_factor=1,min_expert_load=0"
    policies = "--policy", far, "--policy", near
    verbs = {
        "eval": ("eval", "demo", *few, "--compositions", "one_text"),
        "trace": ("loads", SAMPLE),
    }
    said = spoken(run(*verbs["eval"], *policies))
    assert f"{FROM} 50 tokens per expert (min_expert_load), here batches of about 400" in said
    found = json.loads(run(*verbs["eval"], *policies, "--json").stdout)
    rows = found["texts"]["compositions"]["one_text"]["policies"]
    assert [bool(row["capped_nothing"]) for row in rows] == [False, True, False]
    never = "capacity_factor=1,min_expert_load=1e6"
    three = "--policy", never, "--policy", "max_active=1", "--policy", near
    said = spoken(run(*verbs["trace"], *three))
    assert f"{never}: {FROM} 1e+06 tokens per expert" in said
    assert "max_active=1: The policy capped nothing: max_active applies below a mean of" in said
    assert f"{near}: The policy" not in said
    found = json.loads(run(*verbs["trace"], *three, "--json").stdout)["plans"]
    assert [bool(plan["capped_nothing"]) for plan in found.values()] == [False, True, True, False]
    grid = "eval", "demo", "--grid", *few, "--factors", "1", "--units", "device,expert"
    said = spoken(run(*grid, "--keeps", "score", "--expands", "none"))
    assert f"{FROM}" in said
    found = json.loads(run(*grid, "--keeps", "score", "--expands", "none", "--json").stdout)
    assert all(point["capped_nothing"] for point in found["points"])


def test_too_little_text_is_not_tuned_on(tmp_path: Path) -> None:
    small = "--text", "prose", "--tokens", "48", "--batch-size", "1", "--sequence-length", "16"
    line = refused("tune", "demo", *small, "--out", tmp_path / "out")
    assert "too little text: a stand-in needs 8 tokens" in line
    assert not (tmp_path / "out" / "calibration.safetensors").exists()


SCHEMAS: dict[str, Callable[[Path], tuple[str | Path, ...]]] = {
    "paceline-record/1": lambda out: ("record", "demo", *SMALL, "--out", out),
    "paceline-import/1": lambda out: ("import", SAMPLE, "--out", out),
    "paceline-reorder/1": lambda out: ("reorder", "demo", "--plan", _plan(out), "--out", out),
    "paceline-bench-layer/1": lambda out: ("bench", "layer", "--shape", "tiny", "--rounds", "1"),
}


def _plan(out: Path) -> Path:
    plan = out.with_name("plan.toml")
    Plan(placements=(ExpertPlacement.contiguous(32, 4),)).save(plan)
    return plan


@pytest.mark.parametrize("schema", SCHEMAS)
def test_json_names_its_schema(schema: str, tmp_path: Path) -> None:
    result = run(*SCHEMAS[schema](tmp_path / "out"), "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["schema"] == schema


# -- tasks -----------------------------------------------------------------------------------------


def test_tasks_are_looked_up_before_any_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    no_work(monkeypatch)
    own = tmp_path / "own.yaml"
    own.write_text("task: broken\ncustom_dataset: !function utils.nothing\n")
    mine = "eval", tmp_path, *CAP, "--include-path", tmp_path
    assert "the task broken can't be loaded" in refused(*mine, "--tasks", "broken")
    with pytest.raises(pytest.fail.Exception, match="the work began"):  # it comes along
        run(*mine, "--tasks", "paceline_continuation")
