"""Every multimodal MoE package of Transformers as a whole: its layers know padding and modality.

Which rows of an expert's input are a picture's, is told by the pixels: these rows change with them
while no token sees another (`multimodal_models.rows_of_pixels`). Nothing of Paceline takes part.
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import multimodal_models as whole
import pytest
import tiny_models
import torch
from model_runs import capacity, counted, first_tier, model_of
from torch import Tensor

from paceline import CapacityPolicy, attach
from paceline.engines.transformers.state import UnknownTokensWarning

CAP = CapacityPolicy(capacity_factor=0.5, unit="expert", min_expert_load=0, drop_first="image")
READ_PICTURES = [name for name, model in whole.WHOLE.items() if model.pictures is not None]
READ_SOUNDS = [name for name, model in whole.WHOLE.items() if model.sounds is not None]
READ_VIDEOS = [
    name
    for name in READ_PICTURES
    if "pixel_values_videos" in inspect.signature(whole.model_class(name).forward).parameters
]
# glm4v_moe takes every placeholder for a picture's and a video's when it is given both; hy_v4_vl
# ends rows of both with the same learned token, so that pixels don't tell whose it is
ALIKE = ("glm4v_moe", "hy_v4_vl")
# its canvas is no part of the text, and is refined in place instead of being continued
CONTINUE = [name for name in READ_PICTURES if name != "diffusion_gemma"]
# token types; patches beside a grid; experts in a tower and sounds; experts per modality
FIRST = {"deepseek_ocr2", "qwen3_vl_moe", "dots3_note", "ernie4_5_vl_moe"}

LEFT_OUT = {
    "llama4": "attach refuses its experts",
    "vitpose_backbone": "attach refuses its experts, and it reads no text",
}


def test_no_package_is_forgotten() -> None:
    """Those that take another package's language model, kimi_k25 and nemotron's, come on top."""
    found = set()
    for package in tiny_models.architectures():
        file = importlib.import_module(f"transformers.models.{package}.modeling_{package}").__file__
        if re.search(r"pixel_values|input_features", Path(str(file)).read_text()):
            found.add(package)
    assert found - set(LEFT_OUT) == set(whole.WHOLE) - {"kimi_k25", "nemotron3_5_transcribe"}


class Seen:
    """What routing was told of every layer's rows, and what it kept, forward by forward."""

    def __init__(self, pace: Any) -> None:
        self.calls: list[tuple[str, Any, Any]] = []
        pace.watch(lambda layer, inputs, out: self.calls.append((layer, inputs, out)))

    def of(self, layer: str) -> list[tuple[Any, Any]]:
        return [(inputs, out) for name, inputs, out in self.calls if name == layer]


def told(inputs: Any) -> tuple[Tensor, Tensor]:
    """[rows] which are real and which are dropped first, as routing was told."""
    rows = inputs.topk_ids.shape[0]
    valid = torch.ones(rows, dtype=torch.bool) if inputs.valid is None else inputs.valid
    priority = inputs.token_priority
    return valid, torch.zeros(rows, dtype=torch.bool) if priority is None else priority < 0


def check_order(inputs: Any, out: Any, first: Tensor, real: Tensor) -> None:
    """An expert that dropped another token computes none of the first; padding is not computed."""
    k = inputs.topk_ids.shape[1]
    kept, ids = out.kept[:, :k], inputs.topk_ids
    assert not kept[~real].any()
    assert not kept.all(), "nothing was dropped, so nothing is shown"
    lost, used = ~kept & (real & ~first).unsqueeze(1), kept & first.unsqueeze(1)
    assert not set(ids[lost].tolist()) & set(ids[used].tolist())


