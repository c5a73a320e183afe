"""Scripts that texts leave out are named, in the order of their tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paceline.calibration.scripts import scripts_left_out
from paceline.demo.assets import domains, read_text
from paceline.shipped import MODEL_FOLDER

LATIN = "the quick brown fox jumps over a lazy dog while seven wizards mix potions "
CYRILLIC = "съешь ещё этих мягких французских булок да выпей чаю и подумай ещё раз "
CHINESE = "我能吞下玻璃而不伤身体天地玄黄宇宙洪荒日月盈昃辰宿列张"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Byte-level, as most are: a token's letters are seen after decoding alone."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator([LATIN * 3, CYRILLIC * 2, CHINESE * 2], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize(
    ("texts", "left"),
    [
        ([LATIN], {"Cyrillic", "CJK"}),
        ([LATIN, CYRILLIC], {"CJK"}),
        ([LATIN + CHINESE + CYRILLIC], set()),
        ([LATIN * 100 + "я"], {"Cyrillic", "CJK"}),  # one letter is no text of a language
    ],
)
def test_scripts_left_out_are_named(tokenizer: Any, texts: list[str], left: set[str]) -> None:
    said = scripts_left_out(tokenizer, texts) or ""
    assert {name for name in ("Latin", "Cyrillic", "CJK") if name in said} == left


def test_the_demo_leaves_out_none() -> None:
    own = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    assert scripts_left_out(own, [read_text(name) for name in domains()]) is None
    assert "Latin" in (scripts_left_out(own, ["1 + 1 = 2"]) or "")
