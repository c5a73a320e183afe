"""Where users who share a batch affect each other, and the one sentence that says so."""

from __future__ import annotations

import warnings

from paceline.policy import CapacityPolicy


class SharedBudgetWarning(UserWarning):
    """Requests of one batch share a budget, so what one gets depends on the others."""


class SharedCacheWarning(UserWarning):
    """Requests share cached prefixes, which under a cap tell of the tokens that followed them."""


def shares_budget(policy: CapacityPolicy) -> bool:
    """Whether requests in one batch affect each other under `policy`.

    >>> shares_budget(CapacityPolicy(capacity_factor=1.5, pool="request"))
    False
    """
    return policy.caps and policy.mode == "enforce" and policy.pool != "request"


def warn_of_sharing(policy: CapacityPolicy, requests: int, stacklevel: int = 2) -> None:
    """Say that so many requests share a budget under `policy`.

    Args:
        policy: for which `shares_budget` holds.
        requests: in the batch.
        stacklevel: as of `warnings.warn`.
    """
    apart = 'say pool="request"' if policy.max_active is None else "leave max_active out"
    warnings.warn(
        f'{requests} sequences share one budget under pool="{policy.pool}", so what one of them '
        f"gets depends on the others; where they belong to different users, {apart}.",
        SharedBudgetWarning,
        stacklevel=stacklevel + 1,
    )


def warn_of_shared_cache(remedy: str, stacklevel: int = 2) -> None:
    """Say that a cap makes cached prefixes tell of what followed them.

    A cap ranks the tokens of a chunk among each other, so keys and values of a prefix depend on
    the tokens behind it, with request pools too.

    Args:
        remedy: what keeps requests from sharing, in the engine's words.
        stacklevel: as of `warnings.warn`.
    """
    warnings.warn(
        "requests share cached prefixes, and under a cap these depend on the tokens that followed "
        f"them, so one request tells of another; where they belong to different users, {remedy}.",
        SharedCacheWarning,
        stacklevel=stacklevel + 1,
    )
