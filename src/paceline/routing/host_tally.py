"""What a routed forward adds to statistics, counted on the host.

On a CPU the many small operators that count on any device take longer than the counting: ten times
as long as routing itself. Here are few calls, and nothing that isn't needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.routing.assignment import Assignment
from paceline.routing.capacity import INT64_MAX

Array = npt.NDArray[Any]


class Tally(NamedTuple):
    """Of one forward.

    Attributes:
        before, after: [experts] int64 loads.
        counts: forwards, capped, narrowed, tokens, dropped, extras, tokens without an expert.
        mass: gate mass, and what is kept of it.
    """

    before: Array
    after: Array
    counts: tuple[int, int, int, int, int, int, int]
    mass: tuple[float, float]


def on_host(assignment: Assignment) -> bool:
    """Whether a forward can be counted here: its tensors are plain ones on a CPU."""
    ids = assignment.bounded_ids
    return ids.device.type == "cpu" and type(ids) is Tensor and not torch.compiler.is_compiling()


def tally(assignment: Assignment) -> Tally:
    """Count a routed forward whose tensors are on the CPU.

    Args:
        assignment: enforced or in shadow.
    """
    experts, chosen = assignment.num_experts, assignment.genuine
    offered = chosen.offered.numpy()
    bounded = assignment.bounded_ids.numpy()
    k = chosen.k
    before = _loads(np.where(offered, chosen.ids.numpy(), experts), experts)
    after = _loads(bounded, experts)
    kept = bounded[:, :k] < experts
    asked, stay = int(before.sum()), int(np.count_nonzero(kept))
    alone = 0
    if stay < asked:  # what was kept was asked for, so that equal counts are the same assignments
        rows = np.flatnonzero(bounded[:, 0] == experts)  # few: sums along short rows are slow
        lost = offered[rows].any(1) & (bounded[rows] == experts).all(1)
        alone = int(np.count_nonzero(lost))
    scores = chosen.weights if chosen.scores is None else chosen.scores
    mass = np.where(offered, scores.detach().float().numpy(), 0)
    if not np.isfinite(mass.sum()):
        mass = np.nan_to_num(mass, nan=0.0)  # infinities become the largest number, as on a device
    whole = float(mass.sum(dtype=np.float64))
    left = whole if stay == asked else float(np.where(kept, mass, 0).sum(dtype=np.float64))
    tokens = int(assignment.pools.total)
    narrowed, capped = _ruled(assignment, tokens)
    extras = int(after.sum()) - stay
    return Tally(before, after, (1, capped, narrowed, tokens, asked - stay, extras, alone),
                 (whole, left))  # fmt: skip


def _loads(ids: Array, experts: int) -> Array:
    """[experts] how often each occurs among ids in [0, experts]."""
    return np.bincount(ids.ravel(), minlength=experts + 1)[:experts]


def _ruled(assignment: Assignment, tokens: int) -> tuple[int, int]:
    """Whether max_active, and whether any cap, ruled the forward."""
    budget = assignment.budget
    policy = budget.policy
    few = tokens < budget.tokens_needed
    narrowed = policy.caps and policy.max_active is not None and few
    plain = policy.pool == "batch" and policy.phase == "all"
    if not policy.caps or policy.capacity_factor is None:
        capped = False
    elif plain and policy.capacity_factor < 1e6:  # else it may be no number that can be exceeded
        capped = not few
    else:
        capped = bool((assignment.capacity != INT64_MAX).any())
    return int(narrowed), int(narrowed or capped)
