"""How assignments are ranked: every `keep` as an integer key, where a smaller key is kept first.

Integers make the order total and the same on every backend: float comparisons leave NaN and -0.0
to the backend's taste.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.policy import KEEP_ALIASES, KEEPS, CapacityPolicy
from paceline.routing.inputs import RoutingInputs

if TYPE_CHECKING:
    from paceline.routing.candidates import Candidates

KEY_BITS = 32
"""Keys of `metric_key` lie in [0, 2 ** KEY_BITS)."""

KeepMetric = Callable[[RoutingInputs], Tensor]

_REGISTERED: dict[str, KeepMetric] = {}


def register_keep(name: str, metric: KeepMetric) -> None:
    """Make `CapacityPolicy(keep=name)` rank assignments by `metric(inputs)`, highest kept first.

    Args:
        name: a new identifier, not a built-in one.
        metric: a pure function of the inputs to a [tokens, k] float tensor.

    Raises:
        ValueError: if the name is built in or no identifier.
    """
    if name in (*KEEPS, *KEEP_ALIASES) or not name.isidentifier():
        raise ValueError(
            f"name={name!r} is not allowed: a metric's name is an identifier other than "
            f"{', '.join((*KEEPS, *KEEP_ALIASES))}."
        )
    _REGISTERED[name] = metric


def registered_keeps() -> tuple[str, ...]:
    """Names given to `register_keep`, sorted."""
    return tuple(sorted(_REGISTERED))


def descending_key(values: Tensor) -> Tensor:
    """Integers in [0, 2 ** 32) that are smaller where the float is larger.

    -0.0 equals 0.0, and NaN comes last, after -inf.

    Args:
        values: any shape, any float dtype; compared as float32.

    Returns:
        int64, of the same shape.
    """
    values = values.float()
    bits = values.view(torch.int32)
    bits = torch.where(bits == -(1 << 31), 0, bits)  # -0.0; a compiler may drop "+ 0.0"
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # two's complement order is the float order
    key = 0x7FFFFFFF - ascending.long()
    return torch.where(values.isnan(), (1 << KEY_BITS) - 1, key)


def metric_key(
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
        ValueError: if the policy ranks by scores and there are none, or a registered metric
            returns another shape than [tokens, k].
    """
    ids = candidates.ids
    if policy.keep == "score":
        return descending_key(require_scores(candidates.scores))
    if policy.keep == "weight":
        return descending_key(candidates.weights)
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
    metric = _REGISTERED[policy.keep](inputs)
    if metric.shape != inputs.topk_ids.shape:
        raise ValueError(
            f"keep={policy.keep!r}: its metric has shape {list(metric.shape)}, "
            f"allowed is [tokens, k] = {list(inputs.topk_ids.shape)}."
        )
    return descending_key(metric)


def require_scores(scores: Tensor | None) -> Tensor:
    """The scores that keep="score" ranks by; ValueError if there are none."""
    if scores is None:
        raise ValueError(
            'keep="score" needs scores or topk_scores; to rank by the combine weights '
            'say keep="weight".'
        )
    return scores


def random_hash(seed: int, layer: int, step: int | Tensor, rank: Tensor, expert: Tensor) -> Tensor:
    """A 32-bit hash of the five, as int64 in [0, 2 ** 32), alike on every backend.

    The mixing step is lowbias32 (Ellis and Wellons, "hash-prospector").
    """
    mask = 0xFFFFFFFF
    state: Tensor = _mix(seed & mask)  # a number until the first tensor
    for value in (layer, step, rank, expert):
        word = value.long() if isinstance(value, Tensor) else value
        state = _mix(state ^ (((word & mask) * 0x9E3779B9) & mask))
    return state


def _mix(x: Any) -> Any:
    mask = 0xFFFFFFFF
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & mask  # int64 products wrap; the low 32 bits are right
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & mask
    return x ^ (x >> 16)
