"""What serving engines share, with an engine made up of one layer and no server."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline import CapacityPolicy, ExpertPlacement
from paceline.engines.serving.batch import Batch
from paceline.engines.serving.capped_layer import CappedLayer, Ranks, slots_for
from paceline.engines.serving.capped_model import CappedModel
from paceline.engines.serving.environment import Settings

EXPERTS, K = 8, 2


class Layer(CappedLayer):
    """Its forwards have three requests, of which the first decodes."""

    def _batch(self, rows: int) -> Batch:
        ends = torch.tensor([0, 1, rows // 2, rows])
        return Batch(rows, True, None, rows, rows, lambda: (ends, torch.tensor([9, 0, 4])))

    def _prompt_lengths(self, requests: int) -> Tensor:
        return torch.tensor([9, 100, 100])


class Model(CappedModel):
    """One layer of eight experts on four devices."""

    def shares_cache(self) -> bool:
        return False

    def check_settings(self, policies: Sequence[CapacityPolicy]) -> None:
        """Allow everything."""

    def request_ids(self) -> list[str] | None:
        return ["a", "b", "c"]


def model(policy: str) -> Model:
    units = ExpertPlacement.contiguous(EXPERTS, 4)
    layer = Layer(("layer", K, EXPERTS), 0, units, Ranks(), "softmax")
    made = Model([layer], Settings(policy=CapacityPolicy.parse(policy)), 0)
    made.set_policies(made.start_policies())
    return made


@pytest.mark.parametrize(
    "policy",
    [
        "mode=observe",
        "capacity_factor=1",
        "capacity_factor=0.5,unit=expert,keep=weight,pool=request",
        "max_active=1",
        "capacity_factor=1,max_active=1",
        "capacity_factor=1,phase=prefill,min_expert_load=4",
        "capacity_factor=1,expand=all",
        "capacity_factor=1,keep=random,mode=shadow",
    ],
)
def test_every_policy_warms_up_and_caps(policy: str) -> None:
    """A server starts with any policy that it accepts, and its first forwards are capped by it."""
    made = model(policy)
    made.warm_up()
    assert made.stats()[0].forwards == 0  # made-up tokens count nowhere
    (layer,) = made.layers
    rng = torch.Generator().manual_seed(0)
    for rows in (20, 64):
        logits = torch.randn(rows, EXPERTS, generator=rng) + torch.tensor([2.0] + [0.0] * 7)
        weights, ids = logits.softmax(1).topk(K)
        before, ids = ids.int().clone(), ids.int()
        if "expand" in policy:
            slots = slots_for(made.start_policies()[0], layer.units, K)
            weights, ids = layer.expand(weights, ids, logits, logits, slots)
            assert ids.shape == (rows, slots)
        else:
            layer.cap(weights, ids, logits, logits)
            assert ((ids == before) | (ids == -1)).all()
        assert (weights[ids < 0] == 0).all()
    stats = made.stats()[0]
    assert stats.forwards == 2
    assert bool(stats.dropped) == ("mode=observe" not in policy)
    assert made.policy_text() == str(made.layers[0].policy)


def test_a_refused_policy_changes_nothing() -> None:
    made = model("capacity_factor=1")
    for text in ("capacity_factor=1,compensate=true", "capacity_factor=1,pool=source"):
        with pytest.raises(ValueError, match=r"compensate=true|pool=source"):
            made.set_policies(made.parse(text))
        assert made.policy_text() == "capacity_factor=1.0"
    made.set_policies(made.parse(None))
    assert made.policy_text() == "off"
    made.set_policies(made.parse("start"))
    assert made.policy_text() == "capacity_factor=1.0"
