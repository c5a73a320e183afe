"""Perplexity and next tokens under several policies, on the same sequences batched in several ways.

What a cap drops depends on who shares a batch, so the same sequences are run in batches of one text
each, mixed from all texts, or each alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from paceline.batches import Batch, Sampling, check_length, make_batches
from paceline.engines.transformers import attach
from paceline.evaluation.perplexity import Losses, as_dict, change, sequence_losses
from paceline.evaluation.store import Store
from paceline.evaluation.subject import BASELINE, Subject, judged
from paceline.evaluation.tally import Tally
from paceline.progress import Progress

COMPOSITIONS = {
    "one_text": "batches of one text",
    "mixed": "batches mixed from all texts",
    "solo": "every sequence alone",
}
"""Ways to batch the same sequences, and what people call them."""


@dataclass
class _Run:
    """What one policy did to the batches of one composition.

    Attributes:
        losses: by text.
        greedy: text -> most likely next token at every position, [sequences][length - 1].
        tally: loads and drops.
    """

    losses: Losses = field(default_factory=Losses)
    greedy: dict[str, list[list[int]]] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)

    def add(self, batch: Batch, found: Mapping[str, Any]) -> None:
        self.losses.add(batch, found["losses"])
        for source, row in zip(batch.sources, found["greedy"], strict=True):
            self.greedy.setdefault(source, []).append(row)
        self.tally += Tally.from_dict(found["tally"])


def judge_texts(
    subject: Subject,
    texts: Mapping[str, str],
    sampling: Sampling,
    compositions: Sequence[str],
    store: Store,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run the texts under every policy, in every composition; JSON-able.

    Args:
        subject: the model and its policies.
        texts: name -> text.
        sampling: which tokens; its `mix` is not looked at.
        compositions: of COMPOSITIONS; mixing needs two texts and is left out with one.
        store: of batches that have been computed.
        progress: told after every batch.

    Raises:
        ValueError: if a text is too short, a sequence longer than the model reads, a composition
            unknown, or none is left.
    """
    if unknown := [each for each in compositions if each not in COMPOSITIONS]:
        raise ValueError(
            f"composition {unknown[0]!r} is not allowed: it is one of {', '.join(COMPOSITIONS)}."
        )
    check_length(subject.model, sampling.sequence_length)
    wanted = [each for each in compositions if each != "mixed" or len(texts) > 1]
    if not wanted:
        raise ValueError("mixed batches need at least two texts: give another, or a composition.")
    batches, tokens = {}, {}
    for each in wanted:
        rows = 1 if each == "solo" else sampling.batch_size
        drawn = Sampling(sampling.tokens, rows, sampling.sequence_length, each == "mixed")
        batches[each], found = make_batches(subject.tokenizer, texts, drawn)
        tokens = dict(found)
    runs = _run_all(subject, batches, store, progress)
    return {
        "tokens_by_text": tokens,
        "batch_size": sampling.batch_size,
        "sequence_length": sampling.sequence_length,
        "compositions": {
            each: {
                "label": COMPOSITIONS[each],
                "batches": len(batches[each]),
                "policies": [
                    {
                        "name": name,
                        **_described(run, of_policy[BASELINE]),
                        **_against_solo(run, runs.get("solo", {}).get(name), each),
                    }
                    for name, run in of_policy.items()
                ],
            }
            for each, of_policy in runs.items()
        },
    }


def _run_all(
    subject: Subject,
    batches: Mapping[str, Sequence[Batch]],
    store: Store,
    progress: Progress | None,
) -> dict[str, dict[str, _Run]]:
    done, steps = 0, len(subject.policies) * sum(map(len, batches.values()))
    print_of = subject.fingerprint()
    runs: dict[str, dict[str, _Run]] = {each: {} for each in batches}
    with attach(
        subject.model,
        None,
        plan=subject.plan,
        calibration=subject.calibration,
        token_source="sequence",
    ) as pace:
        for name, policy in subject.policies.items():
            pace.policy = policy
            for each, chosen in batches.items():
                run = runs[each][name] = _Run()
                for batch in chosen:
                    ids = ["text", *batch.ids.tolist()]
                    judge = partial(_judge, subject.model, batch)
                    run.add(batch, judged(pace, store, print_of, ids, judge))
                    done += 1
                    if progress is not None:
                        progress(done, steps, f"{COMPOSITIONS[each]}: {name}")
    return runs


def _judge(model: Any, batch: Batch) -> dict[str, Any]:
    ids = batch.ids.to(model.device)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        return {
            "losses": sequence_losses(logits, ids),
            "greedy": [row[:-1].argmax(-1).tolist() for row in logits],
        }


def _described(run: _Run, base: _Run) -> dict[str, Any]:
    found = change(base.losses, run.losses)
    ratios = list(found.by_source.values())
    spread = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else None
    return {
        "perplexity": run.losses.perplexity(),
        "perplexity_change": {**as_dict(found), "standard_error_over_texts": spread},
        "changed_next_tokens": _changed(base.greedy, run.greedy),
        **run.tally.shares(),
    }


def _against_solo(run: _Run, alone: _Run | None, composition: str) -> dict[str, Any]:
    """What sharing a batch did under one and the same policy."""
    if alone is None or composition == "solo":
        return {}
    found = change(alone.losses, run.losses)
    return {
        "against_solo": {
            "perplexity_change": as_dict(found),
            "changed_next_tokens": _changed(alone.greedy, run.greedy),
        }
    }


def _changed(base: Mapping[str, list[list[int]]], other: Mapping[str, list[list[int]]]) -> float:
    """Share of positions whose most likely next token differs."""
    pairs = [
        (b, o)
        for source, rows in base.items()
        for before, after in zip(rows, other[source], strict=True)
        for b, o in zip(before, after, strict=True)
    ]
    return sum(b != o for b, o in pairs) / len(pairs)
