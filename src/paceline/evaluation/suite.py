"""Tasks, quality tables and policies of the paper on capacity-aware inference.

Source: He, Cai, Huang, Li, "Capacity-Aware Inference", ICLR 2026, arXiv 2503.05066.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.policy import CapacityPolicy

PAPER_TASKS = {
    "openbookqa": 0,
    "piqa": 0,
    "rte": 0,
    "winogrande": 5,
    "boolq": 0,
    "arc_challenge": 25,
    "hellaswag": 10,
    "mmlu": 5,
    "gsm8k": 5,
}
"""The nine tasks of Table 2 by their names in lm-evaluation-harness -> examples in the prompt.

The paper names the tasks and says that shots are the usual ones: these are those of the Open LLM
Leaderboard where it has the task, else 0.
"""

SUITES = {"paper": PAPER_TASKS}

CLUSTERS = {"boolq": "passage"}
"""Task -> field that questions about the same text share; of other tasks "text", if it is there."""


@dataclass(frozen=True)
class Published:
    """A row of one of the paper's tables.

    Attributes:
        table: its number.
        model: the checkpoint.
        method: name in the paper.
        policy: of Paceline; None where it has no such policy.
        baseline: mean over the tasks without a cap, percent.
        mean: with the method, percent.
    """

    table: int
    model: str
    method: str
    policy: CapacityPolicy | None
    baseline: float
    mean: float


_KEEPS = {"Order": "first", "Reverse Order": "last", "Random": "random", "Score": "score"}
_TABLE_1 = {
    2.0: (60.8, 60.8, 61.3, 64.0),
    1.5: (55.1, 56.0, 59.1, 63.1),
    1.0: (51.8, 52.0, 53.1, 61.1),
}
_TABLE_2 = (
    ("OLMoE-Instruct", 2.0, 63.5, 60.5, 62.3, 63.2),
    ("Qwen1.5-MoE-Chat", 1.5, 65.9, 64.4, 65.1, 65.6),
    ("DeepSeek-V2-Lite-Chat", 2.0, 69.3, 65.3, 68.2, 68.9),
    ("Mixtral-8x7B-Instruct", 1.5, 74.3, 72.2, 73.8, 74.5),
)


def _drop(factor: float, keep: str = "score") -> CapacityPolicy:
    return CapacityPolicy(capacity_factor=factor, unit="expert", keep=keep)


def _expanded(factor: float, unit: str = "expert") -> CapacityPolicy:
    return CapacityPolicy(capacity_factor=factor, unit=unit, expand="own_device")


def _published() -> Iterable[Published]:
    for factor, means in _TABLE_1.items():
        for (name, keep), mean in zip(_KEEPS.items(), means, strict=True):
            yield Published(1, "OLMoE", f"{name}, {factor}", _drop(factor, keep), 64.0, mean)
    for model, factor, base, skipped, dropped, expanded in _TABLE_2:
        yield Published(2, model, "Expert Drop", None, base, skipped)
        yield Published(2, model, f"Token Drop, {factor}", _drop(factor), base, dropped)
        yield Published(2, model, f"Expanded Drop, {factor}", _expanded(factor), base, expanded)
    model, base = "Qwen3-MoE", 75.6
    yield Published(3, model, "Expanded Drop per expert, 1.5", _expanded(1.5), base, 73.9)
    per_device = _expanded(1.0, "device")
    yield Published(3, model, "Expanded Drop per device, 1.0", per_device, base, 74.8)


PUBLISHED = tuple(_published())
"""Tables 1 to 3: mean over 8 or 9 tasks, percent."""


def paper_policies() -> list[CapacityPolicy]:
    """Return the policies of the paper's Tables 1 to 3, each once.

    >>> len(paper_policies())
    15
    """
    return list(dict.fromkeys(row.policy for row in PUBLISHED if row.policy is not None))
