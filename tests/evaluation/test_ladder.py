"""The ladder of `paceline tune`: texts split once, rungs judged on the last part, a plan."""

from __future__ import annotations

import functools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import OlmoeConfig, OlmoeForCausalLM
from typer.testing import CliRunner

from paceline import CapacityPolicy, Plan, attach
from paceline.analysis.hardware import Hardware, save_hardware
from paceline.batches import Sampling, make_batches
from paceline.cli.app import app
from paceline.demo.assets import read_text
from paceline.evaluation import perplexity
from paceline.evaluation.ladder import (
    BOUNDS,
    FACTORS,
    SHARES,
    SURE,
    Rung,
    choose_rung,
    gains_of,
    split_texts,
)
from paceline.evaluation.sweep_results import CostByText
from paceline.shipped import MODEL_FOLDER

SMALL = (
    *("--text", "prose", "--text", "german", "--tokens", "2048", "--batch-size", "2"),
    *("--sequence-length", "128", "--rank", "2", "--devices", "8"),
)
TIGHTEST = "--loss", "50%", "--hardware", "rows.json"
ROWS = Hardware(  # nothing but rows takes time
    "rows", flops=1e6, memory=1e15, memory_size=8e10, link=1e15, network=1e15, launch=0, exchange=0,
    tile=1,
)  # fmt: skip


def tune(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["tune", "demo", *map(str, arguments)])


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder, and what the verb says of it."""
    out = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out.parent)
        save_hardware(ROWS, Path("rows.json"))
        ran = tune(*SMALL, *TIGHTEST, "--out", out, "--json")
    assert ran.exit_code == 0, ran.output
    return out, json.loads(ran.stdout)


# -- the split -------------------------------------------------------------------------------------


@given(st.dictionaries(st.text(min_size=1), st.text(alphabet="ab \n", max_size=300), min_size=1))
def test_a_text_is_split_into_parts_that_are_all_of_it(texts: dict[str, str]) -> None:
    parts, spans = split_texts(texts)
    for name, text in texts.items():
        assert "".join(parts[purpose][name] for purpose in SHARES) == text
        ends = [spans[name][purpose] for purpose in SHARES]
        assert ends[0][0] == 0
        assert ends[-1][1] == len(text)
        for purpose, (start, end) in zip(SHARES, ends, strict=True):
            assert parts[purpose][name] == text[start:end]


def test_nothing_is_judged_on_text_that_it_was_fitted_to(
    tuned: tuple[Path, dict[str, Any]], demo: tuple[Any, Any]
) -> None:
    """The split is in the file, its parts don't overlap, and the parts have the tokens named."""
    _, ladder = tuned
    for name, spans in ladder["split"].items():
        assert list(spans) == list(SHARES)
        (_, fit), (choose, chosen), (judge, end) = spans.values()
        assert fit == choose < chosen == judge < end == len(read_text(name))
    sampling = Sampling(round(2048 * 0.5625), 2, 128)
    parts = {n: read_text(n)[slice(*s["judge"])] for n, s in ladder["split"].items()}
    _, tokens = make_batches(demo[1], parts, sampling)
    assert ladder["tokens"]["judge"] == sum(tokens.values())


# -- rungs -----------------------------------------------------------------------------------------


