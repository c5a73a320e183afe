"""Warnings that users who share a batch, or cached prefixes, affect each other."""

from __future__ import annotations

import warnings

from paceline.policy import CapacityPolicy


class SharedBudgetWarning(UserWarning):
    """Requests of one batch share a budget, so what one gets depends on the others."""


class SharedCacheWarning(UserWarning):
    """Requests share cached prefixes, which under a cap depend on the tokens behind them."""


def shares_budget(policy: CapacityPolicy) -> bool:
    """Return True if requests in one batch affect each other under `policy`.

    >>> shares_budget(CapacityPolicy(capacity_factor=1.5, pool="request"))
    False
    """
    return policy.caps and policy.mode == "enforce" and policy.pool != "request"


def warn_of_sharing(policy: CapacityPolicy, requests: int, stacklevel: int = 2) -> None:
    """Warn that requests share a budget under `policy`.

    Args:
        policy: one that `shares_budget`.
        requests: number of requests in the batch.
        stacklevel: as of `warnings.warn`.
    """
    apart = 'say pool="request"' if policy.max_active is None else "remove max_active"
    warnings.warn(
        f'paceline: {requests} sequences share one budget under pool="{policy.pool}", so what one '
        f"of them gets depends on the others; where they belong to different users, {apart}.",
        SharedBudgetWarning,
        stacklevel=stacklevel + 1,
    )


def warn_of_shared_cache(remedy: str, stacklevel: int = 2) -> None:
    """Warn that under a cap cached prefixes depend on the tokens behind them.

    A cap ranks the tokens of a chunk among each other, so keys and values of a prefix depend on
    the tokens behind it, with request pools too.

    Args:
        remedy: how to keep requests from sharing, in the engine's terms.
        stacklevel: as of `warnings.warn`.
    """
    warnings.warn(
        "paceline: requests share cached prefixes, and under a cap these depend on the tokens that "
        "followed them, so one request reveals another; where they belong to different users, "
        f"{remedy}.",
        SharedCacheWarning,
        stacklevel=stacklevel + 1,
    )
