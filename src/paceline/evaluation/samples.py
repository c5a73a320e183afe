"""Samples of tasks of lm-evaluation-harness, and runs compared sample by sample."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.evaluation.results import Difference, MeanDifference, TaskScore, TaskScores
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
        filter: of the harness, applied to a response before it is judged.
        values: of the metric; of a perplexity the negative log-likelihood, [samples].
        weights: 1 each; of a perplexity bytes or words, [samples].
        clusters: samples of the same text share one, [samples].
        answers: chosen or written by the model, None where that means nothing, [samples].
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
        """True if lower is better, and a change is a share."""
        return self.metric in PERPLEXITIES

    @property
    def score(self) -> float:
        """Mean of the metric over samples, as the harness defines it."""
        mean = math.fsum(self.values) / math.fsum(self.weights)
        if self.metric == "bits_per_byte":
            return mean / math.log(2)
        return math.exp(mean) if self.is_perplexity else mean

    def against(self, base: Scores) -> Difference:
        """Return the mean difference to another run; of a perplexity that of its logarithm.

        Raises:
            RuntimeError: if the other run saw other samples.
        """
        if base.prompts != self.prompts:
            raise RuntimeError("two runs saw other prompts: they can't be compared.")
        return difference(base.values, self.values, self.clusters, self.weights)

    def changed(self, base: Scores) -> int | None:
        """Count samples whose answer differs from the other run's; None without answers."""
        if all(answer is None for answer in self.answers):
            return None
        return sum(bool(a != b) for a, b in zip(self.answers, base.answers, strict=True))


def read_scores(
    name: str, leaves: Sequence[str], samples: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Scores:
    """Read the samples of a task from the harness's log of them.

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
    """Return the index of the likeliest choice, the text written, or True for a greedy answer."""
    first = responses[0]
    if isinstance(first, str):
        return first
    if isinstance(first, (tuple, list)) and len(first) == 2:
        if len(responses) == 1:
            return bool(first[1])
        likelihoods = [float(each[0]) for each in responses]
        return likelihoods.index(max(likelihoods))
    return None


# -- two runs over the same samples ----------------------------------------------------------------


def difference(
    base: Sequence[float],
    other: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    weights: Sequence[float] | None = None,
) -> Difference:
    """Return the mean difference between two runs, sample by sample.

    The standard error is that of paired differences; with clusters it is cluster-robust (Liang and
    Zeger 1986, with the factor G / (G - 1) for G clusters), as Miller, "Adding Error Bars to Evals"
    (arXiv 2411.00640), asks for questions that share a text. With weights the mean is the ratio of
    sums, and its error that of the linearised ratio.

    Args:
        base: a figure of each sample, [samples].
        other: the same of the other run, [samples].
        clusters: samples that may depend on each other share one, [samples]; None: none do.
        weights: what each figure is a sum over, such as tokens, [samples]; None: 1.

    Raises:
        ValueError: if the lengths differ, or there is no sample.

    >>> difference([1, 0, 1, 1], [1, 0, 0, 1])
    Difference(mean=-0.25, standard_error=0.25, samples=4, clusters=4)
    """
    count = len(base)
    groups = list(range(count)) if clusters is None else list(clusters)
    sizes = [1.0] * count if weights is None else list(weights)
    if not count or {len(other), len(groups), len(sizes)} != {count}:
        raise ValueError(
            "base, other, clusters and weights must have the same length, at least 1, got "
            f"{count}, {len(other)}, {len(groups)} and {len(sizes)}."
        )
    total = math.fsum(sizes)
    changes = [o - b for b, o in zip(base, other, strict=True)]
    mean = math.fsum(changes) / total
    residuals: dict[Hashable, list[float]] = {}
    for group, change, size in zip(groups, changes, sizes, strict=True):
        residuals.setdefault(group, []).append(change - mean * size)
    found = len(residuals)
    error = None
    if found > 1:
        spread = math.fsum(math.fsum(values) ** 2 for values in residuals.values())
        error = math.sqrt(spread * found / (found - 1)) / total
    return Difference(mean=mean, standard_error=error, samples=count, clusters=found)


def compare(scores: Mapping[str, Scores], base: Mapping[str, Scores]) -> TaskScores:
    """Compare all tasks of two runs.

    Raises:
        RuntimeError: if the other run saw other samples.
    """
    tasks = {
        name: TaskScore(
            metric=found.metric,
            filter=found.filter,
            score=found.score,
            difference=found.against(base[name]),
            changed_answers=found.changed(base[name]),
        )
        for name, found in scores.items()
    }
    scored = [task for name, task in tasks.items() if not scores[name].is_perplexity]
    answered = {
        name: task.changed_answers
        for name, task in tasks.items()
        if task.changed_answers is not None
    }
    return TaskScores(
        mean=math.fsum(task.score for task in scored) / len(scored) if scored else None,
        mean_difference=_mean([task.difference for task in scored]),
        changed_answers=sum(answered.values()),
        answers=sum(len(scores[name].answers) for name in answered),
        tasks=tasks,
    )


def _mean(differences: Sequence[Difference]) -> MeanDifference | None:
    """Return the mean over tasks, which are independent; None without tasks."""
    if not differences:
        return None
    count = len(differences)
    errors = [each.standard_error for each in differences if each.standard_error is not None]
    error = math.sqrt(math.fsum(error**2 for error in errors)) / count
    return MeanDifference(
        mean=math.fsum(each.mean for each in differences) / count,
        standard_error=error if len(errors) == count else None,
    )
