"""The demo end to end in a reduced form, and its page."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.cli.demo import _show
from paceline.demo.page import findings, write_demo
from paceline.demo.run import DemoResult
from paceline.demo.settings import BASELINE, DEVICES, ENTRIES, HEADLINE, DemoSettings
from paceline.text import percent, signed_percent, times

KINDS = ("one_domain", "mixed")
pytestmark = pytest.mark.xdist_group("demo")  # one run of it serves all tests


class Page(HTMLParser):
    """Collects tables (id -> key -> cells), figure data, texts by id and outside references."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, dict[str, list[str]]] = {}
        self.figures: dict[str, Any] = {}
        self.texts: dict[str, str] = {}
        self.places: set[str] = set()
        self.outside: list[str] = []
        self.plotly = 0
        self._table = self._row = self._cell = self._script = self._text = None
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.outside += [v for k, v in found.items() if k in ("src", "href") and v]
        if found.get("class") == "figure":
            self.places.add(found["id"])
        if tag == "table":
            self._table = self.tables.setdefault(found["id"], {})
        elif tag == "tr" and "data-key" in found:
            self._row = self._table.setdefault(found["data-key"], [])
        elif tag == "td":
            self._row.append("")
            self._cell = True
        elif tag == "script":
            self._script = found.get("data-for", "")
        elif tag in ("h1", "ul") and "id" in found:
            self._text = found["id"]
            self.texts[self._text] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "td":
            self._cell = None
        elif tag == "script":
            self._script = None
        elif tag in ("h1", "ul"):
            self._text = None

    def handle_data(self, data: str) -> None:
        if self._script:
            self.figures[self._script] = json.loads(data)
        elif self._script == "":
            self.plotly += len(data) > 1_000_000
        elif self._cell:
            self._row[-1] += data
        elif self._text:
            self.texts[self._text] += data


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, list[Any]]:
    out = tmp_path_factory.mktemp("demo") / "page"
    seen: list[Any] = []
    result = write_demo(
        out,
        settings=DemoSettings.quick(),
        progress=lambda *step: seen.append(step),
        command="paceline <demo>",
    )
    return result.to_dict(), out, seen


@pytest.fixture
def results(demo: tuple[dict[str, Any], Path, list[Any]]) -> dict[str, Any]:
    return copy.deepcopy(demo[0])


@pytest.fixture(scope="session")
def page(demo: tuple[dict[str, Any], Path, list[Any]]) -> Page:
    return Page((demo[1] / "index.html").read_text(encoding="utf-8"))


def test_the_table_has_every_policy_once() -> None:
    keys = [entry.key for entry in ENTRIES]
    assert keys[0] == BASELINE
    assert len(set(keys)) == len(keys) == 13
    assert not ENTRIES[0].policy.caps
    assert all(entry.policy.caps for entry in ENTRIES[1:])
    assert all(e.counterpart in keys for e in ENTRIES if e.counterpart is not None)
    assert {"device-1.25-score", "expanded-1", "expert-1-random"} <= set(keys)


def test_results_file_is_the_result(demo: tuple[dict[str, Any], Path, list[Any]]) -> None:
    results, out, seen = demo
    assert json.loads((out / "results.json").read_text(encoding="utf-8")) == results
    assert [done for done, _, _ in seen] == list(range(1, seen[-1][1] + 1))
    assert results["reduced"] is True


def test_caps_hold_and_nothing_is_lost_without_one(results: dict[str, Any]) -> None:
    tokens = results["data"]["sequences_per_batch"] * results["data"]["sequence_length"]
    by_key = {row["key"]: row for row in results["policies"]}
    for kind in KINDS:
        base = by_key[BASELINE][kind]
        assert base["dropped_share"] == 0
        assert base["perplexity_change"]["mean"] == 0
        assert base["emulated"]["bound"] == 1
        capped = by_key["device-1.25-score"][kind]
        assert 0 < capped["dropped_share"] < 0.5
        mean = tokens * results["model"]["experts_per_token"] / DEVICES
        assert capped["device_peak_to_mean_worst"] <= 1.25 + 1 / mean
        assert capped["gate_mass_kept"] < 1
        assert capped["emulated"]["bound"] >= 1
        assert by_key["expanded-1.25"][kind]["extras_share"] > 0
        assert by_key["expanded-1.25"][kind]["against_counterpart"] is not None
    # The same sequences without a cap have the same perplexity, however they are batched.
    one, mixed = (by_key[BASELINE][kind]["perplexity"] for kind in KINDS)
    assert one == pytest.approx(mixed, rel=1e-4)


