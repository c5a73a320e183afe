"""The page of a trace: its figures recomputed from the raw arrays, and the page in a browser."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import shutil
import stat
import subprocess
import tempfile
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import paceline.traces
from paceline import CapacityPolicy, ExpertPlacement
from paceline.analysis.cap_study import GAMMAS, cap_study
from paceline.analysis.cost import LayerShape
from paceline.analysis.hardware import PRESETS
from paceline.analysis.placing import PlacementSpec
from paceline.analysis.plan_goal import Goal
from paceline.analysis.planner import make_plan
from paceline.analysis.results import CapStudy
from paceline.analysis.traffic import picked
from paceline.cli.app import app
from paceline.plan import Plan
from paceline.reporting.pages import report_page
from paceline.reporting.trace_figures import plotly_figures, trace_figures, write_figures
from paceline.system_info import system_info
from paceline.traces import sample, save_trace
from paceline.traces.simulate import simulate

LAW = "sample:esft_v2lite_law"
CONFIG = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "moe_intermediate_size": 1408,
    "n_routed_experts": 64, "num_experts_per_tok": 6, "num_hidden_layers": 27,
}  # fmt: skip
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def run(*arguments: str | Path) -> Any:
    """Run `paceline loads` for a page, which goes to a temporary folder unless --html is given."""
    with tempfile.TemporaryDirectory() as folder:
        page = () if "--html" in arguments else ("--html", f"{folder}/page.html")
        return CliRunner().invoke(app, ["loads", *map(str, (*arguments, *page))])


RUN: dict[str, Any] = {"created": "now", "command": "x", "seconds": None} | system_info()


@pytest.fixture(scope="module")
def law() -> CapStudy:
    return cap_study(sample("esft_v2lite_law"), batch_tokens=1024)


@pytest.fixture(scope="module")
def page(law: CapStudy) -> str:
    return report_page(law, None, RUN)


def way_of(result: dict[str, Any], placement: str, unit: str | None, gamma: float | None) -> Any:
    """One of the ways in a study's JSON."""
    (way,) = (
        way
        for way in result["ways"]
        if (way["placement"], way["unit"], way["gamma"]) == (placement, unit, gamma)
    )
    return way


def raw_loads(name: str, batches: range, tokens: int) -> np.ndarray:
    """[batches, layers, experts], counted from the file's ids."""
    folder = Path(paceline.traces.__file__).parent / "sample"
    ids = np.load(folder / f"{name}.npz")["topk_ids"]
    experts = int(ids.max()) + 1
    return np.array(
        [
            [np.bincount(layer[b * tokens : (b + 1) * tokens].ravel(), minlength=experts)
             for layer in ids]
            for b in batches
        ]
    )  # fmt: skip


def test_loads_and_caps_a_device_are_those_of_the_raw_ids(law: CapStudy) -> None:
    loads = raw_loads("esft_v2lite_law", range(2, 4), 1024)  # the second half
    for placement in ("in order", "placed"):
        host = np.array([np.eye(8)[row] for row in law.expert_to_device[placement]])
        devices = np.einsum("ble,led->bld", loads, host)
        for gamma in (None, 1.0, 1.25, 1.5, 2.0):  # 768 rows x gamma is whole
            kept = devices if gamma is None else np.minimum(devices, gamma * 1024 * 6 / 8)
            way = law.way(placement, None if gamma is None else "device", gamma)
            assert way.dropped_share == pytest.approx(1 - kept.sum() / loads.sum())
            busiest = kept.max(2).sum() / (loads.sum() / 8)
            assert way.busiest_device == pytest.approx(busiest)
            for layer, of_layer in enumerate(way.layers):
                assert of_layer.device_loads == kept.sum(0)[layer].tolist()
                peak = kept[:, layer].max(1).sum() / devices[:, layer].mean(1).sum()
                assert of_layer.busiest_device == pytest.approx(peak)


def test_every_way_is_what_simulate_says(law: CapStudy) -> None:
    second = picked(sample("esft_v2lite_law").regrouped(1024), [2, 3])
    placements = {
        name: tuple(ExpertPlacement.explicit(row, 8) for row in rows)
        for name, rows in law.expert_to_device.items()
    }
    assert len(law.ways) == 2 * (1 + 2 * len(GAMMAS))
    plans = {"none": Plan(placements=(8,))}
    for way in law.ways:
        cap = (
            ()
            if way.gamma is None
            else (
                CapacityPolicy(
                    capacity_factor=way.gamma, unit=way.unit, min_expert_load=0, keep="score"
                ),
            )
        )
        plans[str((way.placement, way.unit, way.gamma))] = Plan(cap, placements[way.placement])
    found = simulate(second, plans).plans
    for way in law.ways:
        overall = found[str((way.placement, way.unit, way.gamma))].overall
        for name in ("dropped_share", "gate_mass_lost", "gain", "lost_tokens"):
            assert getattr(way, name) == getattr(overall, name)
        assert way.busiest_device == overall.device_peak_to_mean.mean


