"""Wording, figures and files of the reports."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from paceline.files import to_json, write_text
from paceline.reporting.figures import load_map, relative
from paceline.reporting.pages import render
from paceline.reporting.quality_figures import FLOOR, decode_words, scatter
from paceline.reporting.style import load_colours
from paceline.system_info import system_info
from paceline.text import percent, signed_percent, times


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0024, "+0.24%"),
        (-0.0031, "\u22120.31%"),
        (0.0, "0.00%"),
        (-0.00001, "0.00%"),
        (0.281, "+28.1%"),
        (1.9, "+190%"),
    ],
)
def test_signed_percent(share: float, text: str) -> None:
    assert signed_percent(share) == text


def test_plain_figures() -> None:
    assert percent(0.1234) == "12.3%"
    assert percent(0.38, 0) == "38%"
    assert times(1.684) == "1.68\u00d7"


def test_relative_loads_are_compared_with_the_mean() -> None:
    assert relative([6, 2]) == [1.5, 0.5]
    assert relative([0, 0]) == [0.0, 0.0]


def test_load_map_has_a_menu_of_its_panels_and_lines_between_devices() -> None:
    rows = [[1.0, 2.0, 0.5], [0.2, 1.1, 1.7]]
    devices = [[0, 0, 1], [0, 0, 1]]
    figure = load_map({"a": rows, "b": rows}, devices, ["layer 0", "layer 1"])
    assert figure["data"][0]["z"] == rows
    assert figure["menu"] == {"a": rows, "b": rows}
    assert [line["x0"] for line in figure["layout"]["shapes"]] == [1.5]
    assert "menu" not in load_map({"a": rows}, devices, ["0", "1"])


def test_load_map_gathers_the_experts_of_a_device() -> None:
    rows = [[1.0, 2.0, 0.5, 0.1], [0.2, 1.1, 1.7, 0.3]]
    alike = load_map({"a": rows}, [[3, 0, 3, 1]] * 2, ["0", "1"])  # device 2 hosts nothing
    assert alike["data"][0]["z"] == [[2.0, 0.1, 1.0, 0.5], [1.1, 0.3, 0.2, 1.7]]
    assert alike["data"][0]["customdata"][0] == [[1, 0], [3, 1], [0, 3], [2, 3]]
    assert [line["x0"] for line in alike["layout"]["shapes"]] == [0.5, 1.5]
    assert alike["layout"]["xaxis"]["ticktext"] == ["0", "1", "3"]
    assert alike["layout"]["xaxis"]["tickvals"] == [0, 1, 2.5]

    own = load_map({"a": rows}, [[0, 0, 0, 1], [1, 0, 1, 1]], ["0", "1"])
    assert own["data"][0]["z"] == [[1.0, 2.0, 0.5, 0.1], [1.1, 0.2, 1.7, 0.3]]
    lines = own["layout"]["shapes"]
    assert [(line["x0"], line["y0"], line["y1"]) for line in lines] == [
        (2.5, -0.5, 0.5),
        (0.5, 0.5, 1.5),
    ]
    assert "differ by layer" in own["layout"]["xaxis"]["title"]["text"]


def test_colours_put_the_mean_where_it_belongs() -> None:
    scale = load_colours(4.0)
    assert [stop for stop, _ in scale] == sorted(stop for stop, _ in scale)
    assert scale[1][0] == 0.25
    assert load_colours(0.5)[-1][0] == 1


def test_improvements_are_drawn_on_the_floor_and_told_in_full() -> None:
    rows = [{"label": "x", "short": "1", "family": "f", "change": -0.3, "x": 1.2}]
    trace = scatter(rows, "busiest", 1.5, (1, 2), 10)["data"][0]
    assert trace["y"] == [FLOOR]
    assert trace["customdata"] == [["x", -0.3]]
    assert "error_x" not in trace
    timed = scatter([rows[0] | {"low": 1.0, "high": 1.5}], "time", 1.0, (1, 2), 10)["data"][0]
    assert timed["error_x"]["array"] == [0.3]
    assert timed["error_x"]["arrayminus"] == [0.2]


def test_private_files_are_private_and_writing_replaces(tmp_path: Path) -> None:
    path = tmp_path / "x.html"
    write_text(path, "one", private=False)
    assert stat.S_IMODE(path.stat().st_mode) & 0o400
    write_text(path, "two", private=True)
    assert path.read_text() == "two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="No such file"):
        write_text(tmp_path / "missing" / "x", "text", private=True)


def test_json_is_strict() -> None:
    assert json.loads(to_json({"a": [1, None]})) == {"a": [1, None]}
    with pytest.raises(ValueError, match="JSON"):
        to_json({"a": float("nan")})


def test_environment_names_hardware_and_versions_but_no_host() -> None:
    import platform

    found = system_info()
    assert {"python", "torch", "transformers"} <= set(found["versions"])
    assert found["machine"]["cores"] >= 1
    assert platform.node() not in json.dumps(found) or not platform.node()


def test_pages_escape_what_users_name() -> None:
    evil = "</script><script>alert(1)</script>"
    result = {
        "model": evil,
        "devices": 2,
        "placement": evil,
        "policy": None,
        "verdict": [evil],
        "tokens_by_text": {evil: 3},
        "batches": 1,
        "mixed": False,
        "layers": [],
        "overall": {},
        "created": "now",
        "command": evil,
        "seconds": None,
        **system_info(),
    }
    figure = {"data": [{"name": evil}], "layout": {}}
    page = render("loads.html.j2", {"peaks": figure}, title=evil, results=result, plots=["peaks"])
    assert "<script>alert" not in page
    assert "Content-Security-Policy" in page


def test_words_name_the_deepest_cut_within_half_a_percent() -> None:
    point = {"batch": 4, "stand_ins": True, "placed": False, "read_before": 3.0}
    points = [
        {**point, "max_active": 3, "read": 2.9, "change": 0.001},
        {**point, "max_active": 2, "read": 2.0, "change": 0.004},
        {**point, "max_active": 1, "read": 1.0, "change": 0.02},
        {**point, "max_active": 2, "read": 2.0, "change": 0.009, "stand_ins": False},
    ]
    (sentence,) = decode_words({"experts_a_device": 4, "points": points})
    assert "max_active=2" in sentence
    assert "2.00 of its 4 experts, not 3.00 (33% fewer)" in sentence
    assert "+0.40% perplexity with stand-ins, +0.90% without" in sentence
    assert decode_words({"experts_a_device": 4, "points": points[2:3]}) == []
    placed = {**point, "max_active": 2, "read": 2.0, "read_before": 2.8, "change": 0.002}
    points.append({**placed, "placed": True})
    (sentence,) = decode_words({"experts_a_device": 4, "points": points})
    assert "not 3.00 (33% fewer), for +0.20% perplexity with stand-ins and the experts" in sentence
    assert sentence.endswith("placed, +0.90% with neither.")
