"""Images through whole multimodal models: their tokens are known, counted, and dropped first."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from model_runs import capacity, counted, kept_slots, output

from paceline import CapacityPolicy, attach

IMAGE, VIDEO, START, END = 120, 121, 122, 123
CAP = CapacityPolicy(capacity_factor=0.8, unit="expert", min_expert_load=0)


def model_with_images(name: str) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor]:
    """A tiny model, two prompts with an image each, and which of their rows are of an image."""
    model = tiny_models.build(
        name,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        image_start_token_id=START,
        image_end_token_id=END,
    )
    vision = model.config.vision_config
    patch, frames = vision.patch_size, getattr(vision, "temporal_patch_size", 1)
    side = 2 * vision.spatial_merge_size  # patches; 2 x 2 tokens remain of an image
    given = tiny_models.inputs(pad=5)
    given["input_ids"][:, 9] = START
    given["input_ids"][:, 10:14] = IMAGE
    given["input_ids"][:, 14] = END
    rng = torch.Generator().manual_seed(3)
    given["pixel_values"] = torch.randn((2 * side * side, 3 * frames * patch**2), generator=rng)
    given["image_grid_thw"] = torch.tensor([[1, side, side]] * 2)
    is_image = given["input_ids"] == IMAGE
    given["mm_token_type_ids"] = is_image.int()
    return model, given, is_image.flatten()


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "glm4v_moe"])
def test_images_are_dropped_first_and_count_as_tokens(name: str) -> None:
    model, given, is_image = model_with_images(name)
    want = output(model, given)
    blind = output(model, {**given, "pixel_values": -given["pixel_values"]})
    assert not torch.equal(want, blind), "the images don't reach the language model"
    with attach(model):
        assert torch.equal(output(model, given), want)
    tokens = int(given["attention_mask"].sum())
    lost = {}
    for first in ("", "image", "text"):
        with attach(model, CAP.replace(drop_first=first)) as pace:
            kept, layer = kept_slots(pace), pace._layers[0]
            counter, out = counted(model, given)
            stats = pace.stats().layers
        assert out.isfinite().all()
        for s in stats:
            rows = counter.rows(f"{s.name}.experts")
            assert s.tokens == tokens
            assert rows.tolist() == s.expert_loads_after
            assert (rows <= capacity("0.8", tokens, layer.k, 1, len(rows))).all()
        lost[first] = ~kept[0] & given["attention_mask"].flatten().bool().unsqueeze(1)
    assert lost["image"].sum() == lost["text"].sum() == lost[""].sum() > 0
    assert lost["image"][is_image].sum() > lost["text"][is_image].sum()
    assert lost["text"][~is_image].sum() > lost["image"][~is_image].sum()
    assert torch.equal(output(model, given), want)


def test_experts_for_images_alone_have_a_cap_of_their_own(monkeypatch: Any) -> None:
    """ernie4_5_vl_moe gives text and image tokens to experts of their own."""
    name = "ernie4_5_vl_moe"
    monkeypatch.setitem(tiny_models._CLASSES, name, "Ernie4_5_VLMoeForConditionalGeneration")
    rope = {"rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    monkeypatch.setitem(tiny_models._OVERRIDES, name, {"text_config": {"rope_parameters": rope}})
    model, given, is_image = model_with_images(name)
    given["moe_mm_token_type_ids"] = given["mm_token_type_ids"]
    want = output(model, given)
    with attach(model):
        assert torch.equal(output(model, given), want)
    images = int(is_image.sum())
    seen = {"text_moe": int(given["attention_mask"].sum()) - images, "vision_moe": images}
    for pool in ("batch", "request"):
        with attach(model, CAP.replace(pool=pool)) as pace:
            counter, out = counted(model, given)
            stats = pace.stats().layers
        assert out.isfinite().all()
        assert {s.name.split(".")[-1] for s in stats} == set(seen)
        for s, layer in zip(stats, pace._layers, strict=True):
            rows, tokens = counter.rows(f"{s.name}.experts"), seen[s.name.split(".")[-1]]
            assert s.tokens == tokens
            assert rows.tolist() == s.expert_loads_after
            if pool == "batch":
                assert (rows <= capacity("0.8", tokens, layer.k, 1, len(rows))).all()
        assert sum(s.dropped for s in stats) > 0
    assert torch.equal(output(model, given), want)