def test_sentences_say_the_figures(law: CapStudy) -> None:
    said = " ".join(law.verdict)
    peak = law.way("in order").busiest_device
    placed = law.way("placed").busiest_device
    assert f"{peak:.2f}× the mean" in said
    assert f"{1 - 1 / peak:.0%} of the expert time" in said
    assert f"{1 - placed / peak:.0%} fewer rows" in said
    caps = [w for w in law.ways if w.placement == "in order" and w.unit == "device"]
    best = min((w for w in caps if w.gate_mass_lost <= 0.01), key=lambda w: w.busiest_device)
    assert f"capacity_factor={best.gamma:g} saves the most: {1 - 1 / best.gain:.1%} fewer" in said


def test_one_batch_and_counts_are_told_apart(tmp_path: Path) -> None:
    one = cap_study(sample("esft_v2lite_law"), batch_tokens=4096)
    assert list(one.expert_to_device) == ["in order"]
    assert "This is one batch" in " ".join(one.verdict)

    table = tmp_path / "counts.json"
    counts = raw_loads("esft_v2lite_law", range(1), 4096)[0]
    table.write_text(json.dumps({"logical_count": [counts.tolist()]}), encoding="utf-8")
    result = run(table, "--json", "--html", tmp_path / "page.html")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["keep"] is None
    devices = counts.reshape(6, 8, 8).sum(2)
    assert found["ways"][0]["busiest_device"] == pytest.approx(
        devices.max(1).sum() / devices.mean(1).sum()
    )
    assert 'id="gamma"' not in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.full
def test_counts_of_many_batches_give_what_choices_give(tmp_path: Path) -> None:
    cut = sample("gpt_oss_20b_decode")
    choices = cap_study(cut)
    from paceline.analysis.cap_study import _uncapped
    from paceline.analysis.traffic import Part

    placements = {
        name: [ExpertPlacement.explicit(row, 8) for row in rows]
        for name, rows in choices.expert_to_device.items()
    }
    for way in _uncapped(cut, Part(32, 64), placements):
        of_choices = choices.way(way.placement)
        assert way.busiest_device == pytest.approx(of_choices.busiest_device)
        assert way.gain == pytest.approx(of_choices.gain)
        for mine, theirs in zip(way.layers, of_choices.layers, strict=True):
            assert mine.device_loads == theirs.device_loads
            assert mine.busiest_device == pytest.approx(theirs.busiest_device)


