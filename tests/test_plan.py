"""Plan files and plans: whatever is wrong with one ends in one short sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from paceline import CapacityPolicy, ExpertPlacement
from paceline.cli.app import app
from paceline.placement import MAX_DEVICES
from paceline.plan import Plan, PlanError

POLICY = CapacityPolicy(capacity_factor=1.25)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = 1.0", "version must be 1, got 1.0"),
        ("version = true", "version must be 1, got True"),
        ("", "version must be 1, got None"),
        ("\x00", "is not TOML"),
        ("version = 1\nnope = 1", "a field of a plan must be one of .*, got nope"),
        (f"version = 1\n{'n' * 100_000} = 1", "a field of a plan must be one of"),
        ("version = 1\na = " + "[" * 50_000, "nests too deeply"),
        ("version = 1\na = " + "{b = " * 5_000, "nests too deeply"),
        ("version = 1\n[model]\nk = " + "9" * 5_000, "digits"),
        (f"version = 1\n[model]\nz = {list(range(10_000))}", "model must be a table of layers"),
        ("version = 1\n[model]\nlayers = 2.0", "layers must be a whole number >= 1, got 2.0"),
        (
            f"version = 1\ncalibration = {list(range(10_000))}",
            "calibration must be the name of a folder",
        ),
        ("version = 1\nplacements = 3", "must be an array of tables"),
        ("version = 1\npolicy = [1]", "must be an array of tables"),
        (
            "version = 1\n[policy]\ncapacity_factor = nan",
            "capacity_factor must be a number > 0, inf or None, got nan",
        ),
        (
            "version = 1\n[policy]\npool = {a = 1}",
            "pool must be 'batch', 'source' or 'request', got {'a': 1}",
        ),
        (
            "version = 1\n[placement]\nnum_devices = 2.0",
            "num_devices must be a whole number >= 1, got 2.0",
        ),
        ("version = 1\n[placement]\nexpert_to_device = []", "at least 1 expert"),
        ("version = 1\nslots = [[0, 1]]", "one placement with num_devices alone"),
        ("version = 1\nslots = 3\n[placement]\nnum_devices = 2", "slots must be a list"),
        (
            "version = 1\nslots = [[0, 2]]\n[placement]\nnum_devices = 2",
            "slots\\[0\\] must name each",
        ),
        (
            "version = 1\nslots = [[0, true]]\n[placement]\nnum_devices = 2",
            "slots\\[0\\] must be a row",
        ),
        ("version = 1\nslots = [[0, 1]]\n[placement]\nnum_devices = 3", "every device a slot"),
        (
            "version = 1\nslots = [[0, 1, 0], [0, 1, 2]]\n[placement]\nnum_devices = 2",
            "same number of slots",
        ),
        (
            "version = 1\nslots = [[0, 1]]\n[placement]\nnum_devices = 2\n[model]\nexperts = 3",
            "slots must name 3 experts",
        ),
        (
            "version = 1\nslots = [[0, 1], [1, 0]]\nplacement = {num_devices = 2}\n"
            "model = {layers = 3}",
            "2 slots, 3 layers",
        ),
        # a placement of so many devices would fill the memory
        ("version = 1\n[placement]\nexpert_to_device = [0, 9999999999]", str(MAX_DEVICES)),
        (f"version = 1\n[placement]\nexpert_to_device = [{'9' * 4_000}]", str(MAX_DEVICES)),
    ],
    ids=str,
)
def test_a_bad_file_is_one_short_sentence(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        Plan.from_toml(text, "plan.toml")
    assert str(caught.value).startswith("plan.toml")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "fields",
    [
        {"layers": "3"}, {"layers": 0}, {"layers": 2.0}, {"experts": True}, {"k": np.bool_(True)},
        {"calibration": 3}, {"policies": POLICY}, {"policies": ("capacity_factor=1",)},
        {"policies": (None,)}, {"placements": 4}, {"placements": (0,)}, {"placements": (True,)},
        {"placements": ([0, 1],)}, {"policies": (POLICY,) * 2, "layers": 3},
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_argument_is_one_sentence(fields: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**fields)
    assert "\n" not in str(caught.value)


def test_whole_numbers_of_any_library_and_lists_are_taken() -> None:
    placement = ExpertPlacement.contiguous(8, 2)
    plan = Plan([POLICY], [np.int64(4), placement], layers=np.int32(2), experts=8)  # type: ignore[arg-type]
    assert plan == Plan((POLICY,), (4, placement), layers=2, experts=8)
    assert Plan.from_toml(plan.to_toml()) == plan


@pytest.mark.parametrize("path", ["", ".", "a\0b", "nowhere.toml", "n" * 5_000, None, 3.5])
def test_what_cannot_be_read_is_one_sentence(
    path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match="can't be read"):
        Plan.load(path)


def test_a_plan_with_replicas_is_for_engines_that_have_them(tmp_path: Path) -> None:
    plan = Plan((POLICY,), (2,), layers=2, k=2, slots=((0, 1, 2, 0), (2, 1, 0, 1)))
    plan.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == plan
    plan.check_model([3, 3], [2, 2], replicates=True)
    with pytest.raises(PlanError, match="for 3 experts per layer, layer 0 has 4"):
        plan.check_model([4, 4], [2, 2], replicates=True)
    for check in (lambda: plan.check_model([3, 3], [2, 2]), lambda: plan.check_layers(2)):
        with pytest.raises(PlanError, match="4 slots for 3 experts"):
            check()


def test_verbs_that_have_no_replicas_refuse_them(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    slots = tuple((*range(32), 0, 1, 2, 3, 4, 5, 6, 7) for _ in range(6))
    Plan(placements=(8,), layers=6, slots=slots).save(path)
    trace, demo = "sample:gpt_oss_20b_decode", "demo"
    for arguments in (
        ["loads", trace, "--plan", str(path), "--html", str(tmp_path / "page.html")],
        ["loads", trace, "--plan", str(path)],
        ["loads", demo, "--plan", str(path)],
        ["reorder", demo, "--plan", str(path), "--out", str(tmp_path / "out")],
        ["bench", "layer", "--plan", str(path)],
    ):
        ran = CliRunner().invoke(app, arguments)
        assert ran.exit_code == 2, (arguments, ran.output)
        assert "40 slots for 32 experts" in ran.stderr, arguments
