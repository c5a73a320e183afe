"""Rules that all engines share: when a cap can't bind, and how a router scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs, route
from paceline.engines.rules import LayerTraits, never_binding
from paceline.engines.scoring import RULES, rule_named


@given(
    tokens=st.integers(1, 30),
    factor=st.sampled_from([0.5, 1.0, 1.3, 2.0, 4.0, 1000.0]),
    k=st.integers(1, 4),
    devices=st.integers(2, 7),
    unit=st.sampled_from(["device", "expert"]),
)
def test_a_cap_that_never_binds_drops_nothing_whatever_is_chosen(
    tokens: int, factor: float, k: int, devices: int, unit: Any
) -> None:
    """The worst choice for each device in turn: every token has its experts first."""
    placement = ExpertPlacement.contiguous(7, devices)
    policy = CapacityPolicy(capacity_factor=factor, unit=unit, keep="weight", min_expert_load=0)
    dropped = 0
    for device in range(devices):
        first = placement.experts_of(device)
        others = [expert for expert in range(7) if expert not in first]
        ids = torch.tensor([*first, *others][:k]).expand(tokens, k).clone()
        inputs = RoutingInputs(ids, torch.ones(tokens, k))
        dropped += int(route(inputs, policy, placement).dropped)
    assert never_binding(policy, LayerTraits("", k, placement))(tokens) == (dropped == 0)


def test_scores_are_those_of_the_named_rule() -> None:
    logits = torch.randn(5, 7).bfloat16()
    x = logits.double().numpy()
    for name, want in (
        ("softmax", np.exp(x) / np.exp(x).sum(1, keepdims=True)),
        ("sigmoid", 1 / (1 + np.exp(-x))),
        ("sqrtsoftplus", np.sqrt(np.log1p(np.exp(x)))),
    ):
        got = RULES[str(rule_named(name))](logits.float())
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-5)
    assert rule_named("unheard-of") is None