def check_prompt(package: str, prompt: whole.Prompt, kind: str, pixels: str) -> None:
    """Under `drop_first=kind` every layer is told these rows, and drops them first."""
    model = whole.build(package)
    of_pixels = whole.rows_of_pixels(model, prompt.given, pixels)
    real = prompt.given["attention_mask"].bool().flatten()
    with attach(model, CAP.replace(drop_first=kind)) as pace, torch.no_grad():
        seen = Seen(pace)
        model(**prompt.given)
        stats = {s.name: s for s in pace.stats().layers}
    assert {layer for layer, *_ in seen.calls} == {n.removesuffix(".experts") for n in of_pixels}
    known, towers = 0, len(set(whole.PIXELS) & set(prompt.given))
    for name, changed in of_pixels.items():
        layer = name.removesuffix(".experts")
        calls = seen.of(layer)
        if "vision_tower" in layer:  # reads pictures, then videos
            assert len(calls) == towers
            assert [told(inputs)[1].all() for inputs, _ in calls].count(True) == 1
            assert sum(int(told(inputs)[1].sum()) for inputs, _ in calls) == len(changed)
            continue
        [(inputs, out)] = calls
        valid, first = told(inputs)
        assert torch.equal(first, changed)
        if len(changed) != len(real):
            continue  # a canvas, or experts for one modality alone
        known += 1
        assert torch.equal(changed, prompt.of(kind))
        assert torch.equal(valid, real)
        check_order(inputs, out, first, real)
        assert stats[layer].tokens == int(real.sum())
    assert known or package == "ernie4_5_vl_moe"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("package", first_tier(READ_PICTURES, FIRST))
def test_several_pictures_beside_padding(package: str, side: str) -> None:
    prompt = whole.prompt(package, image=(2, 0, 1), side=side)
    check_prompt(package, prompt, "image", "pixel_values")


@pytest.mark.parametrize("package", first_tier(READ_VIDEOS, FIRST))
def test_videos_are_told_from_pictures(package: str) -> None:
    both = package not in ALIKE
    prompt = whole.prompt(package, image=(1, 0, 1) if both else (0, 0, 0), video=(1, 1, 0))
    check_prompt(package, prompt, "video", "pixel_values_videos")
    if both:
        check_prompt(package, prompt, "image", "pixel_values")


@pytest.mark.parametrize("package", first_tier(READ_SOUNDS, FIRST))
def test_sounds(package: str) -> None:
    prompt = whole.prompt(package, audio=(2, 0, 1))
    check_prompt(package, prompt, "audio", next(n for n in whole.PIXELS if n in prompt.given))


