"""`paceline reorder` on the demo model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from paceline import ExpertPlacement
from paceline.checkpoint import folder as model_folder
from paceline.cli.app import app
from paceline.plan import Plan

RUN = CliRunner()
ROUND = ExpertPlacement.explicit([expert % 8 for expert in range(32)])


def planned(folder: Path, plan: Plan) -> list[str]:
    plan.save(folder / "plan.toml")
    return ["reorder", "demo", "--plan", str(folder / "plan.toml"), "--out", str(folder / "out")]


def test_the_demo_model_is_reordered_and_compared(tmp_path: Path) -> None:
    ran = RUN.invoke(app, [*planned(tmp_path, Plan(placements=(ROUND,))), "--json"])
    assert ran.exit_code == 0, ran.output
    result = json.loads(ran.stdout)
    assert result["layers"] == 4
    assert 0 < result["output_difference"] <= model_folder.TOLERANCE
    order = json.loads((tmp_path / "out" / "expert_order.json").read_text())
    assert (
        list(order["original_expert_of_place"].values())
        == [[e for d in range(8) for e in range(32) if e % 8 == d]] * 4
    )
    assert Plan.load(tmp_path / "out" / "plan.toml").placements == (8,)
    said = RUN.invoke(app, [*planned(tmp_path, Plan(placements=(ROUND,)))])
    assert said.exit_code == 2
    assert "exists" in said.stderr


def test_devices_in_order_get_the_planned_loads(tmp_path: Path) -> None:
    """Experts really moved: with them in order the new model has the loads that the plan gives the
    old one, device by device and layer by layer."""
    from transformers import AutoModelForCausalLM

    from paceline import attach
    from paceline.shipped import MODEL_FOLDER

    rng = torch.Generator().manual_seed(0)
    placements = tuple(
        ExpertPlacement.explicit([d // 4 for d in torch.randperm(32, generator=rng).tolist()])
        for _ in range(4)
    )
    assert RUN.invoke(app, planned(tmp_path, Plan(placements=placements))).exit_code == 0
    ids = torch.randint(0, 1000, (2, 200), generator=rng)
    loads = []
    for folder, placement in ((MODEL_FOLDER, placements), (tmp_path / "out", 8)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with attach(model, placement=placement) as pace, torch.no_grad():
            model(ids)
            loads.append([layer.device_loads_before for layer in pace.stats().layers])
    assert loads[0] == loads[1]
    assert len(set(loads[0][0])) > 1


def test_the_comparison_finds_experts_in_wrong_places(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    RUN.invoke(app, [*planned(tmp_path, Plan(placements=(ROUND,))), "--no-check"])
    from paceline.shipped import MODEL_FOLDER

    out = tmp_path / "out"
    assert model_folder.output_difference(MODEL_FOLDER, out) <= model_folder.TOLERANCE
    tensors = load_file(out / "model.safetensors")
    router = "model.layers.1.mlp.gate.weight"
    tensors[router] = tensors[router].roll(1, 0).contiguous()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    assert model_folder.output_difference(MODEL_FOLDER, out) > 100 * model_folder.TOLERANCE


def test_a_difference_removes_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folder, "_output", lambda *_: torch.rand(4))
    ran = RUN.invoke(app, planned(tmp_path, Plan(placements=(ROUND,))))
    assert ran.exit_code == 2
    assert "can't be reordered" in ran.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(), "no placements"),
        (Plan(placements=(ROUND,), layers=3), "for 3 MoE layers"),
        (Plan(placements=(ROUND, ROUND)), "for 2 MoE layers"),
        (Plan(placements=(ExpertPlacement.explicit([0, 1] * 8),)), "places 16 experts"),
        (
            Plan(placements=(ExpertPlacement.explicit([0] * 31 + [1]),)),
            "experts per device must be",
        ),
    ],
)
def test_plans_that_do_not_fit(plan: Plan, said: str, tmp_path: Path) -> None:
    ran = RUN.invoke(app, planned(tmp_path, plan))
    assert ran.exit_code == 2
    assert said in ran.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model", ["./nowhere", __file__])
def test_models_that_are_none(model: str, tmp_path: Path) -> None:
    arguments = planned(tmp_path, Plan(placements=(ROUND,)))
    arguments[1] = model
    ran = RUN.invoke(app, arguments)
    assert ran.exit_code == 2
    assert model in ran.stderr
