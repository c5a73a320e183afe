"""Perplexity and next tokens under several policies, paired on the same sequences.

What a cap drops depends on who shares a batch, so `judge_texts` runs the same sequences in batches
of one text each, in batches mixed from all texts, and each alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.batches import Batch, Sampling, check_length, make_batches
from paceline.evaluation.results import (
    AgainstSolo,
    Composition,
    LoadShares,
    PerplexityChange,
    TextRow,
    TextsResult,
)
from paceline.evaluation.subject import BASELINE, Store, Subject, run_or_read
from paceline.progress import Progress

COMPOSITIONS = {
    "one_text": "batches of one text",
    "mixed": "batches mixed from all texts",
    "solo": "every sequence alone",
}
"""Ways to batch the same sequences, and their names for people."""


# -- losses ----------------------------------------------------------------------------------------


@dataclass
class Losses:
    """Negative log-likelihoods (nats) of each sequence, by text; all sequences in batch order.

    Attributes:
        sums: text -> summed loss of each of its sequences.
        tokens: text -> predicted tokens of each of its sequences.
    """

    sums: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def add(self, batch: Batch, losses: Sequence[float], tokens: int | None = None) -> None:
        """Add the summed loss of every row of a batch, [rows].

        Args:
            tokens: predicted per row; None: all but the first.
        """
        tokens = batch.ids.shape[1] - 1 if tokens is None else tokens
        for source, loss in zip(batch.sources, losses, strict=True):
            self.sums.setdefault(source, []).append(loss)
            self.tokens.setdefault(source, []).append(tokens)

    def perplexity(self) -> dict[str, float]:
        """Return exp(mean loss per predicted token) of each text."""
        return {
            source: math.exp(math.fsum(sums) / sum(self.tokens[source]))
            for source, sums in self.sums.items()
        }

    def predicted_tokens(self) -> int:
        """Return the number of predicted tokens of all texts."""
        return sum(map(sum, self.tokens.values()))


def sequence_losses(logits: Tensor, ids: Tensor) -> list[float]:
    """Sum the next-token loss of every row, in nats.

    Args:
        logits: [rows, length, vocabulary].
        ids: [rows, length] int64.

    Returns:
        [rows] numbers, each over length - 1 predicted tokens.

    Raises:
        ValueError: if the shapes don't fit.

    >>> losses = sequence_losses(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]]))
    >>> [round(loss, 4) for loss in losses]  # 2 log 4
    [2.7726]
    """
    if logits.shape[:-1] != ids.shape:
        raise ValueError(
            "logits and ids must be [rows, length, vocabulary] and [rows, length], got "
            f"{list(logits.shape)} and {list(ids.shape)}."
        )
    losses = []
    for row_logits, row_ids in zip(logits, ids, strict=True):  # row by row: little memory
        loss = torch.nn.functional.cross_entropy(
            row_logits[:-1].float(), row_ids[1:], reduction="none"
        )
        losses.append(float(loss.double().sum()))
    return losses


def batch_losses(model: Any, batch: Batch) -> list[float]:
    """Run a causal language model on a batch and return each row's summed loss, [rows].

    Raises:
        ValueError: if the batch has more than ids: a loss of padding or of pictures means nothing.
    """
    if batch.given:
        raise ValueError(f"batch must have ids alone, got {', '.join(batch.given)}.")
    ids = batch.ids.to(model.device)
    return sequence_losses(_logits(model, ids), ids)


def _logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def change(base: Losses, other: Losses) -> PerplexityChange:
    """Compare two runs over the same sequences, paired.

    Raises:
        ValueError: if the two runs did not see the same texts and sequences.
    """
    if base.tokens != other.tokens:
        raise ValueError("base and other must be of the same sequences, in the same order.")
    before, after = base.perplexity(), other.perplexity()
    by_text = {source: after[source] / before[source] - 1 for source in before}
    variances = [
        _variance_of_mean(base.sums[s], other.sums[s], base.tokens[s], 1 + by_text[s])
        for s in by_text
    ]
    known = [v for v in variances if v is not None]
    error = math.sqrt(math.fsum(known)) / len(known) if len(known) == len(variances) else None
    changes = list(by_text.values())
    over_texts = statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else None
    return PerplexityChange(
        by_domain=by_text,
        mean=statistics.fmean(changes),
        standard_error=error,
        standard_error_over_texts=over_texts,
    )


def _variance_of_mean(
    base: Sequence[float], other: Sequence[float], tokens: Sequence[int], ratio: float
) -> float | None:
    """Return the variance of a text's perplexity ratio, by the delta method."""
    if len(base) < 2:
        return None
    differences = [(b - a) / n for a, b, n in zip(base, other, tokens, strict=True)]
    return ratio**2 * statistics.variance(differences) / len(differences)


# -- runs over batches -----------------------------------------------------------------------------


@dataclass
class PolicyRun:
    """Losses and loads of one policy over some batches.

    Attributes:
        losses: negative log-likelihoods by text.
        layers: [batches][layers] `LayerStats`, or `LayerLoads` where they were read back.
        sources: the texts in each batch, [batches].
        greedy: text -> most likely next token at every position, [sequences][length - 1].
    """

    losses: Losses = field(default_factory=Losses)
    layers: list[list[Any]] = field(default_factory=list)
    sources: list[tuple[str, ...]] = field(default_factory=list)
    greedy: dict[str, list[list[int]]] = field(default_factory=dict)

    def add(
        self,
        batch: Batch,
        losses: Sequence[float],
        layers: Sequence[Any],
        greedy: Sequence[list[int]] = (),
    ) -> None:
        """Add one batch, with the most likely next tokens of its rows where they are known."""
        self.losses.add(batch, losses, len(greedy[0]) if greedy else None)
        for source, row in zip(batch.sources, greedy, strict=bool(greedy)):
            self.greedy.setdefault(source, []).append(row)
        self.layers.append(list(layers))
        self.sources.append(tuple(dict.fromkeys(batch.sources)))

    def all_layers(self) -> list[Any]:
        """Return the layers of all batches in one list."""
        return [layer for batch in self.layers for layer in batch]

    def shares(self) -> LoadShares:
        """Return balance and drops over all batches and layers."""
        return LoadShares.of(self.all_layers())


