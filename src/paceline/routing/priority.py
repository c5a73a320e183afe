"""Which tokens outrank others: modality, protected positions, decode tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.policy import CapacityPolicy
from paceline.routing.inputs import RoutingInputs

PROTECTED, NORMAL, DROPPED_FIRST = 2, 0, -2
"""Classes that engines give tokens: room is left between them for a user's own."""

PRIORITY_BITS = 9
"""Priority keys lie in [0, 2 ** PRIORITY_BITS)."""

_HIGHEST = 127
_DECODE = _HIGHEST + 1


def token_priorities(
    policy: CapacityPolicy,
    modality: Mapping[str, Tensor] | None = None,
    position: Tensor | None = None,
) -> Tensor | None:
    """Priority classes that a policy gives tokens, for `RoutingInputs.token_priority`.

    Args:
        policy: its `drop_first` and `protect_first` decide.
        modality: name -> [tokens] bool, True where a token is of it; a token of none is text.
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
    """[tokens] int64 in [0, 2 ** 9), smaller is kept first; None where all tokens are alike.

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
