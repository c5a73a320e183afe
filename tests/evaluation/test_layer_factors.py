"""Factors by layer: layers capped alone, the best factors under a bound, a plan that keeps it."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from paceline import CapacityPolicy, attach
from paceline.batches import Sampling, make_batches
from paceline.cli.app import app
from paceline.demo.assets import load_calibration, read_text
from paceline.evaluation.layer_factors import (
    RATIOS,
    STEP,
    Sensitivity,
    measure_layers,
    share_bound,
)
from paceline.plan import Plan
from paceline.shipped import CALIBRATION_FOLDER

TEXTS = ("prose",)
SMALL = ("--tokens", "256", "--batch-size", "2", "--sequence-length", "128")
BASE = "capacity_factor=0.75,compensate=true"
FACTORS = ("--only", "factors")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The plan's file, and what the verb says of it."""
    out = tmp_path_factory.mktemp("factors")
    texts = [part for name in TEXTS for part in ("--text", name)]
    arguments = ["tune", "demo", *FACTORS, "--policy", BASE, *texts, *SMALL]
    arguments += ["--calibration", "demo", "--out", str(out), "--json"]
    ran = CliRunner().invoke(app, arguments)
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
    sampling = Sampling(256, 2, 128)
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
        assert result["layers"][layer]["losses"][at] == pytest.approx(total / 256, rel=1e-3)


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
        (("--policy", "capacity_factor=1,mode=shadow"), "mode must be enforce"),
        (("--policy", "capacity_factor=-1"), "capacity_factor must be a number > 0"),
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


# -- factors under a bound, from any losses --------------------------------------------------------

MEASURED = (0.5, 0.62, 0.7, 0.9)
POINTS = [0.5 + STEP * step for step in range(41)]


def loss(curve: tuple[float, ...], at: float) -> float:
    """The square of what is linear between the roots."""
    for (low, one), (high, two) in itertools.pairwise(zip(MEASURED, curve, strict=True)):
        if at <= high + 1e-12:
            share = (at - low) / (high - low)
            return ((1 - share) * math.sqrt(one) + share * math.sqrt(two)) ** 2
    return curve[-1]


@st.composite
def convex(draw: st.DrawFn) -> tuple[float, ...]:
    """Losses whose roots fall ever more slowly."""
    slopes = sorted(draw(st.lists(st.floats(0, 10), min_size=3, max_size=3)))
    root = [draw(st.floats(0, 1))]
    for slope, (low, high) in zip(slopes, reversed([*itertools.pairwise(MEASURED)]), strict=True):
        root.append(root[-1] + slope * (high - low))
    return tuple(value**2 for value in reversed(root))


@given(st.lists(convex(), min_size=2, max_size=2), st.integers(0, 40))
def test_no_other_factors_cost_less(curves: list[tuple[float, ...]], steps: int) -> None:
    """Every pair of factors that fits is tried."""
    bound = 0.5 + STEP * steps
    found = share_bound(MEASURED, curves, bound)
    got = sum(loss(curve, min(at, 0.9)) for curve, at in zip(curves, found, strict=True))
    table = [[loss(curve, at) for at in POINTS] for curve in curves]
    best = min(
        table[0][i] + table[1][j] for i, j in itertools.product(range(41), repeat=2)
        if i + j <= 2 * steps
    )  # fmt: skip
    assert got == pytest.approx(best, rel=1e-6, abs=1e-9)


curve = st.lists(st.floats(0, 100), min_size=4, max_size=4)


@given(
    st.lists(st.tuples(curve, st.floats(0.01, 100)), min_size=1, max_size=12), st.floats(0.5, 3.0)
)
def test_the_bound_is_used_up_and_never_exceeded(
    layers: list[tuple[list[float], float]], bound: float
) -> None:
    """Whatever the curves are, rising ones too, and what layers weigh."""
    curves, weights = [c for c, _ in layers], [w for _, w in layers]
    found = share_bound(MEASURED, curves, bound, weights)
    assert min(found) >= 0.5
    mean = np.average(found, weights=weights)
    assert mean == pytest.approx(bound, rel=1e-9)
    names = tuple(str(index) for index in range(len(layers)))
    measured = Sensitivity(names, MEASURED, tuple(map(tuple, curves)), tuple(weights), 1)
    assume(bound < 2.9)
    policies = measured.share(CapacityPolicy(capacity_factor=bound, unit="expert"))
    rounded = [policy.capacity_factor or math.inf for policy in policies]
    assert bound - 1e-3 < np.average(rounded, weights=weights) <= bound + 1e-9
    assert {policy.unit for policy in policies} == {"expert"}


def test_a_heavy_layer_gets_less_for_the_same_loss() -> None:
    curves = [[4.0, 2.56, 1.96, 0.36]] * 2
    light, heavy = share_bound(MEASURED, curves, 0.7, [1.0, 3.0])
    assert light > 0.7 > heavy


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (((0.5,), [[1.0]], 1.0), "factors"),
        (((0.5, 0.4), [[1.0, 0.0]], 1.0), "factors"),
        (((0.0, 0.4), [[1.0, 0.0]], 1.0), "factors"),
        (((0.5, 0.6), [[1.0]], 1.0), r"losses must be \[layers, 2\], got shape \[1, 1\]"),
        (((0.5, 0.6), [[math.nan, 0.0]], 1.0), "losses"),
        (((0.5, 0.6), [[-1.0, 0.0]], 1.0), "losses"),
        (((0.5, 0.6), [[1.0, 0.0]], 0.4), r"bound must be at least 0.5, got 0.4"),
        (((0.5, 0.6), [[1.0, 0.0]], math.nan), "bound"),
        (((0.5, 0.6), [[1.0, 0.0]], 1.0, [0.0]), "weights"),
        (((0.5, 0.6), [[1.0, 0.0]], 1.0, [1.0, 1.0]), "weights"),
    ],
)
def test_bad_arguments_of_shares_are_named(arguments: tuple[object, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        share_bound(*arguments)  # type: ignore[arg-type]
