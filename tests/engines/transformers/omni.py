"""A tiny Qwen3-Omni that answers in speech: thinker and talker, which both have experts."""

from __future__ import annotations

import functools
from typing import Any

import multimodal_models as whole
import tiny_models
import torch
from torch import Tensor

IMAGE, AUDIO, VIDEO, PADDING, END = 124, 126, 123, 0, 60
START, USER, ASSISTANT = 110, 111, 112
_PLACEHOLDERS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "audio_token_id": AUDIO,
    "vision_start_token_id": 101,
    "audio_start_token_id": 127,
}
_TALKER = {
    "thinker_hidden_size": 32,
    "accept_hidden_layer": 1,
    "spatial_merge_size": 2,
    "num_code_groups": 2,
    "speaker_id": {"ethan": 90},
    "codec_eos_token_id": END,
    "codec_nothink_id": 61,
    "codec_think_bos_id": 62,
    "codec_think_eos_id": 63,
    "codec_pad_id": 64,
    "codec_bos_id": 65,
    "code_predictor_config": {"num_code_groups": 2, "vocab_size": 128},
    "text_config": {
        "vocab_size": 1200,
        "shared_expert_intermediate_size": 16,
        "intermediate_size": 16,
    },
}
_SPEECH = {
    "num_quantizers": 2,
    "codebook_size": 128,
    "upsample_rates": [2, 2],
    "upsampling_ratios": [2],
    "decoder_dim": 32,
}


@functools.lru_cache(maxsize=1)
def build() -> Any:
    """Thinker, talker and what makes sound of its codes; a test must leave it as it found it."""
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni

    cls = omni.Qwen3OmniMoeForConditionalGeneration
    config = tiny_models._nested(
        cls.config_class,
        {
            "thinker_config": {**whole.WHOLE["qwen3_omni_moe"].overrides, **_PLACEHOLDERS},
            "talker_config": {**_TALKER, **_PLACEHOLDERS},
            "code2wav_config": _SPEECH,
            "im_start_token_id": START,
            "user_token_id": USER,
            "assistant_token_id": ASSISTANT,
            "system_token_id": 113,
            "tts_pad_token_id": 114,
            "tts_bos_token_id": 115,
            "tts_eos_token_id": 116,
        },
    )
    torch.manual_seed(0)
    model = cls(config)
    tiny_models.randomize(model, 0)
    return model.eval()


def conversation(pictures: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
    """Rows with a system's words, a user's with so many pictures, and the start of an answer.

    Returns:
        Arguments of `generate`, and [batch, length] bool of what a user's turn holds.
    """
    rng = torch.Generator().manual_seed(1)
    shown = whole._patches(build().thinker, sum(pictures), rng)
    each = int(shown["image_grid_thw"][0].prod()) // 4  # patches of 2 x 2 are a token
    rows, users = [], []
    for count in pictures:
        system = [START, 113, 20, 21, 109]
        user = [START, USER, 5, 6, *[101, *[IMAGE] * each, 102, 7] * count, 8, 9, 109]
        answer = [START, ASSISTANT, 10]
        rows.append([*system, *user, *answer])
        users.append([False] * len(system) + [True] * len(user) + [False] * len(answer))
    length = max(map(len, rows))
    ids = torch.tensor([[PADDING] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    of_user = torch.tensor([[False] * (length - len(row)) + row for row in users])
    return {"input_ids": ids, "attention_mask": mask, **shown}, of_user


def speak(given: dict[str, Any], words: int = 6, codes: int = 4) -> tuple[Tensor, Any]:
    """What it writes and what it says."""
    return build().generate(
        **given, thinker_max_new_tokens=words, thinker_min_new_tokens=words, thinker_eos_token_id=2,
        talker_max_new_tokens=codes, talker_do_sample=False,
    )  # type: ignore[no-any-return]  # fmt: skip