def test_stand_ins_change_no_load_of_the_first_layer_and_cost_time(
    results: dict[str, Any],
) -> None:
    by_key = {row["key"]: row for row in results["policies"]}
    alone, with_them, placed = (
        by_key[key]["one_domain"] for key in ("device-1-score", HEADLINE, f"{HEADLINE}-placed")
    )
    assert alone["stand_in_distance"] is None
    assert 0.3 < with_them["stand_in_distance"] < 3
    assert with_them["perplexity_change"]["mean"] < alone["perplexity_change"]["mean"]
    assert placed["dropped_share"] < with_them["dropped_share"]
    busiest = [part["emulated"]["busiest_device_rows"] for part in (alone, with_them)]
    assert busiest[0] == busiest[1]
    assert with_them["device_peak_to_mean_worst"] <= 1 + DEVICES / 1024


def test_the_terminal_shows_it_in_80_columns(
    results: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {row["key"]: row for row in results["policies"]}
    for row, entry in zip(results["policies"], ENTRIES, strict=False):
        row["label"] = entry.label
    longest = max((entry.label for entry in ENTRIES), key=len)
    rows[HEADLINE]["label"] = longest
    rows[HEADLINE]["one_domain"]["perplexity_change"]["mean"] = 0.9444
    _show(DemoResult(**results))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert longest in shown
    assert "…" not in shown


def test_loads_add_up(results: dict[str, Any]) -> None:
    k = results["model"]["experts_per_token"]
    for name, part in results["stragglers"]["one_domain"]["by_domain"].items():
        assert len(part["layers"]) == results["model"]["layers"]
        for layer in part["layers"]:
            expected = results["data"]["tokens_by_domain"][name] * k
            assert sum(layer["expert_loads_before"]) == expected
            assert sum(layer["device_loads_before"]) == expected
    for kind in KINDS:
        overall = results["stragglers"][kind]["overall"]
        assert overall["straggler_loss"] == pytest.approx(1 - 1 / overall["device_peak_to_mean"])
        assert overall["device_peak_to_mean"] <= overall["device_peak_to_mean_worst"]


def test_tables_of_the_page_are_the_results(results: dict[str, Any], page: Page) -> None:
    for kind in KINDS:
        table = page.tables[f"policies-{kind}"]
        assert list(table) == [row["key"] for row in results["policies"]]
        for row in results["policies"][1:]:
            part, cells = row[kind], table[row["key"]]
            assert cells[0] == row["label"]
            assert cells[1].startswith(signed_percent(part["perplexity_change"]["mean"]))
            assert cells[2] == signed_percent(max(part["perplexity_change"]["by_domain"].values()))
            assert cells[3] == percent(part["dropped_share"])
            assert cells[4] == percent(part["extras_share"])
            assert cells[5] == percent(part["gate_mass_kept"])
            assert cells[6] == times(part["device_peak_to_mean"])
            assert cells[7].startswith(times(part["emulated"]["speedup"]["median"]))
            assert cells[8] == times(part["emulated"]["bound"])
        for row in results["policies"]:
            cells = page.tables[f"perplexity-{kind}"][row["key"]][1:]
            values = [float(re.match(r"[\d.]+", cell).group()) for cell in cells]  # type: ignore[union-attr]
            assert values == [round(v, 2) for v in row[kind]["perplexity"].values()]


def test_figures_of_the_page_are_the_results(results: dict[str, Any], page: Page) -> None:
    assert set(page.figures) == page.places
    for kind in KINDS:
        for name, figure_of in (
            ("balance", lambda part: part["device_peak_to_mean"]),
            ("time", lambda part: part["emulated"]["speedup"]["median"]),
        ):
            drawn = {
                label: (x, change)
                for trace in page.figures[f"{name}-{kind}"]["data"]
                for x, (label, change) in zip(trace["x"], trace["customdata"], strict=True)
            }
            assert len(drawn) == len(results["policies"]) - 1
            for row in results["policies"][1:]:
                x, change = drawn[row["label"]]
                assert x == pytest.approx(figure_of(row[kind]), abs=1e-4)
                expected = 100 * row[kind]["perplexity_change"]["mean"]
                assert change == pytest.approx(expected, abs=1e-4)
    layers = results["stragglers"]["mixed"]["layers"]
    for drawn_row, layer in zip(page.figures["map-mixed"]["data"][0]["z"], layers, strict=True):
        loads = layer["expert_loads_before"]
        mean = sum(loads) / len(loads)
        assert drawn_row == pytest.approx([load / mean for load in loads], abs=1e-4)
    peaks = page.figures["peaks"]["data"][0]["y"]
    assert peaks[-1] == pytest.approx(
        results["stragglers"]["mixed"]["overall"]["device_peak_to_mean"], abs=1e-4
    )


def test_page_works_offline_and_says_what_it_is(
    demo: tuple[dict[str, Any], Path, list[Any]], page: Page
) -> None:
    results, out, _ = demo
    text = (out / "index.html").read_text(encoding="utf-8")
    assert page.outside == []
    assert page.plotly == 1
    assert page.texts["headline"] == results["findings"]["headline"]
    for line in results["findings"]["lines"]:
        assert line in page.texts["findings"]
    assert "paceline &lt;demo&gt;" in text
    assert results["versions"]["torch"] in text
    assert "mulated" in text
    assert "reduced run" in text


def test_findings_follow_the_figures(results: dict[str, Any]) -> None:
    row = next(r for r in results["policies"] if r["key"] == HEADLINE)
    part = row["one_domain"]
    part["perplexity_change"] |= {"mean": 0.01, "standard_error": 0.001}
    part["emulated"]["speedup"] = {"median": 1.3, "min": 1.2, "max": 1.4}
    told = findings(DemoResult(**results)).to_dict()
    assert "1.30\u00d7 as fast, for +1.00% perplexity (emulated)" in told["headline"]
    assert any("costs +1.00% perplexity" in line for line in told["lines"])
    part["emulated"]["speedup"] = {"median": 1.0, "min": 0.9, "max": 1.1}
    part["perplexity_change"]["standard_error"] = 0.02
    told = findings(DemoResult(**results)).to_dict()
    assert "saves no expert time" in told["headline"]
    assert any("can't tell from zero" in line for line in told["lines"])
    expanded = next(r for r in results["policies"] if r["key"] == "expanded-1.25")["one_domain"]
    change = part["perplexity_change"] | {"mean": 0.0001, "standard_error": 0.01}
    expanded["against_counterpart"] = {
        "perplexity_change": change,
        "speedup": {"median": 0.8, "min": 0.7, "max": 0.9},
    }
    line = findings(DemoResult(**results)).lines[-1]
    assert "does nothing for quality that this much text can show" in line
    assert "takes the slowest device 25% longer" in line


def test_the_verb_says_what_it_found_or_prints_json(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.demo.page.run_demo", lambda *_: DemoResult(**results))
    arguments = ["demo", "--quick", "--out", str(tmp_path)]
    shown = CliRunner().invoke(app, arguments).stdout
    said = " ".join(shown.split())
    written = results["findings"]
    labels = (row["label"] for row in results["policies"])
    for line in (written["headline"], *written["lines"], *labels, "index.html"):
        assert line in said
    assert "One-domain batches" in said
    assert "Mixed batches" in said
    as_json = CliRunner().invoke(app, [*arguments, "--json"]).stdout
    assert as_json == (tmp_path / "results.json").read_text(encoding="utf-8")


def test_an_impossible_folder_fails_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setattr("paceline.demo.page.run_demo", lambda *_: pytest.fail("it ran"))
    ran = CliRunner().invoke(app, ["demo", "--out", str(blocked)])
    assert ran.exit_code == 2
    assert len(ran.stderr.strip().splitlines()) == 1
