"""A batch-wise budget lets users affect each other: `attach` says so, once, and only then."""

from __future__ import annotations

import warnings

import pytest
import torch
from model_runs import model_of, output

from paceline import CapacityPolicy, attach
from paceline.engines.transformers import SharedBudgetWarning

TWO = {"input_ids": torch.arange(40).remainder(100).view(2, 20)}
ONE = {"input_ids": TWO["input_ids"][:1]}


def policy(**fields: object) -> CapacityPolicy:
    return CapacityPolicy(**{"capacity_factor": 1.0, "min_expert_load": 0, **fields})


def test_sequences_that_share_a_budget_are_warned_of_once() -> None:
    model = model_of("mixtral")
    with attach(model, policy()):
        with pytest.warns(SharedBudgetWarning, match='2 sequences.*pool="request"'):
            output(model, TWO)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            output(model, TWO)


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"pool": "request"}, TWO),
        ({"mode": "shadow"}, TWO),
        ({"capacity_factor": None}, TWO),
        ({}, ONE),
    ],
    ids=["request pools", "shadow", "no cap", "one sequence"],
)
def test_nothing_is_said_where_nobody_is_affected(
    fields: dict[str, object], given: dict[str, torch.Tensor]
) -> None:
    model = model_of("mixtral")
    with attach(model, policy(**fields)), warnings.catch_warnings():
        warnings.simplefilter("error")
        output(model, given)
