"""`paceline tune --decode` and `--only placement`, and what a decode step is judged by."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from row_counter import RowCounter
from typer.testing import CliRunner

from paceline import CapacityPolicy, Plan, attach
from paceline.batches import Batch, Sampling, make_batches
from paceline.cli.app import app
from paceline.demo.assets import read_text
from paceline.evaluation.decode_ladder import experts_allowed, step_by_step

SMALL = (
    *("--text", "prose", "--text", "german", "--tokens", "2048", "--batch-size", "4"),
    *("--sequence-length", "64", "--devices", "8"),
)


def tune(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["tune", "demo", *map(str, arguments)])


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder, and the ladder."""
    out = tmp_path_factory.mktemp("tuned")
    ran = tune(*SMALL, "--rank", "2", "--bound", "1", "--decode", "--out", out, "--json")
    assert ran.exit_code == 0, ran.output
    return out, json.loads(ran.stdout)


@pytest.fixture(scope="module")
def batch(demo: tuple[Any, Any]) -> Batch:
    batches, _ = make_batches(demo[1], {"a": read_text("prose")}, Sampling(256, 4, 64))
    return batches[0]


def test_steps_without_a_policy_are_one_forward(demo: tuple[Any, Any], batch: Batch) -> None:
    """Through the cache, token by token: the losses of one forward over the same positions."""
    model, _ = demo
    with attach(model) as pace:
        losses, greedy = step_by_step(pace, model, batch)
        steps = pace.stats().layers[0].forwards
    assert steps == 31
    with torch.no_grad():
        logits = model(input_ids=batch.ids).logits[:, 32:-1]
    found = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), batch.ids[:, 33:], reduction="none"
    )
    assert losses == pytest.approx(found.sum(1).tolist(), rel=1e-4)
    assert greedy == logits.argmax(-1).tolist()


@pytest.mark.parametrize("most", [1, 3])
def test_max_active_holds_in_every_step_and_not_in_prompts(
    demo: tuple[Any, Any], batch: Batch, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where experts are computed, by a counter that knows nothing of Paceline."""
    model, _ = demo
    read: dict[str, list[int]] = {"prompts": [], "steps": []}
    forward = model.forward

    @functools.wraps(forward)
    def counting(*args: Any, **kwargs: Any) -> Any:
        counter = RowCounter(model)
        with counter:
            out = forward(*args, **kwargs)
        when = "steps" if kwargs["input_ids"].shape[1] == 1 else "prompts"
        for name in counter._counts:
            used = (counter.rows(name) > 0).numpy()
            read[when].append(int(used.reshape(8, 4).sum(1).max()))
        return out

    with attach(model, placement=8) as pace, monkeypatch.context() as patch:
        pace.policy = CapacityPolicy(max_active=most)
        patch.setattr(model, "forward", counting)
        step_by_step(pace, model, batch)
    assert (len(read["prompts"]), len(read["steps"])) == (4, 4 * 31)
    assert max(read["prompts"]) == 4
    assert max(read["steps"]) == most


def test_a_rung_costs_what_the_steps_cost(
    tuned: tuple[Path, dict[str, Any]], demo: tuple[Any, Any]
) -> None:
    """Measured again by hand on the part that is judged on, with the plan's stand-ins."""
    out, ladder = tuned
    model, tokenizer = demo
    decode = ladder["decode"]
    plan = Plan.load(out / "plan.toml")
    parts = {n: read_text(n)[slice(*s["judge"])] for n, s in ladder["split"].items()}
    batches, tokens = make_batches(tokenizer, parts, Sampling(1152, 4, 64, mix=True))
    assert decode["tokens"] == sum(tokens.values()) // 2
    assert decode["sequences"] == 4
    (rung,) = (each for each in decode["rungs"] if each["bound"] == 2)
    sums: dict[str, list[float]] = {"none": [], "two": []}
    read, sources = [], []
    with attach(model, plan=plan) as pace:
        for each in batches:
            sources += each.sources
            for name, policy in {
                "none": None, "two": CapacityPolicy.parse(rung["policies"][0])
            }.items():  # fmt: skip
                pace.policy = policy
                sums[name] += step_by_step(pace, model, each)[0]
            read += [layer.most_active_experts_after for layer in pace.stats().layers]
    chosen = np.array(sources)
    changes = {
        name: math.exp(
            (np.array(sums["two"])[chosen == name] - np.array(sums["none"])[chosen == name]).sum()
            / (31 * (chosen == name).sum())
        ) - 1
        for name in parts
    }  # fmt: skip
    assert rung["by_text"] == pytest.approx(changes, abs=1e-5)
    assert rung["experts_read"] == pytest.approx(np.mean(read))
    assert rung["speedup"] == pytest.approx(decode["experts_read"] / rung["experts_read"])


def test_the_choice_is_in_the_plan_and_in_every_rung(tuned: tuple[Path, dict[str, Any]]) -> None:
    out, ladder = tuned
    decode = ladder["decode"]
    assert [rung["bound"] for rung in decode["rungs"]] == [3, 2, 1]
    assert decode["chosen"] in (1, 2, 3)  # the knee: one that pays
    plan = Plan.load(out / "plan.toml")
    assert {policy.max_active for policy in plan.policies} == {decode["chosen"]}
    assert [str(policy) for policy in plan.policies] == ladder["rungs"][0]["policies"]
    assert {policy.capacity_factor is None for policy in plan.policies} == {False}
    assert decode["together"] is not None
    page = (out / "ladder.html").read_text(encoding="utf-8")
    assert 'id="decode"' in page
    assert decode["verdict"][-1] in page


def test_values_to_try_are_below_what_a_device_hosts() -> None:
    for hosted in range(1, 300):
        found = experts_allowed(hosted)
        assert found == sorted(set(found), reverse=True)
        assert all(1 <= most < hosted for most in found)
        assert bool(found) == (hosted > 1)


# -- the placement alone ---------------------------------------------------------------------------


@pytest.mark.parametrize("traffic", ["texts", "trace"])
def test_only_placement_writes_the_plan_of_the_traffic(tmp_path: Path, traffic: str) -> None:
    """The same placements as recording the texts and planning with the trace."""
    trace, out = tmp_path / "trace", tmp_path / "out"
    texts = SMALL[: SMALL.index("--devices")]
    runner = CliRunner()
    ran = runner.invoke(app, ["record", "demo", *texts, "--out", str(trace), "--content", "counts"])
    assert ran.exit_code == 0, ran.output
    made = [str(trace), "--devices", "8", "--place-only", "--out", str(tmp_path / "plan.toml")]
    assert runner.invoke(app, ["plan", *made]).exit_code == 0
    more = ("--trace", trace) if traffic == "trace" else ()
    ran = tune(*SMALL, *more, "--only", "placement", "--out", out, "--json")
    assert ran.exit_code == 0, ran.output
    assert [path.name for path in out.iterdir()] == ["plan.toml"]
    plan = Plan.load(out / "plan.toml")
    assert plan.placements == Plan.load(tmp_path / "plan.toml").placements
    assert (plan.policies, plan.calibration) == ((), None)
    assert json.loads(ran.stdout)["devices"] == 8
    again = tune(*SMALL, "--only", "placement", "--out", out)
    assert again.exit_code == 2
    assert "--force" in again.stderr
