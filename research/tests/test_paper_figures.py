"""research/paper_figures.py against plain NumPy, and what is kept of it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline.traces
from paceline.traces import sample

ROOT = Path(__file__).resolve().parents[2]
FIGURES = runpy.run_path(str(ROOT / "research" / "paper_figures.py"))
KEPT = json.loads((ROOT / "research/results/paper_figures.json").read_text(encoding="utf-8"))


def raw(name: str) -> dict[str, np.ndarray]:
    with np.load(Path(paceline.traces.__file__).parent / "sample" / f"{name}.npz") as file:
        return {key: file[key] for key in ("topk_ids", "topk_weights")}


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.floats(0, 0.5))
def test_skipped_experts_are_the_least_loaded(loads: list[int], share: float) -> None:
    gone = FIGURES["skipped_experts"](torch.tensor(loads), share).tolist()
    count = max(1, round(share * len(loads)))
    assert gone == sorted(sorted(range(len(loads)), key=lambda e: (loads[e], e))[:count])


def test_expert_drop_leaves_out_what_it_says_and_nothing_else() -> None:
    model, _ = FIGURES["demo"]()
    block = model.model.layers[0].mlp
    hidden = torch.randn(
        1, 40, model.config.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    told: list[tuple[int, list[int], list[int]]] = []

    def tell(layer: int, before: Any, after: Any) -> None:
        told.append((layer, before.tolist(), after.tolist()))

    with torch.no_grad():
        _, weights, ids = block.gate(hidden)
        plain = block(hidden)
        with FIGURES["expert_drop"](model, tell):
            found = block(hidden)
        assert torch.equal(block(hidden), plain)  # and it is gone afterwards

    x, up = hidden[0].numpy(), block.experts.gate_up_proj.detach().numpy()
    down = block.experts.down_proj.detach().numpy()
    chosen, scores = ids.numpy(), weights.numpy()
    loads = np.bincount(chosen.ravel(), minlength=32)
    gone = sorted(range(32), key=lambda e: (loads[e], e))[:3]  # 10% of 32
    assert told == [(0, loads.tolist(), [0 if e in gone else int(n) for e, n in enumerate(loads)])]
    wanted = np.zeros_like(x)
    for token in range(40):
        for expert, score in zip(chosen[token], scores[token], strict=True):
            if expert not in gone:
                gate, value = np.split(up[expert] @ x[token], 2)
                wanted[token] += score * (down[expert] @ (gate / (1 + np.exp(-gate)) * value))
    assert not np.allclose(plain[0].numpy(), wanted, atol=1e-4)
    np.testing.assert_allclose(found[0].numpy(), wanted, atol=1e-5)


def test_dropped_shares_are_those_of_the_raw_ids() -> None:
    rows = FIGURES["figure7"]({"law": sample("esft_v2lite_law").regrouped(512)})
    ids = raw("esft_v2lite_law")["topk_ids"].reshape(6, 8, 512 * 6)
    loads = np.array([[np.bincount(b, minlength=64) for b in layer] for layer in ids])
    for row, units in zip(rows, (loads, loads.reshape(6, 8, 8, 8).sum(3)), strict=True):
        for gamma in FIGURES["GAMMAS"]:
            places = gamma * 512 * 6 / units.shape[2]  # whole for all of them
            over = np.maximum(units - places, 0).sum() / units.sum()
            assert row[f"{gamma:g}"] == pytest.approx(over)
        kept = next(
            one for one in KEPT["figure7"]
            if one["unit"] == row["unit"] and one["traffic"] == "DeepSeek-V2-Lite, law"
        )  # fmt: skip
        for gamma in FIGURES["GAMMAS"]:
            assert row[f"{gamma:g}"] == pytest.approx(kept[f"{gamma:g}"])


def test_gate_scores_by_rank_are_those_of_the_raw_weights() -> None:
    found = FIGURES["figure8"]({n: sample(s) for n, s in FIGURES["SAMPLES"].items()})
    for row, stem in zip(found, FIGURES["SAMPLES"].values(), strict=True):
        weights = raw(stem)["topk_weights"].astype(np.float64)
        ranked = -np.sort(-weights.reshape(-1, weights.shape[-1]), axis=1)
        assert row["mean_score"] == pytest.approx(ranked.mean(0).tolist(), rel=1e-5)
        kept = next(one for one in KEPT["figure8"] if one["traffic"] == row["traffic"])
        assert row["mean_score"] == pytest.approx(kept["mean_score"], rel=1e-5)


def test_kept_loads_are_the_models_and_methods_keep_their_word() -> None:
    model, batches = FIGURES["demo"]()
    counted = FIGURES["Counted"]()
    with FIGURES["expert_drop"](model, counted.add):
        FIGURES["batch_losses"](model, batches[0])
    kept = {(row["method"], row["layer"]): row for row in KEPT["figure9"]}
    for (layer, before), (_, after) in zip(counted.before, counted.after, strict=True):
        order = np.argsort(-np.array(before), kind="stable")
        own = kept["Expert Drop", layer]["loads"]
        assert np.array(after)[order] / np.mean(before) == pytest.approx(own, abs=0.01)
        assert sum(load == 0 for load in own) >= 3
    for method in ("Token Drop", "Expanded Drop"):
        for factor in (2.0, 1.5, 1.0):
            for layer in range(4):
                assert max(kept[f"{method}, {factor:g}", layer]["loads"]) <= factor + 1e-9


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
    assert FIGURES["table2_page"](KEPT["table2"]) in page


def test_pictures_draw_what_is_kept_and_tell_lines_apart_without_colour(tmp_path: Path) -> None:
    pictures = runpy.run_path(str(ROOT / "research" / "paper_pictures.py"))
    drawn = {name: draw(KEPT[name]) for name, draw in pictures["FIGURES"].items()}
    for figure in drawn.values():
        looks = [(line.marker.symbol, line.line.dash) for line in figure.data]
        assert len(set(looks)) == len(looks) >= 4
    for line, row in zip(drawn["figure7"].data, KEPT["figure7"], strict=True):
        assert dict(zip(line.x, line.y, strict=True)) == {
            float(name): pytest.approx(100 * row[name])
            for name in row
            if name not in ("traffic", "unit")
        }
    for line, row in zip(drawn["figure8"].data, KEPT["figure8"], strict=True):
        assert list(line.y) == row["mean_score"][:16]
    worst = max(
        (row for row in KEPT["figure9"] if row["method"] == "none"), key=lambda r: r["peak_to_mean"]
    )
    loads = {line.name: list(line.y) for line in drawn["figure9"].data}
    assert loads.pop("no cap") == worst["loads"]
    assert set(loads) == {"Expert Drop", "Token Drop, 1.5", "Token Drop, 1", "Expanded Drop, 1"}
    pictures["write"](drawn["figure9"], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 1e6
    page = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
    for name in drawn:
        assert f"(figures/{name}.svg)" in page
        assert (ROOT / "docs" / "figures" / f"{name}.svg").read_text().startswith("<svg")
