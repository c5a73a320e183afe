"""Batches of token sequences: of one text each, mixed from all texts, or of prompts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.numbers import check_count


@dataclass(frozen=True)
class Sequences:
    """Token sequences of equal length from one text.

    Attributes:
        source: name of the text.
        ids: [sequences, length] int64.
    """

    source: str
    ids: Tensor


@dataclass(frozen=True)
class Batch:
    """A batch of sequences and where each row comes from.

    Attributes:
        ids: [rows, length] int64.
        sources: name of each row's text, [rows].
        given: further arguments of the model's forward by name: a mask [rows, length], pictures.
    """

    ids: Tensor
    sources: tuple[str, ...]
    given: Mapping[str, Tensor] = field(default_factory=dict)


def cut(source: str, token_ids: Sequence[int], length: int, limit: int | None = None) -> Sequences:
    """Cut a text into sequences of `length` tokens; a shorter rest at the end is not used.

    A text shorter than `length` gives one shorter sequence. At most `limit` sequences.

    Raises:
        ValueError: if the text has fewer than two tokens.

    >>> cut("some text", [5, 6, 7, 8, 9], length=2).ids.tolist()
    [[5, 6], [7, 8]]
    """
    check_count("length", length, 2)
    if limit is not None:
        check_count("limit", limit)
    if len(token_ids) < 2:
        raise ValueError(
            f"{source} must give at least two tokens of the tokenizer, got {len(token_ids)}."
        )
    length = min(length, len(token_ids))
    count = len(token_ids) // length
    count = count if limit is None else min(count, limit)
    ids = torch.tensor(token_ids[: count * length], dtype=torch.int64).view(count, length)
    return Sequences(source, ids)


def separate(parts: Sequence[Sequences], rows: int) -> list[Batch]:
    """Return batches of up to `rows` sequences, each of one text only.

    >>> [len(b.ids) for b in separate([cut("a", [1, 2, 3, 4, 5, 6], length=2)], rows=2)]
    [2, 1]
    """
    check_count("rows", rows)
    return [
        Batch(chunk, (part.source,) * len(chunk))
        for part in parts
        for chunk in torch.split(part.ids, rows)
    ]


def mixed(parts: Sequence[Sequences], rows: int) -> list[Batch]:
    """Return batches of the sequences in turn of every text, so that all batches are alike.

    Raises:
        ValueError: if the texts were cut into sequences of different lengths.

    >>> mixed([cut("a", [1, 2], 2), cut("b", [3, 4], 2)], rows=2)[0].sources
    ('a', 'b')
    """
    check_count("rows", rows)
    if not parts:
        raise ValueError("parts must have at least one text, got none.")
    lengths = sorted({part.ids.shape[1] for part in parts})
    if len(lengths) > 1:
        raise ValueError(
            f"mixed batches need sequences of one length, got {lengths[0]} to {lengths[-1]} "
            "tokens: give longer texts."
        )
    longest = max(len(part.ids) for part in parts)
    dealt = [
        (part.ids[turn], part.source)
        for turn in range(longest)
        for part in parts
        if turn < len(part.ids)
    ]
    return [
        Batch(
            torch.stack([ids for ids, _ in dealt[start : start + rows]]),
            tuple(source for _, source in dealt[start : start + rows]),
        )
        for start in range(0, len(dealt), rows)
    ]


def tokens_by_source(parts: Sequence[Sequences]) -> Mapping[str, int]:
    """Count the tokens used of each text.

    >>> tokens_by_source([cut("a", [1, 2, 3, 4, 5], length=2)])
    {'a': 4}
    """
    return {part.source: part.ids.numel() for part in parts}


def check_length(model: Any, length: int) -> None:
    """Check that a model can read sequences of a length.

    Raises:
        ValueError: naming the length and the most that the model's config allows.
    """
    config = model.config.get_text_config() if hasattr(model, "config") else None
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and length > limit:
        raise ValueError(
            f"sequences must have at most {limit} tokens for this model, got {length}."
        )


_CHARACTERS = 64  # more than a token has on average, in any text


@dataclass(frozen=True)
class Sampling:
    """Choice of tokens to run, and their batches.

    Attributes:
        tokens: most of all texts together, shared equally by them.
        batch_size: sequences per batch.
        sequence_length: tokens per sequence.
        mix: True: every batch has sequences of all texts; False: batches of one text.
    """

    tokens: int = 16384
    batch_size: int = 16
    sequence_length: int = 256
    mix: bool = False

    def __post_init__(self) -> None:
        for name, least in (("tokens", 2), ("batch_size", 1), ("sequence_length", 2)):
            check_count(name, getattr(self, name), least)


def make_batches(
    tokenizer: Any, texts: Mapping[str, str], sampling: Sampling
) -> tuple[list[Batch], Mapping[str, int]]:
    """Return batches of the texts, and the tokens used of each.

    Raises:
        ValueError: if a text is empty, or mixing needs longer texts.
    """
    if not texts:
        raise ValueError("texts must have at least one text, got none.")
    share = max(2, sampling.tokens // len(texts))
    parts: list[Sequences] = []
    for name, text in texts.items():
        start = text[: _CHARACTERS * share]  # a huge file is not tokenised to its end
        ids = tokenizer(start, add_special_tokens=False, verbose=False)["input_ids"]
        parts.append(cut(name, ids[:share], sampling.sequence_length))
    deal = mixed if sampling.mix else separate
    return deal(parts, sampling.batch_size), tokens_by_source(parts)


def prompt_batches(tokenizer: Any, prompts: Sequence[str], rows: int) -> list[Batch]:
    """Return batches of up to `rows` prompts, padded on the left, with their attention mask.

    Raises:
        ValueError: if a prompt gives no tokens.
    """
    check_count("rows", rows)
    tokens = [tokenizer(prompt, verbose=False)["input_ids"] for prompt in prompts]
    if not all(tokens):
        raise ValueError("a prompt gives no tokens.")
    batches = []
    for start in range(0, len(tokens), rows):
        some = tokens[start : start + rows]
        spare = [max(map(len, some)) - len(row) for row in some]
        ids = [[padding_token(tokenizer)] * n + row for n, row in zip(spare, some, strict=True)]
        mask = [[0] * n + [1] * len(row) for n, row in zip(spare, some, strict=True)]
        given = {"attention_mask": torch.tensor(mask)}
        batches.append(Batch(torch.tensor(ids), ("prompts",) * len(some), given))
    return batches


def padding_token(tokenizer: Any) -> int:
    """Return the id of the token that pads a batch."""
    return tokenizer.pad_token_id or tokenizer.eos_token_id or 0


def run_batch(model: Any, batch: Batch) -> None:
    """Run a batch through a model for the loads of its layers, without its logits.

    A model that can leave logits out does so, which saves its largest buffer.
    """
    arguments = {"input_ids": batch.ids, **batch.given}
    few = "logits_to_keep" in inspect.signature(model.forward).parameters
    with torch.no_grad():
        model(
            **{name: value.to(model.device) for name, value in arguments.items()},
            use_cache=False,
            **({"logits_to_keep": 1} if few else {}),
        )