@pytest.mark.parametrize("package", first_tier(CONTINUE, FIRST))
def test_tokens_generated_behind_pictures_are_text(package: str) -> None:
    model, prompt = whole.build(package), whole.prompt(package, image=(2, 0, 1))
    with attach(model, CAP) as pace:
        seen = Seen(pace)
        model.generate(**prompt.given, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        layers = [layer for layer in pace.layers if "vision_tower" not in layer]
    for layer in layers:
        prefill, *steps = seen.of(layer)
        assert len(told(prefill[0])[1]) in (prompt.types.numel(), *map(int, _parts_of(prompt)))
        assert int(told(prefill[0])[1].sum()) in (int(prompt.of("image").sum()), 0)
        assert steps or layer.endswith("vision_moe")
        for inputs, _ in steps:
            valid, first = told(inputs)
            assert len(valid) in (0, len(prompt.types))
            assert valid.all()
            assert not first.any()


def _parts_of(prompt: whole.Prompt) -> tuple[Tensor, Tensor]:
    """Tokens of pictures, and all others: what experts of one modality see."""
    images = prompt.of("image").sum()
    return images, prompt.types.numel() - images


@pytest.mark.parametrize("package", first_tier(CONTINUE, FIRST))
def test_a_prompt_in_two_parts(package: str) -> None:
    """Each part has pictures; the second one comes behind the first one's cache."""
    model, prompt = (
        whole.build(package),
        whole.prompt(package, image=(2, 2), video=(0, 0), audio=(0, 0)),
    )
    is_image = prompt.of("image").reshape(prompt.types.shape)
    at = int((is_image[0].int().diff() == -1).nonzero()[0]) + 3
    halves = is_image[:, :at].flatten(), is_image[:, at:].flatten()
    assert all(half.any() for half in halves)
    with attach(model, CAP) as pace, torch.no_grad():
        seen, cache = Seen(pace), None
        for part in whole.parts(model, prompt, at):
            cache = model(**part, use_cache=True, past_key_values=cache).past_key_values
        layers = [layer for layer in pace.layers if "vision_tower" not in layer]
    for layer in layers:
        for (inputs, out), images in zip(seen.of(layer), halves, strict=True):
            valid, first = told(inputs)
            assert valid.all()
            if len(first) == len(images):
                assert torch.equal(first, images)
                check_order(inputs, out, images, valid)
            else:
                assert first.all() == layer.endswith("vision_moe")


@pytest.mark.parametrize(
    "package",
    first_tier([p for p in CONTINUE if p != "gemma4"], FIRST),  # refuses them itself
)
def test_embeddings_alone_are_told_by_labels_or_refused(package: str) -> None:
    model, prompt = whole.build(package), whole.prompt(package, image=(2, 0, 1))
    given = whole.embedded(model, prompt)
    with attach(model, CAP), torch.no_grad(), pytest.raises(RuntimeError, match="token_modality"):
        model(**given)
    labels = {"token_modality": prompt.types}
    with attach(model, CAP, **labels) as pace, torch.no_grad():
        seen = Seen(pace)
        model(**given)
    assert seen.calls
    for _, inputs, out in seen.calls:
        valid, first = told(inputs)
        assert torch.equal(first, prompt.of("image"))
        check_order(inputs, out, first, valid)


def test_a_tower_of_experts_reads_pictures_alone() -> None:
    """dots3_note's vision tower has experts: its rows are patches, and never generated."""
    model, prompt = whole.build("dots3_note"), whole.prompt("dots3_note", image=(2, 0, 1))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", UnknownTokensWarning)
        with attach(model, CAP.replace(phase="prefill")) as pace:
            model(**prompt.given)
            stats = {s.name: s for s in pace.stats().layers}
    towers = [s for name, s in stats.items() if "vision_tower" in name]
    assert [s.tokens for s in towers] == [len(prompt.given["pixel_values"])] * 2
    assert all(s.dropped for s in towers)
    request = CAP.replace(pool="request", drop_first="")
    with attach(model, request), torch.no_grad(), pytest.raises(RuntimeError, match="request"):
        model(**prompt.given)


@pytest.mark.parametrize("pool", ["batch", "request"])
def test_experts_of_one_modality_have_a_cap_of_their_own(pool: str) -> None:
    """ernie4_5_vl_moe gives text and image tokens to experts of their own."""
    package = "ernie4_5_vl_moe"
    model, prompt = whole.build(package), whole.prompt(package, image=(2, 0, 1))
    images = int(prompt.of("image").sum())
    tokens = {"text_moe": int(prompt.given["attention_mask"].sum()) - images, "vision_moe": images}
    with attach(model, CAP.replace(pool=pool, drop_first="")) as pace:
        counter, out = counted(model, prompt.given)
        stats = pace.stats().layers
    assert out.isfinite().all()
    assert {s.name.split(".")[-1] for s in stats} == set(tokens)
    for s in stats:
        rows, seen = counter.rows(f"{s.name}.experts"), tokens[s.name.split(".")[-1]]
        assert s.tokens == seen
        assert rows.tolist() == s.expert_loads_after
        k = s.assignments // seen
        assert pool == "request" or (rows <= capacity("0.5", seen, k, 1, len(rows))).all()
    assert sum(s.dropped for s in stats) > 0


def test_a_text_model_that_others_feed_with_pictures_is_told_by_labels() -> None:
    """Pictures put into the embeddings of a model that knows nothing of pictures."""
    model, given = model_of("olmoe"), tiny_models.inputs(pad=5)
    types = torch.zeros_like(given["input_ids"])
    types[:, 8:14] = whole.KINDS["image"]
    embeds = model.get_input_embeddings()(given["input_ids"]).detach()
    given = {"inputs_embeds": embeds, "attention_mask": given["attention_mask"]}
    with pytest.raises(ValueError, match="text alone"):
        attach(model, CAP)
    with attach(model, CAP, token_modality=lambda *_: types) as pace, torch.no_grad():
        seen = Seen(pace)
        model(**given)
    for _, inputs, out in seen.calls:
        assert torch.equal(told(inputs)[1], types.flatten() == 1)
        check_order(inputs, out, *reversed(told(inputs)))
    short = attach(model, CAP, token_modality=types[:, :5])
    with short, torch.no_grad(), pytest.raises(ValueError, match="token_modality must have shape"):
        model(**given)
    text = attach(model, CAP, token_modality=types.float())
    with text, torch.no_grad(), pytest.raises(ValueError, match="integer"):
        model(**given)