class Elements(HTMLParser):
    """Tags with their attributes; complains about what isn't closed."""

    EMPTY = ("meta", "input", "br", "hr", "link")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_whole_and_asks_nobody(page: str, law: CapStudy) -> None:
    parsed = Elements()
    parsed.feed(page)
    assert parsed.open == []
    ids = [attrs["id"] for _, attrs in parsed.found if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in parsed.found:
        assert tag not in ("link", "iframe", "img", "base", "form")
        assert not {"src", "href", "srcset", "action"} & set(attrs)
        for name in ("for", "aria-labelledby"):
            assert name not in attrs or attrs[name] in ids
        if "figure" in str(attrs.get("class", "")).split():
            assert attrs["aria-label"]
    assert "@import" not in page.split("</style>")[0]
    assert "default-src 'none'" in page
    data = re.search(r'id="slider-data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["ways"] == law.to_dict()["ways"]
    for figure in trace_figures(law):
        assert f'id="{figure}"' in page


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_slider_shows_what_simulate_says(page: str, law: CapStudy, tmp_path: Path) -> None:
    steps = [(1.0, "device", "in order", -1), (1.5, "expert", "placed", 2), (None, "device", "placed", 0)]  # fmt: skip # noqa: E501
    gammas: list[Any] = [*GAMMAS, None]
    script = """<script>addEventListener("load", () => {
      const out = document.createElement("pre"); out.id = "seen";
      const seen = [];
      for (const [gamma, unit, placed, layer] of STEPS) {
        for (const [id, value] of [["gamma", gamma], ["unit", unit], ["placed", placed], ["layer", layer]]) {
          const control = document.getElementById(id);
          control.value = value; control.dispatchEvent(new Event("input"));
        }
        const text = id => document.getElementById(id).textContent;
        seen.push([text("out-busiest"), text("out-dropped"), text("out-mass"), text("out-gain"),
                   Array.from(document.getElementById("devices").data[1].y)]);
      }
      out.textContent = JSON.stringify({seen, plots: document.querySelectorAll(".js-plotly-plot .main-svg").length,
        wide: document.documentElement.scrollWidth > innerWidth});
      document.body.append(out);
    });</script></body>"""  # noqa: E501
    asked = [[gammas.index(gamma), *rest] for gamma, *rest in steps]
    changed = page.replace("</body>", script.replace("STEPS", json.dumps(asked)))
    file = tmp_path / "page.html"
    file.write_text(changed, encoding="utf-8")
    done = subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=500,900",
         f"--user-data-dir={tmp_path}/browser", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    told = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert told is not None
    seen = json.loads(html.unescape(told[1]))
    assert seen["plots"] >= len(trace_figures(law))
    assert not seen["wide"]
    for (gamma, unit, placed, layer), shown in zip(steps, seen["seen"], strict=True):
        way = law.way(placed, None if gamma is None else unit, gamma)
        base = law.way("in order")
        layers = range(6) if layer < 0 else [layer]
        part = way if layer < 0 else way.layers[layer]
        rows = np.sum([way.layers[n].device_loads for n in layers], axis=0)
        mean = np.sum([base.layers[n].device_loads for n in layers], axis=0).mean()
        assert float(shown[0][:-1]) == pytest.approx(part.busiest_device, abs=0.0051)
        assert float(shown[1][:-1]) == pytest.approx(100 * part.dropped_share, abs=0.0051)
        assert float(shown[2][:-1]) == pytest.approx(100 * way.gate_mass_lost, abs=0.0051)
        assert float(shown[3][:-1]) == pytest.approx(way.gain, abs=0.0051)
        assert shown[4] == pytest.approx((rows / mean).tolist())


def test_figures_are_plotly_objects(law: CapStudy) -> None:
    figures = plotly_figures(law)
    assert set(figures) == {"map", "map_placed", "layers", "devices", "frontier"}
    line = figures["frontier"].data[0]
    ways = [w for w in law.ways if w.placement == "in order" and w.unit in ("device", None)]
    assert sorted(line.y) == sorted(round(way.gain, 4) for way in ways)
    looks = {(trace.line.dash, trace.marker.symbol) for trace in figures["frontier"].data}
    assert len(looks) == 4  # told apart without colours


@pytest.mark.skipif(
    BROWSER is None or importlib.util.find_spec("kaleido") is None, reason="needs kaleido"
)
def test_figures_are_written_as_files(law: CapStudy, tmp_path: Path) -> None:
    files = write_figures(replace(law, keep=None), tmp_path / "figures", ("svg", "png"))
    assert {file.name for file in files} >= {"devices.svg", "devices.png", "map.svg"}
    for file in files:
        start = file.read_bytes()[:8]
        assert start.startswith(b"<svg" if file.suffix == ".svg" else b"\x89PNG")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_formats_are_checked(law: CapStudy, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be svg or png, got 'gif'"):
        write_figures(law, tmp_path, ("gif",))


def test_the_verb_decides_as_paceline_plan_does(tmp_path: Path) -> None:
    config, plan = tmp_path / "config.json", tmp_path / "plan.json"
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    page = tmp_path / "page.html"
    result = run(
        LAW, "--model-config", config, "--hardware", "h20", "--batch-tokens", "2048",
        "--html", page, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    planned = json.loads(result.stdout)["planned"]
    said = CliRunner().invoke(
        app,
        ["plan", LAW, "--model-config", str(config), "--hardware", "h20", "--batch-tokens", "2048",
         "--json"],
    )  # fmt: skip
    plan.write_text(said.stdout, encoding="utf-8")
    own = json.loads(said.stdout)
    assert {name: own[name] for name in planned if name != "plan"} == {
        name: value for name, value in planned.items() if name != "plan"
    }
    text = html.unescape(page.read_text(encoding="utf-8"))
    assert f'<strong id="decision">{own["decision"]}</strong>' in text
    assert all(line in text for line in own["verdict"])

    again = run(plan, "--json")  # the plan's JSON names its trace
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout)["planned"] == own
    assert json.loads(again.stdout)["batch_tokens"] == 2048


def test_a_plan_file_is_shown_beside_the_caps(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    policy = CapacityPolicy(capacity_factor=1.25, min_expert_load=0)
    placement = ExpertPlacement.explicit([e % 4 for e in range(64)], 4)
    Plan((policy,), (placement,)).save(path)
    result = run(LAW, "--plan", path, "--batch-tokens", "1024", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["devices"], found["judged_on"]) == (4, "all batches")
    assert found["expert_to_device"]["placed"][3] == list(placement.expert_to_device)
    wanted = (
        simulate(
            sample("esft_v2lite_law").regrouped(1024),
            {"none": Plan(placements=(4,)), "plan": Plan.load(path)},
        )
        .plans["plan"]
        .overall
    )
    assert found["plan"]["dropped_share"] == wanted.dropped_share
    assert found["plan"]["gain"] == wanted.gain


def test_layers_on_their_own_numbers_of_devices_gain_over_as_many() -> None:
    trace = sample("esft_v2lite_law").regrouped(1024)
    found = cap_study(trace, plan=Plan(placements=(8, 8, 4, 16, 8, 8)))
    assert [way.gain for way in found.ways if way.gamma is None] == [1, 1]
    gains = {
        way.placement: way.gain for way in found.ways if way.gamma == 1 and way.unit == "device"
    }
    assert len(gains) == 2
    assert len(set(gains.values())) == 1
    assert min(gains.values()) > 1


def test_a_plan_file_alone_names_no_trace(tmp_path: Path) -> None:
    Plan(placements=(8,)).save(tmp_path / "plan.toml")
    ran = run(tmp_path / "plan.toml", "--json")
    assert ran.exit_code == 2
    assert "names no trace" in ran.stderr


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "plan.json"
    broken.write_text('{"schema": "paceline-plan/1", "trace": "x"', encoding="utf-8")
    lacking = tmp_path / "lacking.json"
    lacking.write_text('{"schema": "paceline-plan/1", "trace": "x"}', encoding="utf-8")
    goal = Goal(PlacementSpec(8), LayerShape(2048, 1408, 64, 6), PRESETS["h20"])
    whole = make_plan(sample("esft_v2lite_law"), goal, batch_tokens=2048)[1].to_dict()
    silent = tmp_path / "silent.json"
    silent.write_text(json.dumps(whole | {"verdict": []}, indent=2), encoding="utf-8")
    for point in whole["second_half"]["frontier"]:
        del point["budget"]
    pointless = tmp_path / "pointless.json"
    pointless.write_text(json.dumps(whole, indent=2), encoding="utf-8")
    cases: list[tuple[list[Any], str]] = [
        ([LAW, "--html", tmp_path / "no" / "page.html"], "there is no folder"),
        ([LAW, "--hardware", "h20", "--json"], "needs --model-config"),
        ([LAW, "--devices", "0", "--json"], "--devices must be at least 1"),
        ([LAW, "--devices", "65", "--json"], "65"),
        (["sample:none", "--json"], "sample must be one of"),
        ([broken, "--json"], "cut off or broken"),
        ([lacking, "--json"], "has no proper model"),
        ([pointless, "--json"], "has no proper second_half.frontier.0.budget"),
        ([silent, "--json"], "has no proper verdict"),
    ]
    for arguments, words in cases:
        result = run(*arguments)
        assert result.exit_code == 2, arguments
        assert words in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_names_of_users_are_escaped(law: CapStudy, tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    changed = replace(law, model=evil, layers=[evil] * 6, notes=[evil])
    assert "<script>alert" not in report_page(changed, None, RUN)


@pytest.mark.full
def test_saved_traces_report_as_the_sample_does(tmp_path: Path) -> None:
    save_trace(sample("gpt_oss_20b_decode"), tmp_path / "trace")
    saved = json.loads(run(tmp_path / "trace", "--json").stdout)
    shipped = json.loads(run("sample:gpt_oss_20b_decode", "--json").stdout)
    assert saved["ways"] == shipped["ways"]


def test_choices_without_weights_are_capped_by_order(tmp_path: Path) -> None:
    """An engine that tells ids alone: what is dropped is known, its gate mass isn't."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((2, 512, 16)) * np.linspace(0.2, 1, 16), axis=2)[:, :, :2]
    path = tmp_path / "ids.npz"
    np.savez(path, topk_ids=ids.astype(np.uint8), num_experts=16)
    page = tmp_path / "page.html"
    result = run(path, "--devices", "4", "--batch-tokens", "128", "--json", "--html", page)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["keep"] == "first"
    loads = np.array(
        [[np.bincount(layer[b : b + 128].ravel(), minlength=16) for layer in ids]
         for b in (256, 384)]
    ).reshape(2, 2, 4, 4).sum(3)  # fmt: skip
    way = way_of(found, "in order", "device", 1.0)
    assert way["gate_mass_lost"] is None
    assert way["dropped_share"] == pytest.approx(np.maximum(loads - 64, 0).sum() / loads.sum())
    assert "<td>unknown</td>" in page.read_text(encoding="utf-8")
    assert "of the assignments" in " ".join(found["verdict"])


def test_no_figure_tells_by_colour_alone(law: CapStudy) -> None:
    figures = trace_figures(law)
    bars = figures["devices"]["data"]
    assert len({bar["marker"]["pattern"]["shape"] for bar in bars}) == len(bars)
    for name in ("layers", "frontier"):
        lines = figures[name]["data"]
        assert len({(x["marker"]["symbol"], x["line"]["dash"]) for x in lines}) == len(lines)


@pytest.mark.full
def test_everything_is_judged_on_the_other_trace(tmp_path: Path) -> None:
    """Placed by all of one traffic, judged on all of another: as `place` and `simulate` have it."""
    page, plan = tmp_path / "out" / "page.html", tmp_path / "it is.toml"
    page.parent.mkdir()
    other = "sample:esft_v2lite_intent"
    ran = run(LAW, "--judge", other, "--batch-tokens", "1024", "--json")
    assert ran.exit_code == 0, ran.stderr
    found = json.loads(ran.stdout)
    place = ["plan", LAW, "--place-only", "--judge", other, "--batch-tokens", "1024", "--json"]
    placed = json.loads(CliRunner().invoke(app, [*place, "--out", str(plan)]).stdout)
    ways = placed["other_trace"]["ways"]
    for name, way in (("in order", "in_order"), ("placed", "search")):
        assert way_of(found, name, None, None)["busiest_device"] == pytest.approx(
            ways[way]["overall"]
        )
    judged = sample("esft_v2lite_intent").regrouped(1024)
    capped = CapacityPolicy(capacity_factor=1.25, min_expert_load=0)
    wanted = simulate(judged, {"x": Plan((capped,), Plan.load(plan).placements)}).plans["x"]
    way = way_of(found, "placed", "device", 1.25)
    assert way["gate_mass_lost"] == wanted.overall.gate_mass_lost
    loads = raw_loads("esft_v2lite_intent", range(4), 1024).sum(0)
    assert [x["expert_loads"] for x in found["loads"]["layers"]] == loads.tolist()
    assert (found["judge"], found["judged_on"]) == (other, "another trace")
    # the plan's placement on the other trace, and the way to its file
    ran = run(LAW, "--judge", other, "--batch-tokens", "1024", "--plan", plan, "--html", page)
    assert ran.exit_code == 0, ran.stderr
    text = page.read_text(encoding="utf-8")
    assert 'href="../it%20is.toml"' in text
    assert html.escape(plan.read_text(encoding="utf-8").splitlines()[-2]) in text
    wrong = run(LAW, "--judge", "sample:gpt_oss_20b_decode", "--json")
    assert wrong.exit_code == 2
    assert "must be of one model" in wrong.stderr


def test_decode_shows_what_max_active_does(law: CapStudy) -> None:
    assert law.active == []  # prefill: rows rule there
    trace = sample("gpt_oss_20b_decode")
    found = cap_study(trace)
    assert [(w.placement, w.max_active) for w in found.active] == [
        ("in order", None), *(("in order", n) for n in (3, 2, 1)),
        *(("placed", n) for n in (3, 2, 1)),
    ]  # fmt: skip
    judged = picked(trace, list(range(32, 64)))
    for way in found.active:
        own = tuple(
            ExpertPlacement.explicit(row, 8) for row in found.expert_to_device[way.placement]
        )
        policy = CapacityPolicy(max_active=way.max_active, min_expert_load=64)
        wanted = simulate(judged, {"x": Plan((policy,), own)}).plans["x"].overall
        for name in ("most_active_experts", "dropped_share", "gate_mass_lost", "lost_tokens"):
            assert getattr(way, name) == getattr(wanted, name)
    page = report_page(found, None, RUN)
    assert page.count("<td>placed</td>") >= 3
    assert 'id="active"' in page
    assert 'id="active"' not in report_page(law, None, RUN)
