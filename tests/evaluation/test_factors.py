"""`paceline tune --only factors`: layers capped alone, and a plan whose bound holds by counting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from paceline import CapacityPolicy, attach
from paceline.batches import Sampling, make_batches
from paceline.cli.app import app
from paceline.demo.assets import load_calibration, read_text
from paceline.evaluation.sensitivity import RATIOS, measure_layers
from paceline.plan import Plan
from paceline.shipped import CALIBRATION_FOLDER

TEXTS = ("prose", "german")
SMALL = ("--tokens", "512", "--batch-size", "2", "--sequence-length", "128")
BASE = "capacity_factor=0.75,compensate=true"
FACTORS = ("--only", "factors")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The plan's file, and what the verb says of it."""
    out = tmp_path_factory.mktemp("factors")
    texts = [part for name in TEXTS for part in ("--text", name)]
    arguments = [
        "tune",
        "demo",
        *FACTORS,
        "--policy",
        BASE,
        "--calibration",
        "demo",
        *texts,
        *SMALL,
    ]
    ran = CliRunner().invoke(app, [*arguments, "--out", str(out), "--json"])
    assert ran.exit_code == 0, ran.output
    return out / "plan.toml", json.loads(ran.stdout)


def logits_of(model: Any, ids: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = model(input_ids=ids, use_cache=False).logits.double().numpy()
    return found


def test_losses_are_divergences_from_the_model_without_a_cap(
    demo: tuple[Any, Any], written: tuple[Path, dict[str, Any]]
) -> None:
    """Of two layers at two factors, by NumPy; the other layers are not capped."""
    model, tokenizer = demo
    result = written[1]
    sampling = Sampling(512, 2, 128)
    batches, _ = make_batches(tokenizer, {name: read_text(name) for name in TEXTS}, sampling)
    assert result["factors"] == pytest.approx([0.75 * ratio for ratio in RATIOS])
    for layer, at in ((1, 1), (3, 4)):
        total = 0.0
        policies: list[CapacityPolicy | None] = [None] * 4
        policies[layer] = CapacityPolicy(capacity_factor=0.75 * RATIOS[at], compensate=True)
        for batch in batches:
            base = logits_of(model, batch.ids)
            with attach(model, policies, 8, calibration=load_calibration()):
                other = logits_of(model, batch.ids)
            for each in (base, other):
                each -= each.max(-1, keepdims=True)
                each -= np.log(np.exp(each).sum(-1, keepdims=True))
            total += float((np.exp(base) * (base - other)).sum())
        assert total > 0
        assert result["layers"][layer]["losses"][at] == pytest.approx(total / 512, rel=1e-3)


def test_the_plan_gives_each_layer_its_own_and_keeps_the_bound(
    demo: tuple[Any, Any], written: tuple[Path, dict[str, Any]]
) -> None:
    """On another text, by counting: the mean over layers of the busiest device's rows."""
    out, result = written
    plan = Plan.load(out)
    factors = [policy.capacity_factor or 0.0 for policy in plan.policies]
    assert factors == [layer["factor"] for layer in result["layers"]]
    assert len(set(factors)) > 1
    assert np.mean(factors) <= 0.75
    assert {policy.replace(capacity_factor=0.75) for policy in plan.policies} == {
        CapacityPolicy.parse(BASE)
    }
    folder = plan.calibration_folder()
    assert folder is not None
    assert folder.resolve() == CALIBRATION_FOLDER.resolve()
    together = sum(layer["at_factor"] for layer in result["layers"])
    assert together < sum(layer["at_bound"] for layer in result["layers"])
    model, tokenizer = demo
    ids = torch.tensor(tokenizer(read_text("json"))["input_ids"][:1024]).view(8, 128)
    counts: dict[str, torch.Tensor] = {}
    with attach(model, plan=plan) as pace, torch.no_grad():
        pace.watch(
            lambda name, _, found: counts.update(
                {name: torch.bincount(found.topk_ids[found.kept] // 4, minlength=8)}
            )
        )
        model(input_ids=ids)
    busiest = [int(loads.max()) for loads in counts.values()]
    mean = 1024 * 4 / 8
    allowed = [int(np.ceil(factor * mean - 1e-9)) for factor in factors]
    assert all(rows <= most for rows, most in zip(busiest, allowed, strict=True))
    assert sum(rows == most for rows, most in zip(busiest, allowed, strict=True)) >= 2
    assert sum(busiest) / 4 / mean <= 0.75 + 1 / mean


@pytest.mark.filterwarnings("ignore:the cap of")
def test_a_cap_that_never_applies_is_an_error(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    policy = CapacityPolicy(capacity_factor=1)
    with pytest.raises(ValueError, match="never applied: batches of 16 tokens are too small"):
        measure_layers(
            model,
            tokenizer,
            {"prose": read_text("prose")},
            policy,
            plan=Plan(placements=(8,)),
            sampling=Sampling(16, 1, 16),
        )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policy", "unit=expert"), "has no capacity_factor to share out"),
        (("--policy", "capacity_factor=1,mode=shadow"), "caps nothing: allowed is mode=enforce"),
        (("--policy", "capacity_factor=-1"), "capacity_factor='-1' is not allowed"),
        (("--policy", BASE), "compensate=true needs a calibration"),
        (("--policy", BASE, "--calibration", "/nowhere"), "there is no calibration in /nowhere"),
        (("--policy", BASE, "--text", "/nowhere.txt"), "/nowhere.txt can't be read"),
        (("--policy", BASE, "--devices", "0"), "--devices must be at least 1, got 0"),
        (("--policy", BASE, "--plan", "/nowhere.toml"), "/nowhere.toml can't be read"),
        (("--policy", BASE, "--bound", "0.5"), "must have the same factor"),
        (("--policy", BASE, "--policy", BASE), "must be given once"),
        ((), "--only factors needs --bound"),
        (("--policy", BASE, "--out", __file__), "must be a folder"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    out = () if "--out" in arguments else ("--out", str(tmp_path / "out"))
    ran = CliRunner().invoke(app, ["tune", "demo", *FACTORS, *SMALL, *arguments, *out])
    assert ran.exit_code == 2, ran.output
    assert said in ran.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists()
    assert "Traceback" not in ran.output
