"""research/multimodal.py and its pictures: questions against an oracle, shares against counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import multimodal as study
import picture_model
import pictures
from transformers import Qwen3VLMoeForConditionalGeneration

from paceline import CapacityPolicy, attach

ROOT = Path(__file__).resolve().parents[2]
NAMES = list(pictures.KINDS.values())


def made_up(batch: int, seed: int = 0) -> pictures.Conversations:
    """Conversations about noise, which is as good as clothes where nobody has to know them."""
    rng = np.random.default_rng(seed)
    images = rng.integers(1, 256, (60, pictures.CELL, pictures.CELL)).astype(np.uint8)
    return pictures.conversations(rng, images, rng.integers(len(NAMES), size=60), batch, 12)


def answer_of(words: list[str], cells: list[int]) -> str:
    """What a person says who looks at the cells, row by row."""
    held = [NAMES[c] if c >= 0 else "nothing" for c in cells]
    at = {f"{'abc'[i // 3]}{i % 3 + 1}": item for i, item in enumerate(held)}
    match words:
        case [place]:
            return at[place]
        case ["how-many", item]:
            return ["zero", "one", "two", "three", "four"][min(4, held.count(item))]
        case ["any", item]:
            return "yes" if item in held else "no"
        case ["same", one, other]:
            return "yes" if at[one] == at[other] else "no"
        case ["left-of", one, other]:
            columns = {k: [i % 3 for i, item in enumerate(held) if item == k] for k in (one, other)}
            pairs = [(a, b) for a in columns[one] for b in columns[other]]
            return "yes" if any(a < b for a, b in pairs) else "no"
    raise AssertionError(words)


def test_answers_are_what_a_look_at_the_cells_says() -> None:
    rng = np.random.default_rng(5)
    said: dict[str, set[str]] = {}
    for _ in range(1500):
        cells = rng.permutation([*rng.integers(-1, len(NAMES), 6), *[rng.integers(len(NAMES))] * 3])
        category, words, answer = pictures._question(rng, cells)
        assert answer == answer_of(words, cells.tolist())
        said.setdefault(category, set()).add(answer)
    assert said.keys() == pictures.CATEGORIES.keys()
    assert said["place"] == {*NAMES, "nothing"}
    assert said["same"] == said["left"] == said["any"] == {"yes", "no"}


def test_what_stands_in_a_row_belongs_to_its_picture() -> None:
    made = made_up(3)
    ids, pixels = made.given["input_ids"], made.given["pixel_values"]
    image = made.given["mm_token_type_ids"].bool()
    assert torch.equal(image, ids == pictures.ID["<image>"])
    assert image.sum(1).tolist() == [pictures.IMAGE_TOKENS] * 3
    # an empty cell is black, and no other is
    empty = made.held[image] == pictures.ID["nothing"]
    assert torch.equal(empty, (pixels == -1).all(1))
    assert 0 < empty.sum() < len(empty)
    assert torch.equal(made.given["attention_mask"] == 0, ids == pictures.ID["<pad>"])
    # the labels are the words that follow, and answer the question before them
    row, column = (made.labels != pictures.IGNORED).nonzero().T
    assert len(row) == 3 * 12
    assert torch.equal(made.labels[row, column], ids[row, column + 1])
    words = [pictures.WORDS[i] for i in ids[0].tolist()]
    categories, first = list(pictures.CATEGORIES), words.index("<end>") + 1
    cells = [
        int(x) for x in made.held[0][image[0]].reshape(6, 6)[::2, ::2].flatten()
    ]  # one patch a cell
    kinds = [NAMES.index(w) if (w := pictures.WORDS[c]) != "nothing" else -1 for c in cells]
    for at in (made.labels[0] != pictures.IGNORED).nonzero().flatten().tolist():
        asked = words[first : at + 1]
        assert words[at + 1] == answer_of(asked, kinds)
        category = categories[made.category[0, at]]
        assert len(asked) == {"place": 1, "count": 2, "any": 2}.get(category, 3)
        first = at + 2


def test_standard_errors_are_over_conversations() -> None:
    rng = np.random.default_rng(1)
    base, other = study.Judge(), study.Judge()
    shape = (30, len(pictures.CATEGORIES))
    base.asked.append(np.full(shape, 2.0))
    base.right.append(rng.integers(0, 3, shape).astype(float))
    other.right.append(rng.integers(0, 3, shape).astype(float))
    difference = (other.right[0] - base.right[0]).sum(1) / 10
    found = study.paired(base, other, "right", "all")
    assert found["change"] == pytest.approx(difference.mean())
    assert found["standard_error"] == pytest.approx(difference.std(ddof=1) / 30**0.5)


def test_whose_assignments_are_dropped() -> None:
    torch.manual_seed(0)
    model: Any = Qwen3VLMoeForConditionalGeneration(picture_model.config()).eval()
    with torch.no_grad():
        for layer in model.model.language_model.layers:
            layer.mlp.gate.weight.normal_(std=0.3)
    batches = [made_up(4)]
    cap = CapacityPolicy(capacity_factor=1, unit="expert", min_expert_load=0)
    shares = {}
    with attach(model, None, 8) as pace:
        base = study.Judge()
        base.run(model, pace, batches)
        for first in ("", "image", "text"):
            pace.policy = cap.replace(drop_first=first)
            judge = study.Judge()
            judge.run(model, pace, batches)
            found = study.summary("cap", base, judge)["dropped"]
            shares[first] = {name: found[name]["share"] for name in ("image", "text")}
            lost = sum(both[0] for layers in judge.dropped.values() for both in layers.values())
            assert lost == sum(s.dropped for layers in judge.layers for s in layers) > 0
            tokens = batches[0].given["attention_mask"].sum()
            of = sum(both[1] for layers in judge.dropped.values() for both in layers.values())
            assert of == tokens * picture_model.TOP_K * picture_model.LAYERS
    assert shares["image"]["image"] > shares[""]["image"] > shares["text"]["image"]
    assert shares["image"]["text"] < shares[""]["text"] < shares["text"]["text"]
    none = study.summary("no cap", base, base)
    assert none["dropped"]["image"]["share"] == none["dropped"]["text"]["share"] == 0
    assert none["accuracy"]["all"]["change"] == 0
    asked = int((batches[0].labels != pictures.IGNORED).sum())
    assert sum(part.sum() for part in base.asked) == asked


def test_the_kept_model_tells_empty_cells_from_full_ones() -> None:
    """On noise too, which is all that can be asked of it without its pictures."""
    model = picture_model.load(ROOT / "research" / "models" / "pictures")
    made = made_up(16, seed=3)
    with torch.no_grad():
        answer = model(**made.given, use_cache=False).logits.argmax(-1)
    place = made.category == list(pictures.CATEGORIES).index("place")
    empty = place & (made.labels == pictures.ID["nothing"])
    right = answer == made.labels
    assert empty.sum() > 10
    assert right[empty].float().mean() > 0.9
    assert (answer[place & ~empty] != pictures.ID["nothing"]).float().mean() > 0.9


def test_the_page_shows_what_is_kept() -> None:
    kept = json.loads((ROOT / "research/results/multimodal.json").read_text(encoding="utf-8"))
    page = study.PAGE.read_text(encoding="utf-8")
    assert f"{study.START}\n\n{study.table(kept)}\n\n{study.END}" in page
    assert len(kept["results"]) == len(study.policies())
