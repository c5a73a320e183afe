"""Policies that a trace can be tried with: orders of keeping, and pools, for which it has data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.policy import KEEPS, CapacityPolicy
from paceline.traces.trace import Trace


def supported_keeps(trace: Trace) -> tuple[str, ...]:
    """Return the built-in orders by which a cap can keep assignments of a trace, the best first.

    Scores, else weights, else the order of the tokens: engines often return ids alone.

    Raises:
        ValueError: if the trace doesn't hold what each token chose.

    >>> from paceline.traces import sample
    >>> supported_keeps(sample("esft_v2lite_law"))
    ('score', 'weight', 'first', 'last', 'random')
    """
    trace.require_choices()
    first = next(iter(trace.chunks), None)
    weighed = first is not None and first.weights is not None
    scored = first is not None and (first.topk_scores is not None or first.scores is not None)
    lacking = {"contribution"}  # norms of outputs are a calibration's
    if not weighed:
        lacking.add("weight")
    if not scored and not (weighed and trace.header.scores_are_weights):
        lacking.add("score")
    return tuple(keep for keep in KEEPS if keep not in lacking)


def supported_pools(trace: Trace) -> tuple[str, ...]:
    """Return the pools that a cap of a trace can have.

    >>> from paceline.traces import sample
    >>> supported_pools(sample("gpt_oss_20b_decode"))
    ('batch', 'request')
    """
    first = next(iter(trace.chunks), None)
    return tuple(
        pool
        for pool in ("batch", "request", "source")
        if pool == "batch" or (first is not None and getattr(first, pool) is not None)
    )


def check_policies(trace: Trace, policies: Mapping[str, Sequence[CapacityPolicy]]) -> None:
    """Refuse caps that keep or pool by data that the trace doesn't hold.

    Args:
        trace: of choices.
        policies: owner, for the message -> policies to try on it.

    Raises:
        ValueError: naming what is possible.

    >>> from paceline.traces import sample
    >>> cap = CapacityPolicy(capacity_factor=1.0)
    >>> check_policies(sample("esft_v2lite_law"), {"a plan": [cap]})
    """
    caps = [(owner, policy) for owner, own in policies.items() for policy in own if policy.caps]
    if not caps:
        return
    pools, keeps = supported_pools(trace), supported_keeps(trace)  # each reads the beginning
    for owner, policy in caps:
        if policy.pool not in pools:
            raise ValueError(
                f"{owner}: pool={policy.pool!r} needs the token_{policy.pool} of every token, "
                f"which {trace.where} doesn't hold: pool must be one of {', '.join(pools)}."
            )
        if policy.max_active is not None and "weight" not in keeps:
            raise ValueError(
                f"{owner}: max_active={policy.max_active} needs weights, which {trace.where} "
                "doesn't hold: it keeps the experts with the largest sum of them."
            )
        if policy.factor is not None and policy.keep in KEEPS and policy.keep not in keeps:
            needed = {"weight": "weights", "contribution": "the norms of a calibration"}
            lacking = needed.get(policy.keep, "scores")
            raise ValueError(
                f"{owner}: keep={policy.keep!r} needs {lacking}, which {trace.where} doesn't hold: "
                f"keep must be one of {', '.join(keeps)}."
            )
