"""What lm-evaluation-harness says of single samples: a figure and an answer of each."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.evaluation.paired import Difference, difference
from paceline.evaluation.suite import CLUSTERS

PRIMARY = ("acc_norm", "acc", "exact_match", "byte_perplexity", "word_perplexity")
"""The metric that a task is judged by: the first of these that it has, else its own first."""

PERPLEXITIES = ("byte_perplexity", "word_perplexity", "bits_per_byte")
"""Metrics whose samples are (log-likelihood, bytes or words)."""


@dataclass
class Scores:
    """The samples of a task, or of all tasks of a group, in order.

    Attributes:
        metric: that they are judged by.
        filter: what the harness makes of a response before it is judged.
        values: of the metric; of a perplexity the negative log-likelihood, [samples].
        weights: 1 each; of a perplexity bytes or words, [samples].
        clusters: samples of the same text share one, [samples].
        answers: what the model chose, wrote, or None where that says nothing, [samples].
        prompts: hash of each, [samples].
    """

    metric: str
    filter: str
    values: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    clusters: list[Hashable] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)

    @property
    def is_perplexity(self) -> bool:
        """Whether lower is better, and a change is a share."""
        return self.metric in PERPLEXITIES

    @property
    def score(self) -> float:
        """Mean of the metric over samples, as the harness defines it."""
        mean = math.fsum(self.values) / math.fsum(self.weights)
        if self.metric == "bits_per_byte":
            return mean / math.log(2)
        return math.exp(mean) if self.is_perplexity else mean

    def against(self, base: Scores) -> Difference:
        """Mean difference to another run; of a perplexity the change of its logarithm.

        Raises:
            RuntimeError: if the other run saw other samples.
        """
        if base.prompts != self.prompts:
            raise RuntimeError("two runs saw other prompts: they can't be compared.")
        return difference(base.values, self.values, self.clusters, self.weights)

    def changed(self, base: Scores) -> int | None:
        """Samples whose answer differs from the other run's; None where there are no answers."""
        if all(answer is None for answer in self.answers):
            return None
        return sum(bool(a != b) for a, b in zip(self.answers, base.answers, strict=True))


def read_scores(
    name: str, leaves: Sequence[str], samples: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Scores:
    """The samples of a task from the harness's log of them.

    Args:
        name: of the task or group.
        leaves: tasks that it is made of.
        samples: task -> its samples, once for every filter.

    Raises:
        ValueError: if the harness judged no sample by a number.
    """
    first = samples[leaves[0]][0]
    metric = next((m for m in PRIMARY if m in first["metrics"]), next(iter(first["metrics"]), ""))
    scores = Scores(metric, str(first["filter"]))
    for leaf in leaves:
        for sample in samples[leaf]:
            if sample["filter"] != scores.filter:
                continue
            value: Any = sample.get(metric)
            if isinstance(value, (tuple, list)) and metric in PERPLEXITIES:
                scores.values.append(-float(value[0]))
                scores.weights.append(float(value[1]))
            elif isinstance(value, (bool, int, float)) or hasattr(value, "__float__"):
                scores.values.append(float(value))
                scores.weights.append(1.0)
            else:
                raise ValueError(
                    f"the task {name} judges a sample by {metric}, which is no number: it can't be "
                    "compared sample by sample."
                )
            scores.clusters.append((leaf, _cluster(name, sample)))
            scores.answers.append(_answer(sample["filtered_resps"]))
            scores.prompts.append(str(sample["prompt_hash"]))
    return scores


def _cluster(name: str, sample: Mapping[str, Any]) -> Hashable:
    doc = sample["doc"]
    shared = doc.get(CLUSTERS.get(name, "text")) if isinstance(doc, Mapping) else None
    return sample["doc_id"] if shared is None else str(shared)


def _answer(responses: Sequence[Any]) -> Any:
    """Index of the likeliest choice, what was written, or whether the model would write it."""
    first = responses[0]
    if isinstance(first, str):
        return first
    if isinstance(first, (tuple, list)) and len(first) == 2:
        if len(responses) == 1:
            return bool(first[1])
        likelihoods = [float(each[0]) for each in responses]
        return likelihoods.index(max(likelihoods))
    return None