def run_policy(
    model: Any, pace: Any, policy: Any, batches: Sequence[Batch], step: Callable[[], None]
) -> PolicyRun:
    """Run an attached model over the batches under a policy; `step` is called after each."""
    pace.policy = policy
    run = PolicyRun()
    for batch in batches:
        pace.reset_stats()
        losses = batch_losses(model, batch)
        run.add(batch, losses, pace.stats().layers)
        step()
    return run


def judge_texts(
    subject: Subject,
    texts: Mapping[str, str],
    sampling: Sampling,
    compositions: Sequence[str],
    store: Store,
    progress: Progress | None = None,
) -> TextsResult:
    """Run the texts under every policy, in every composition.

    Args:
        texts: name -> text.
        sampling: its `mix` is not read.
        compositions: of COMPOSITIONS; mixing needs two texts and is left out with one.

    Raises:
        ValueError: if a text is too short, a sequence longer than the model reads, a composition
            unknown, or none is left.
    """
    if unknown := [each for each in compositions if each not in COMPOSITIONS]:
        raise ValueError(f"composition must be of {', '.join(COMPOSITIONS)}, got {unknown[0]!r}.")
    check_length(subject.model, sampling.sequence_length)
    possible = [each for each in compositions if each != "mixed" or len(texts) > 1]
    if not possible:
        raise ValueError("mixed batches need at least two texts: give another, or a composition.")
    batches, tokens = {}, {}
    for each in possible:
        rows = 1 if each == "solo" else sampling.batch_size
        drawn = Sampling(sampling.tokens, rows, sampling.sequence_length, each == "mixed")
        batches[each], found = make_batches(subject.tokenizer, texts, drawn)
        tokens = dict(found)
    runs = run_all(subject, batches, store, progress)
    solo = runs.get("solo", {})
    return TextsResult(
        tokens_by_text=tokens,
        batch_size=sampling.batch_size,
        sequence_length=sampling.sequence_length,
        compositions={
            each: Composition(
                label=COMPOSITIONS[each],
                batches=len(batches[each]),
                policies=[
                    _row(name, run, by_policy[BASELINE], None if each == "solo" else solo.get(name))
                    for name, run in by_policy.items()
                ],
            )
            for each, by_policy in runs.items()
        },
    )


def run_all(
    subject: Subject,
    batches: Mapping[str, Sequence[Batch]],
    store: Store,
    progress: Progress | None,
    judge: Judge | None = None,
) -> dict[str, dict[str, PolicyRun]]:
    """Run batches under every policy, or read what an earlier run found.

    Args:
        batches: way to batch -> its batches.
        store: of results.
        judge: how a batch is run; None: `at_once`.

    Returns:
        Way to batch -> policy -> its run.
    """
    judge = judge or at_once
    done, steps = 0, len(subject.policies) * sum(map(len, batches.values()))
    fingerprint = subject.fingerprint()
    runs: dict[str, dict[str, PolicyRun]] = {each: {} for each in batches}
    with subject.attach() as pace:
        for name, policy in subject.policies.items():
            pace.policy = policy
            for each, chosen in batches.items():
                run = runs[each][name] = PolicyRun()
                for batch in chosen:
                    key = [judge.__name__, *batch.ids.tolist()]
                    found = partial(judge, pace, subject.model, batch)
                    (losses, greedy), layers = run_or_read(pace, store, fingerprint, key, found)
                    run.add(batch, losses, layers, greedy)
                    done += 1
                    if progress is not None:
                        progress(done, steps, f"{COMPOSITIONS[each]}: {name}")
    return runs


Judge = Callable[[Any, Any, Batch], tuple[list[float], list[list[int]]]]
"""Function of the handle, the model and a batch: every row's summed loss and next tokens."""


def at_once(_pace: Any, model: Any, batch: Batch) -> tuple[list[float], list[list[int]]]:
    """Run a batch in one forward, as prompts are."""
    ids = batch.ids.to(model.device)
    logits = _logits(model, ids)
    return sequence_losses(logits, ids), [row[:-1].argmax(-1).tolist() for row in logits]


def _row(name: str, run: PolicyRun, base: PolicyRun, alone: PolicyRun | None) -> TextRow:
    beside_solo = None
    if alone is not None:
        beside_solo = AgainstSolo(
            perplexity_change=change(alone.losses, run.losses),
            changed_next_tokens=changed_tokens(alone.greedy, run.greedy),
        )
    return TextRow(
        name=name,
        perplexity=run.losses.perplexity(),
        perplexity_change=change(base.losses, run.losses),
        changed_next_tokens=changed_tokens(base.greedy, run.greedy),
        against_solo=beside_solo,
        **run.shares().to_dict(),
    )


def changed_tokens(
    base: Mapping[str, list[list[int]]], other: Mapping[str, list[list[int]]]
) -> float:
    """Return the share of positions whose most likely next token differs."""
    pairs = [
        (b, o)
        for source, rows in base.items()
        for before, after in zip(rows, other[source], strict=True)
        for b, o in zip(before, after, strict=True)
    ]
    return sum(b != o for b, o in pairs) / len(pairs)