def test_a_rung_costs_what_the_plan_costs_on_the_last_part(
    tuned: tuple[Path, dict[str, Any]], demo: tuple[Any, Any]
) -> None:
    """Measured again by hand: the model with the plan's file, on the part that is judged on."""
    out, ladder = tuned
    model, tokenizer = demo
    (rung,) = (each for each in ladder["rungs"] if each["bound"] == ladder["chosen"])
    plan = Plan.load(out / "plan.toml")
    assert [str(policy) for policy in plan.policies] == rung["policies"]
    sampling = Sampling(round(2048 * 0.5625), 2, 128)
    changes = []
    for name, spans in ladder["split"].items():
        part = {name: read_text(name)[slice(*spans["judge"])]}
        batches, _ = make_batches(tokenizer, part, Sampling(sampling.tokens // 2, 2, 128))
        sums = []
        for policies in (None, plan.policies):
            with attach(model, plan=plan) as pace, torch.no_grad():
                pace.policy = policies
                sums.append(sum(
                    float(torch.nn.functional.cross_entropy(
                        model(batch.ids).logits[:, :-1].flatten(0, 1),
                        batch.ids[:, 1:].flatten(), reduction="sum",
                    )) for batch in batches
                ))  # fmt: skip
        predicted = sum(batch.ids[:, 1:].numel() for batch in batches)
        changes.append(math.exp((sums[1] - sums[0]) / predicted) - 1)
        assert changes[-1] == pytest.approx(rung["by_text"][name], abs=1e-5)
    assert rung["change"] == pytest.approx(np.mean(changes), abs=1e-5)
    assert rung["at_most"] == pytest.approx(rung["change"] + SURE * rung["standard_error"])


def test_every_rung_keeps_its_bound(tuned: tuple[Path, dict[str, Any]]) -> None:
    out, ladder = tuned
    assert [rung["bound"] for rung in ladder["rungs"]] == list(BOUNDS)
    for rung in ladder["rungs"]:
        policies = [CapacityPolicy.parse(text) for text in rung["policies"]]
        factors = [policy.capacity_factor or 0 for policy in policies]
        assert np.mean(factors) <= rung["bound"] + 1e-9
        assert min(factors) >= FACTORS[0]
        assert {(policy.keep, policy.compensate) for policy in policies} == {("contribution", True)}
        # ceilings of capacities: a device of batches of 256 tokens has 128 places at the mean
        assert rung["device_peak_to_mean"] <= rung["bound"] + 1 / 128
        # per token a router of 192 x 32, and four experts of three matrices of 192 x 64 per token
        before, after = (
            2 * 192 * 32 + 4 * 2 * 3 * 192 * 64 * each["device_peak_to_mean"]
            for each in (ladder["baseline"], rung)
        )
        assert rung["speedup"] == pytest.approx(before / after, rel=1e-3)
    assert ladder["in_order"] > ladder["baseline"]["device_peak_to_mean"] > 1
    page = (out / "ladder.html").read_text(encoding="utf-8")
    assert ladder["verdict"][-1] in page
    for name in ("calibration.safetensors", "plan.toml", "ladder.json", "ladder.html"):
        assert (out / name).stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "calibration.safetensors", "ladder.html", "ladder.json", "plan.toml",
    ]  # fmt: skip


@pytest.mark.full
def test_a_run_that_was_stopped_goes_on(
    tuned: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while the rungs are judged; then nothing is computed again, and all is the same."""
    judge, calls = perplexity.at_once, 0
    monkeypatch.chdir(tmp_path)
    save_hardware(ROWS, Path("rows.json"))

    @functools.wraps(judge)
    def stopped(pace: Any, model: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise KeyboardInterrupt
        return judge(pace, model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(perplexity, "at_once", stopped)
        ran = tune(*SMALL, *TIGHTEST, "--out", tmp_path / "out", "--json")
    assert ran.exit_code == 130
    assert "the same command goes on" in ran.stderr
    assert not (tmp_path / "out" / "plan.toml").exists()
    left = 0

    @functools.wraps(judge)
    def counted(pace: Any, model: Any, batch: Any) -> Any:
        nonlocal left
        left += 1
        return judge(pace, model, batch)

    monkeypatch.setattr(perplexity, "at_once", counted)
    assert (tmp_path / "out" / "unfinished").exists()
    ran = tune(*SMALL, *TIGHTEST, "--out", tmp_path / "out", "--json")
    assert ran.exit_code == 0, ran.output
    assert "4 layers had been fitted before: going on" in ran.stderr
    batches = 2 * math.ceil(2048 * 0.5625 // 2 // 128 / 2)
    assert left == (1 + len(BOUNDS)) * batches - 19
    assert json.loads(ran.stdout)["rungs"] == tuned[1]["rungs"]
    ran = tune(*SMALL, "--out", tmp_path / "out")
    assert ran.exit_code == 2
    assert "exists: give another, or --force" in ran.output


def test_an_earlier_fit_is_judged_again_without_another(
    tuned: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.calibration.collect.fit_layer", None)  # would be called
    out, ladder = tuned
    ran = tune(
        *SMALL[:-4], "--plan", out / "plan.toml", "--bound", "1", "--out", tmp_path, "--json"
    )
    assert ran.exit_code == 0, ran.output
    (again,) = json.loads(ran.stdout)["rungs"]
    (before,) = (rung for rung in ladder["rungs"] if rung["bound"] == 1)
    assert again["policies"] == before["policies"]
    assert again["change"] == before["change"]
    plan = Plan.load(tmp_path / "plan.toml")
    assert plan.placements == Plan.load(out / "plan.toml").placements
    assert str(plan.calibration_folder().resolve()) == str(out.resolve())  # type: ignore[union-attr]


# -- the choice ------------------------------------------------------------------------------------


def rungs(*costs: tuple[float, float, float]) -> tuple[CostByText, list[Rung]]:
    """The cost of no policy, and rungs of a busiest device, a change and its error."""
    made = [
        Rung(
            change=change, standard_error=error, changed_next_tokens=0, dropped_share=0.1,
            device_peak_to_mean=busiest, by_text={"a": change}, bound=busiest, policies=[],
            at_most=change + SURE * error, speedup=None,
        )
        for busiest, change, error in ((1.6, 0.0, 0.0), *costs)
    ]  # fmt: skip
    return made[0], made[1:]


@pytest.mark.parametrize(
    ("costs", "loss", "chosen", "said"),
    [
        ([(1.25, 0.001, 1e-4), (1.0, 0.002, 5e-4), (0.5, 0.02, 1e-3)], 0.003, 1.0, "for sure"),
        # below the bound, but not for sure
        ([(1.25, 0.001, 1e-4), (1.0, 0.002, 7e-4), (0.5, 0.02, 1e-3)], 0.003, 1.25, "for sure"),
        ([(1.25, 0.001, 2e-3)], 0.002, None, "Too little text to tell: .* about 10.8 times"),
        ([(1.25, 0.02, 1e-3), (1.0, 0.04, 1e-3)], 0.003, None, "costs least, 1.25, costs"),
        ([(1.59, 0.0, 1e-3), (1.58, 0.0, 1e-3)], 0.003, None, "no rung gains 2%"),
        ([(1.25, 0.001, 1e-4), (1.0, 0.002, 5e-4), (0.5, 0.1, 1e-3)], None, 1.0, "the knee"),
        ([(1.5, 0.05, 1e-4), (1.4, 0.06, 5e-4), (1.3, 0.07, 1e-3)], None, None, "loses more than"),
    ],
)
def test_which_rung_is_chosen(
    costs: list[tuple[float, float, float]], loss: float | None, chosen: float | None, said: str
) -> None:
    import re

    baseline, made = rungs(*costs)
    found, reason = choose_rung(made, gains_of(baseline, made), loss, "balanced")
    assert (None if found is None else found.bound) == chosen
    assert re.search(said, reason), reason


def test_an_untrained_model_gets_no_rung(tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    config = OlmoeConfig.from_pretrained(MODEL_FOLDER, num_hidden_layers=1)
    OlmoeForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_FOLDER / name, folder)
    text = tmp_path / "a.txt"
    text.write_text(read_text("prose")[:40_000])
    small = "--tokens", "2048", "--sequence-length", "128", "--rank", "1"
    made = [str(folder), "--text", str(text), *small, "--devices", "4", "--out", str(out), "--json"]
    ran = CliRunner().invoke(app, ["tune", *made])
    assert ran.exit_code == 0, ran.output
    ladder = json.loads(ran.stdout)
    assert ladder["chosen"] is None
    assert "the model looks untrained" in ladder["verdict"][0]
    plan = Plan.load(out / "plan.toml")  # placements and stand-ins alone
    assert (plan.policies, len(plan.placements)) == ((), 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--loss", "0.3"], "--loss must be a percentage of perplexity such as 0.3%, got 0.3."),
        (["--loss", "0.3%", "--only", "stand-ins"], "--loss is not for --only stand-ins."),
        (["--hardware", "h100", "--only", "factors", "--bound", "1"], "is not for --only factors"),
        (["--policy", "capacity_factor=1"], "--policy capacity_factor=1 must have no factor"),
        (["--hardware", "nonsense"], "nonsense"),
        (["--bound", "0.1"], "--bound must be 0.2 to 2.2, got 0.1"),
        (["--decode", "--policy", "pool=request"], 'pool must be "batch" or "source"'),
        (["--decode", "--devices", "32"], "got 32 devices for 32 experts"),
        (["--decode", "--only", "factors", "--bound", "1"], "--decode is not for --only factors"),
        (["--plan", "plan.toml", "--only", "placement"], "--plan is not for --only placement"),
        (["--trace", "sample:esft_v2lite_law"], "--trace must be of 4 layers of 32 experts, got"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    ran = tune(*SMALL, *arguments, "--out", tmp_path / "out")
    assert ran.exit_code == 2, ran.output
    assert said in ran.stderr
