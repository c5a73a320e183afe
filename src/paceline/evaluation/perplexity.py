"""Token-level perplexity on fixed batches, paired with a baseline on the same sequences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.batches import Batch


@dataclass
class Losses:
    """Negative log-likelihoods (nats) of each sequence, by text; all sequences in batch order.

    Attributes:
        sums: text -> summed loss of each of its sequences.
        tokens: text -> predicted tokens of each of its sequences.
    """

    sums: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def add(self, batch: Batch, losses: Sequence[float]) -> None:
        """Book the summed loss of every row of a batch, [rows]."""
        for source, loss in zip(batch.sources, losses, strict=True):
            self.sums.setdefault(source, []).append(loss)
            self.tokens.setdefault(source, []).append(batch.ids.shape[1] - 1)

    def perplexity(self) -> dict[str, float]:
        """exp(mean loss per predicted token) of each text."""
        return {
            source: math.exp(math.fsum(sums) / sum(self.tokens[source]))
            for source, sums in self.sums.items()
        }

    def predicted_tokens(self) -> int:
        return sum(sum(tokens) for tokens in self.tokens.values())


@dataclass(frozen=True)
class Change:
    """Perplexity change against the baseline, as shares (0.01 is +1%).

    Attributes:
        by_source: text -> perplexity / baseline perplexity - 1.
        mean: mean over the texts of the perplexity ratios, minus 1.
        standard_error: of `mean`, from the paired differences between sequences; None with
            fewer than two sequences in some text.
    """

    by_source: dict[str, float]
    mean: float
    standard_error: float | None


def sequence_losses(logits: Tensor, ids: Tensor) -> list[float]:
    """Summed next-token loss of every row in nats.

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
            f"logits has shape {list(logits.shape)}, ids {list(ids.shape)}: allowed is "
            "[rows, length, vocabulary] and [rows, length]."
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
        raise ValueError(f"batch has {', '.join(batch.given)}: allowed are ids alone.")
    with torch.no_grad():
        ids = batch.ids.to(model.device)
        return sequence_losses(model(input_ids=ids, use_cache=False).logits, ids)


def change(base: Losses, other: Losses) -> Change:
    """Compare two runs over the same sequences, paired.

    Raises:
        ValueError: if the two runs did not see the same texts and sequences.
    """
    if base.tokens != other.tokens:
        raise ValueError("base and other saw other sequences: allowed are the same, in order.")
    before, after = base.perplexity(), other.perplexity()
    by_source = {source: after[source] / before[source] - 1 for source in before}
    variances = [
        _variance_of_mean(base.sums[s], other.sums[s], base.tokens[s], 1 + by_source[s])
        for s in by_source
    ]
    known = [v for v in variances if v is not None]
    error = math.sqrt(math.fsum(known)) / len(known) if len(known) == len(variances) else None
    return Change(by_source, statistics.fmean(by_source.values()), error)


def _variance_of_mean(
    base: Sequence[float], other: Sequence[float], tokens: Sequence[int], ratio: float
) -> float | None:
    """Variance of a text's perplexity ratio (delta method on the mean paired difference)."""
    if len(base) < 2:
        return None
    differences = [(b - a) / n for a, b, n in zip(base, other, tokens, strict=True)]
    return ratio**2 * statistics.variance(differences) / len(differences)


def as_dict(result: Change) -> Mapping[str, Any]:
    """JSON-able form of a `Change`."""
    return {
        "by_domain": result.by_source,
        "mean": result.mean,
        "standard_error": result.standard_error,
    }
