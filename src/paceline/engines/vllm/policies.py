"""Which policies a layer can follow, and in which forwards one can't bind."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import ceil
from typing import Any

from paceline.facts import facts_for
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing.route import check_binding


def check_policy(layer: Any, policy: CapacityPolicy) -> None:
    """Refuse a policy that a `CappedLayer` can't follow.

    Raises:
        ValueError: naming the field, the layer and what is allowed.
    """
    check_binding(policy, layer.units, layer.k)
    facts = facts_for(policy)
    if policy.max_active is not None and layer.ranks.data_ranks > 1:
        raise ValueError(
            f"max_active={policy.max_active} is not allowed under data parallelism: a device reads "
            "experts for the tokens of all ranks, of which each sees its own."
        )
    learned = "compensate=true" if policy.compensate else f"keep={policy.keep}"
    if layer.stand_ins is None and (policy.compensate or policy.keep == "contribution"):
        raise ValueError(
            f"{learned} needs a calibration of this model: start the server with "
            "--calibration FOLDER (PACELINE_CALIBRATION), as `paceline tune` makes it."
        )
    if policy.compensate and policy.expand is not None and layer.slots:
        raise ValueError(
            f"compensate=true with expand={policy.expand} was never run in vLLM: say one of them."
        )
    if facts.scores and layer.scoring is None:
        what = "keep" if policy.keep == "score" else "expand"
        raise ValueError(
            f"{what}={getattr(policy, what)} is not allowed: how layer {layer.name} scores its "
            'experts is not known; say keep="weight".'
        )
    if facts.all_scores and layer.replicated:
        raise ValueError(
            f"expand={policy.expand} is not allowed under EPLB: a replica has no score."
        )
    if facts.modality:
        raise ValueError(
            f"drop_first={'+'.join(policy.drop_first)} is not allowed in vLLM: its MoE layers "
            "don't tell image from text."
        )
    if policy.expand is not None and layer.ranks.expert_ranks > 1 and layer.ranks.data_ranks == 1:
        raise ValueError(
            f"expand={policy.expand} is not allowed where all ranks see the same tokens: they "
            "live on no device."
        )
    if facts.source and layer.ranks.data_ranks == 1:
        asks = "pool=source" if policy.pool == "source" else f"expand={policy.expand}"
        raise ValueError(f"{asks} needs data and expert parallelism: tokens live on no device.")
    if policy.pool == "batch" and policy.caps and layer.ranks.data_ranks > 1:
        raise ValueError(
            "pool=batch is not allowed under data parallelism, where a rank sees its own "
            "tokens: say pool=source or pool=request."
        )


def never_binding(
    policy: CapacityPolicy, units: ExpertPlacement, k: int, repeats: bool = False
) -> Callable[[int], bool]:
    """Whether a forward of so many tokens can't exceed any unit's places, known on the host.

    Of capacities alone: max_active rules smaller forwards than these.

    Args:
        policy: with or without a cap.
        units: the devices.
        k: experts a token.
        repeats: whether a token's choice may name one expert twice.

    >>> never = never_binding(CapacityPolicy(capacity_factor=8), ExpertPlacement.per_expert(8), k=1)
    >>> never(1000)
    True
    """
    factor, experts = policy.factor, units.num_experts
    if factor is None:
        return lambda tokens: True
    sizes = {1} if policy.unit == "expert" else set(units.sizes) - {0}
    if policy.expand is not None:
        return lambda tokens: False
    # the most assignments that a token can have on a unit of each size
    most = {size: k if repeats else min(k, size) for size in sizes}

    @lru_cache(maxsize=4096)
    def never(tokens: int) -> bool:
        return all(ceil(factor * tokens * k * n / experts) >= tokens * m for n, m in most.items())

    always = all(factor * k * n / experts >= m for n, m in most.items())
    if always or policy.pool == "request":
        return lambda tokens: always
    return never
