"""The paper's suite: names that the harness knows, and tables that are the paper's."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.evaluation.suite import PAPER_TASKS, PUBLISHED, paper_policies
from paceline.policy import CapacityPolicy

FOLDERS = [
    "openbookqa",
    "piqa",
    "glue",
    "super_glue",
    "winogrande",
    "arc",
    "hellaswag",
    "mmlu/default",
    "mmlu",
    "gsm8k",
]


def test_the_nine_tasks_are_in_the_harness_and_take_these_shots() -> None:
    tasks = pytest.importorskip("lm_eval.tasks")
    found = find_spec("lm_eval.tasks")
    assert found is not None
    assert found.origin is not None
    root = Path(found.origin).parent
    manager = tasks.TaskManager(
        include_path=[root / folder for folder in FOLDERS], include_defaults=False
    )
    assert len(PAPER_TASKS) == 9
    for name, shots in PAPER_TASKS.items():
        assert name in manager.all_tasks, name
        config = manager.task_index[name].cfg
        assert name in (config.get("task"), config.get("group"))
        # what a task sets itself wins only where it is 0: then no shots can be asked for
        assert config.get("num_fewshot") != 0 or shots == 0
        if shots:  # examples come from somewhere
            assert name == "mmlu" or config.get("training_split") or config.get("fewshot_split")
    assert len(manager.task_index["mmlu"].cfg["task"]) == 4


def test_published_rows_are_those_of_the_paper() -> None:
    score = {
        row.policy.capacity_factor: row.mean
        for row in PUBLISHED
        if row.table == 1 and row.policy is not None and row.policy.keep == "score"
    }
    assert score == {2.0: 64.0, 1.5: 63.1, 1.0: 61.1}
    assert [len([row for row in PUBLISHED if row.table == n]) for n in (1, 2, 3)] == [12, 12, 2]
    mixtral = [row for row in PUBLISHED if row.model.startswith("Mixtral")]
    assert [(row.baseline, row.mean) for row in mixtral] == [
        (74.3, 72.2),
        (74.3, 73.8),
        (74.3, 74.5),
    ]
    policies = paper_policies()
    assert len(set(map(str, policies))) == len(policies) == 15
    assert CapacityPolicy(gamma=1.0, unit="expert", keep="order") in policies
    assert CapacityPolicy(gamma=1.0, unit="device", expand="own_device") in policies
