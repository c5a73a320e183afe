"""Qwen3-Omni as a whole: what its thinker and its talker, each with experts, are told of tokens."""

from __future__ import annotations

from typing import Any

import multimodal_models as whole
import omni
import pytest
import torch
from torch import Tensor

from paceline import CapacityPolicy, attach

CAP = CapacityPolicy(capacity_factor=0.5, unit="expert", min_expert_load=0, drop_first="image")


def talkers_rows(given: dict[str, Tensor]) -> Tensor:
    """[rows, hidden] that the talker is started with, read by a hook of this module's own."""
    seen: list[Tensor] = []

    def keep(_: Any, __: Any, kwargs: Any) -> None:
        embeds = kwargs["inputs_embeds"]
        if embeds.shape[1] > 1:
            seen.append(embeds.detach().flatten(0, 1).clone())

    hook = omni.build().talker.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with whole.rows_alone(omni.build()):
            omni.speak(given)
    finally:
        hook.remove()
    (found,) = seen
    return found


def test_pictures_and_padding_reach_thinker_and_talker() -> None:
    """Which of the talker's rows are a picture's, is told by the pixels: these change with them."""
    given, of_user = omni.conversation(pictures=(2, 0, 1))
    other = {**given, "pixel_values": given["pixel_values"].flip(-1) * 0.5 + 0.25}
    moved = (talkers_rows(given) - talkers_rows(other)).abs().amax(1) > 1e-6
    assert 0 < moved.sum() == (given["input_ids"] == omni.IMAGE).sum()

    model, calls = omni.build(), []
    with attach(model, CAP, placement=2) as pace:
        pace.watch(lambda layer, inputs, out: calls.append((layer, inputs, out)))
        omni.speak(given)
        layers = pace.layers
    assert {name.split(".")[0] for name in layers} == {"thinker", "talker"}
    thinkers = given["input_ids"].flatten() == omni.IMAGE
    # the talker hears user and answer: 9 places from its start on, up to the first word
    heard = int(of_user.sum(1).max()) + 9
    padded = torch.arange(heard) < (heard - 9 - of_user.sum(1))[:, None]
    for layer in layers:
        prompt, *steps = [(inputs, out) for name, inputs, out in calls if name == layer]
        talks = layer.startswith("talker")
        real = ~padded.flatten() if talks else given["attention_mask"].bool().flatten()
        pictures = moved if talks else thinkers
        assert torch.equal(prompt[0].valid, real)
        assert torch.equal(prompt[0].token_priority < 0, pictures)
        kept, ids = prompt[1].kept, prompt[0].topk_ids
        assert not kept[~real].any()
        lost, used = ~kept & (real & ~pictures)[:, None], kept & pictures[:, None]
        assert not kept[real].all()
        assert not set(ids[lost].tolist()) & set(ids[used].tolist())
        assert len(steps) == (3 if talks else 5)
        for inputs, _ in steps:  # what is written and said is text
            assert inputs.topk_ids.shape[0] == 3
            assert inputs.token_priority is None or not (inputs.token_priority < 0).any()


def test_a_talker_alone_is_refused_what_nobody_tells() -> None:
    talker = omni.build().talker
    hidden = talker.config.text_config.hidden_size
    given = {"inputs_embeds": torch.randn(2, 8, hidden), "attention_mask": torch.ones(2, 8).long()}
    with attach(talker, CAP), torch.no_grad(), pytest.raises(RuntimeError, match="token_modality"):
        talker(**given)
    types = torch.zeros((2, 8), dtype=torch.long)
    types[:, 2:5] = whole.KINDS["image"]
    seen: list[Tensor] = []
    with attach(talker, CAP, token_modality=types) as pace, torch.no_grad():
        pace.watch(lambda _, inputs, __: seen.append(inputs.token_priority < 0))
        talker(**given)
    assert seen
    assert all(torch.equal(first, types.flatten() == 1) for first in seen)


def test_a_cap_that_cannot_bind_says_the_same() -> None:
    given, _ = omni.conversation(pictures=(1, 2))
    before = omni.speak(given)
    with attach(omni.build(), CAP.replace(capacity_factor=1e9), placement=2):
        within = omni.speak(given)
    assert torch.equal(before[0], within[0])
    assert all(torch.equal(a, b) for a, b in zip(before[1], within[1], strict=True))
