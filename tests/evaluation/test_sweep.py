"""`paceline eval --grid`: every combination once, its frontier, and what is shown of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.evaluation.run import FACTORS, Axes
from paceline.evaluation.sweep_results import Cost, on_frontier, read_sweep
from paceline.reporting.quality_figures import sweep_figure, sweep_table, sweep_words

SMALL = ["--tokens", "512", "--sequence-length", "64", "--batch-size", "4"]


def _run(*arguments: str) -> Any:
    return CliRunner().invoke(
        app, ["eval", "demo", "--grid", "--text", "prose", *SMALL, *arguments]
    )


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=20))
def test_the_frontier_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    best = {
        i for i, best in enumerate(on_frontier([_cost(1 + x / 9, y) for x, y in points])) if best
    }

    def beaten(index: int) -> bool:
        x, y = points[index]
        return any(
            a <= x and b <= y and ((a, b) != (x, y) or other < index)
            for other, (a, b) in enumerate(points)
            if other != index
        )

    assert best == {index for index in range(len(points)) if not beaten(index)}


def _cost(busiest: float, change: float, error: float | None = None) -> Cost:
    return Cost(
        change=change, standard_error=error, changed_next_tokens=0, dropped_share=0,
        device_peak_to_mean=busiest,
    )  # fmt: skip


def test_a_frontier_knows_errors() -> None:
    """Neither a hair less load nor a difference within its error makes a best choice."""
    dear, cheap = _cost(0.50, 0.323, 0.004), _cost(0.503, 0.0565, 0.002)
    assert on_frontier([dear, cheap]) == [False, True]
    one, other = _cost(1.0, 0.010, 0.002), _cost(1.0, 0.012, 0.002)
    assert on_frontier([one, other]) == [True, True]
    assert on_frontier([one, _cost(1.0, 0.018, 0.002)]) == [True, False]
    assert on_frontier([one, _cost(1.1, 0.010, 0.002)]) == [True, False]


def test_every_combination_is_a_policy_once() -> None:
    axes = Axes(compensates=(False, True))
    policies = [policy for _, policy in axes.policies()]
    assert len(set(policies)) == len(policies) == len(FACTORS) * 2 * 2 * 2 * 2
    assert {policy.capacity_factor for policy in policies} == set(FACTORS)
    assert FACTORS[0] == 3
    assert math.ceil(FACTORS[-1] * 10**6) == 1  # the smallest leaves a unit one assignment


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a sweep, and its JSON on the terminal."""
    out = tmp_path_factory.mktemp("sweep") / "swept"
    ran = _run("--factors", "3,1,0.5,0", "--keeps", "score", "--out", str(out), "--json")
    assert ran.exit_code == 0, ran.output
    return out, json.loads(ran.stdout)


def test_a_sweep_its_table_and_its_page(swept: tuple[Path, Any]) -> None:
    out, found = swept
    points = found["points"]
    assert len(points) == 4 * 2 * 2
    by_kind = {
        (p["unit"], p["expand"], p["capacity_factor"]): p for p in points if p["keep"] == "score"
    }
    for size in (1.0, 0.5):
        exact = by_kind["device", None, size]
        assert exact["device_peak_to_mean"] == pytest.approx(size, abs=0.02)
        # what other devices leave free can't be more than what was cut from the busiest
        assert exact["dropped_share"] >= 1 - size - 1e-9
    assert by_kind["device", None, 1e-9]["dropped_share"] > 0.95
    costs = [by_kind["device", None, size]["change"] for size in (3.0, 1.0, 0.5, 1e-9)]
    assert costs == sorted(costs)
    assert by_kind["expert", None, 1.0]["change"] > by_kind["device", None, 1.0]["change"]
    marked = {i for i, p in enumerate(points) if p["on_frontier"]}
    assert 2 <= len(marked) < len(points)
    rows = sweep_table(found).splitlines()
    assert sum(row.startswith("| **") for row in rows) == len(marked)
    assert sum(row.startswith("| ") for row in rows) == len(points) + 2
    figure = sweep_figure(found)
    *lines, best = figure["data"]
    assert [len(line["x"]) for line in lines] == [4] * 4
    assert len(best["x"]) == len(marked)
    assert best["x"] == sorted(best["x"])
    page = (out / "sweep.html").read_text(encoding="utf-8")
    assert page.count('<tr class="chosen">') == len(marked)
    assert sweep_words(found)[0].split(":")[0] in page
    assert (out / "sweep.json").stat().st_mode & 0o777 == 0o600
    assert json.loads((out / "sweep.json").read_text())["points"] == points


def test_a_report_shows_a_sweep_and_refuses_what_is_none(
    swept: tuple[Path, Any], tmp_path: Path
) -> None:
    file = swept[0] / "sweep.json"
    page = tmp_path / "page.html"
    arguments = ["loads", "sample:gpt_oss_20b_decode", "--html", str(page), "--sweep"]
    ran = CliRunner().invoke(app, [*arguments, str(file)])
    assert ran.exit_code == 0, ran.output
    text = page.read_text(encoding="utf-8")
    assert 'id="sweep"' in text
    assert 'data-for="sweep"' in text
    whole = file.read_text(encoding="utf-8")
    shown = read_sweep(file)
    assert shown.points[0].change == json.loads(whole)["points"][0]["change"]
    for broken, said in (
        (whole[:-40], "the file: "),
        (whole.replace('"on_frontier": true', '"on_frontier": "maybe"', 1), "on_frontier"),
        (whole.replace('"unit": "device"', '"unit": 3', 1), r"points\.\d+\.unit"),
        ("[]", "the file"),
        ("\x00", "the file"),
    ):
        path = tmp_path / "broken.json"
        path.write_text(broken, encoding="utf-8")
        with pytest.raises(ValueError, match=said):
            read_sweep(path)
        ran = CliRunner().invoke(app, [*arguments, str(path)])
        assert ran.exit_code == 2
        assert len(ran.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--factors", "1,x"], "--factors must be numbers >= 0, got 1,x"),
        (["--factors", "-1"], "capacity_factor must be a number > 0"),
        (["--units", "rack"], "unit must be 'device' or 'expert', got 'rack'"),
        (["--keeps", ","], "--keeps must have at least one value, got ','"),
        (
            ["--expands", "far"],
            "expand must be 'own_device', 'visited_devices' or 'all', got 'far'",
        ),
        (["--calibration", "/nowhere"], "/nowhere"),
        (["--out", __file__], "--out must be a folder"),
        (["--policy", "capacity_factor=1"], "can't be combined with --grid"),
        (["--compositions", "solo"], "must be one_text or mixed with --grid"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], said: str) -> None:
    ran = _run(*arguments)
    assert ran.exit_code == 2, ran.output
    (line,) = ran.stderr.strip().splitlines()
    assert said in line
