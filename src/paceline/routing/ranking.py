"""Ranking of assignments: priority classes and the policy's `keep` as integer keys.

A smaller key is kept first; priority is compared before `keep`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paceline.policy import KEEP_ALIASES, KEEPS, REGISTERED, CapacityPolicy
from paceline.routing.assignment import Candidates
from paceline.routing.inputs import RoutingInputs
from paceline.routing.keys import KEY_BITS, descending_key, random_hash

KeepRanking = Callable[[RoutingInputs], Tensor]

BY_SLOT, BY_EXPERT, KEYS = 0, 1, 2
"""Layouts of a metric: a float by slot, a float by expert, a key by slot."""

PROTECTED, NORMAL, DROPPED_FIRST = 2, 0, -2
"""Classes that engines give tokens: room is left between them for a user's own."""

PRIORITY_BITS = 9
"""Priority keys lie in [0, 2 ** PRIORITY_BITS)."""

_HIGHEST = 127
_DECODE = _HIGHEST + 1


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
        raise ValueError(f"name must be an identifier other than {others}, got {name!r}")
    if not callable(ranking):
        raise ValueError(
            f"ranking of keep={name!r} must be a function, got {type(ranking).__name__}"
        )
    REGISTERED[name] = ranking


def metric(
    policy: CapacityPolicy, candidates: Candidates, pool_rank: Callable[[], Tensor]
) -> tuple[Tensor, int]:
    """Return the numbers that rank the candidates, highest first, and their layout, for kernels.

    Returns:
        [tokens, experts] float32 with `BY_EXPERT`, [tokens, slots] float32 with `BY_SLOT`, or the
        [tokens, slots] int64 keys of `ranking_key`, smallest first, with `KEYS`.
    """
    scores = candidates.inputs.scores
    if policy.keep == "score" and scores is not None:
        return scores.float(), BY_EXPERT
    if policy.keep == "score":
        return require_scores(candidates.scores), BY_SLOT
    if policy.keep == "weight":
        return candidates.weights.float(), BY_SLOT
    if policy.keep == "contribution":
        return contributions(candidates), BY_SLOT
    return ranking_key(policy, candidates, pool_rank), KEYS


def ranking_key(
    policy: CapacityPolicy, candidates: Candidates, pool_rank: Callable[[], Tensor]
) -> Tensor:
    """Return the key of each candidate under the policy's `keep`; ties go by token, then by slot.

    Args:
        policy: with `keep`.
        candidates: that compete.
        pool_rank: returns [tokens] the index of a token among its pool's valid tokens.

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
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"keep={policy.keep!r} must rank by a float tensor, got {kind}")
    if values.shape != shape:
        raise ValueError(
            f"keep={policy.keep!r} must rank by shape [tokens, k] = {list(shape)}, got "
            f"{list(values.shape)}"
        )
    return descending_key(values)


def require_scores(scores: Tensor | None) -> Tensor:
    """Return the scores that keep="score" ranks by; raise a ValueError if there are none."""
    if scores is None:
        raise ValueError(
            'keep="score" needs scores or topk_scores; keep="weight" ranks by the combine weights.'
        )
    return scores


def contributions(candidates: Candidates) -> Tensor:
    """Return [tokens, slots] float32 combine weights times the norms of what dropping leaves out.

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


def token_priorities(
    policy: CapacityPolicy,
    modality: Mapping[str, Tensor] | None = None,
    position: Tensor | None = None,
) -> Tensor | None:
    """Return the priority classes that a policy gives tokens, for `RoutingInputs.token_priority`.

    Args:
        policy: with `drop_first` and `protect_first`.
        modality: name -> [tokens] bool, True for tokens of that modality; a token of none is text.
        position: [tokens] int64 position of each token in its sequence.

    Returns:
        [tokens] int64, or None where all are alike.
    """
    priority: Tensor | None = None
    if policy.drop_first and modality:
        other = torch.stack(list(modality.values())).any(0)
        members = {**modality, "text": modality.get("text", ~other)}
        dropped = [members[name] for name in policy.drop_first if name in members]
        if dropped:
            priority = torch.where(torch.stack(dropped).any(0), DROPPED_FIRST, NORMAL)
    if policy.protect_first and position is not None:
        base = torch.zeros_like(position) if priority is None else priority
        priority = torch.where(position < policy.protect_first, PROTECTED, base)
    return priority


def priority_key(inputs: RoutingInputs, policy: CapacityPolicy) -> Tensor | None:
    """Return [tokens] int64 in [0, 2 ** 9), smaller is kept first; None if all tokens are alike.

    Decode tokens come before every priority under phase="prefill".
    """
    decode = inputs.token_decode if policy.phase == "prefill" else None
    priority = inputs.token_priority
    if priority is None and decode is None:
        return None
    rows = inputs.topk_ids
    if priority is None:
        classes = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
    else:
        classes = priority.long().clamp(-_HIGHEST - 1, _HIGHEST)
    if decode is not None:
        classes = torch.where(decode, _DECODE, classes)
    return _DECODE - classes  # from 0 to 2 * 128
