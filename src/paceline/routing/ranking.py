"""How assignments are ranked: every `keep` as an integer key, where a smaller key is kept first."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.keeps import KEEP_ALIASES, KEEPS, REGISTERED
from paceline.policy import CapacityPolicy
from paceline.routing.candidates import Candidates
from paceline.routing.inputs import RoutingInputs
from paceline.routing.keys import KEY_BITS, descending_key, random_hash

KeepRanking = Callable[[RoutingInputs], Tensor]


def register_keep(name: str, ranking: KeepRanking) -> None:
    """Make `CapacityPolicy(keep=name)` rank assignments by `ranking(inputs)`, highest kept first.

    Args:
        name: a new identifier, not a built-in one.
        ranking: a pure function of the inputs to a [tokens, k] float tensor.

    Raises:
        ValueError: if the name is built in or no identifier, or the ranking is no function.

    Examples:
        >>> register_keep("heaviest", lambda inputs: inputs.topk_weights)
        >>> CapacityPolicy(capacity_factor=1.25, keep="heaviest").keep
        'heaviest'
    """
    taken = (*KEEPS, *KEEP_ALIASES)
    if not isinstance(name, str) or name in taken or not name.isidentifier():
        others = ", ".join(taken)
        raise ValueError(f"name={name!r} is not allowed: it is an identifier other than {others}.")
    if not callable(ranking):
        raise ValueError(
            f"ranking of keep={name!r} is a {type(ranking).__name__}: allowed is a function."
        )
    REGISTERED[name] = ranking


def ranking_key(
    policy: CapacityPolicy, candidates: Candidates, pool_rank: Callable[[], Tensor]
) -> Tensor:
    """Key of each candidate under the policy's `keep`; ties go by token, then by slot.

    Args:
        policy: whose `keep` ranks.
        candidates: that compete.
        pool_rank: gives [tokens] the index of a token among its pool's valid tokens.

    Returns:
        [tokens, slots] int64 in [0, 2 ** 32), smaller is kept first.

    Raises:
        ValueError: if the policy ranks by scores or norms and there are none, or a registered
            ranking is no [tokens, k] float tensor.
    """
    ids = candidates.ids
    if policy.keep == "score":
        return descending_key(require_scores(candidates.scores))
    if policy.keep == "weight":
        return descending_key(candidates.weights)
    if policy.keep == "contribution":
        return descending_key(contributions(candidates))
    if policy.keep == "first":
        return torch.zeros_like(ids, dtype=torch.int64)
    if policy.keep == "last":
        tokens = ids.shape[0]
        later_first = torch.arange(tokens - 1, -1, -1, device=ids.device)
        return later_first.unsqueeze(1).expand_as(ids)
    inputs = candidates.inputs
    if policy.keep == "random":
        rank = pool_rank().unsqueeze(1)
        hashed = random_hash(policy.seed, inputs.layer, inputs.step, rank, candidates.safe_ids)
        return (1 << KEY_BITS) - 1 - hashed
    values, shape = REGISTERED[policy.keep](inputs), inputs.topk_ids.shape
    if not isinstance(values, Tensor) or not values.is_floating_point():
        said = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"keep={policy.keep!r} ranks by a {said}: allowed is a float tensor.")
    if values.shape != shape:
        raise ValueError(
            f"keep={policy.keep!r} ranks by shape {list(values.shape)}: "
            f"allowed is [tokens, k] = {list(shape)}."
        )
    return descending_key(values)


def require_scores(scores: Tensor | None) -> Tensor:
    """The scores that keep="score" ranks by; ValueError if there are none."""
    if scores is None:
        raise ValueError(
            'keep="score" needs scores or topk_scores; keep="weight" ranks by the combine weights.'
        )
    return scores


def contributions(candidates: Candidates) -> Tensor:
    """[tokens, slots] float32 combine weights times the norms of what dropping leaves.

    Raises:
        ValueError: if the inputs have no norms.
    """
    norms = candidates.inputs.expert_norms
    if norms is None:
        raise ValueError(
            'keep="contribution" needs expert_norms, which a calibration of the model gives; '
            'keep="weight" ranks by the combine weights.'
        )
    ids = candidates.safe_ids
    known = norms[ids] if norms.dim() == 1 else norms.gather(1, ids)
    return candidates.weights.float() * known.float()
