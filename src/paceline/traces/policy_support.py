"""What a policy may ask of a trace: orders of keeping, and pools, that it can tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.policy import KEEPS, CapacityPolicy
from paceline.traces.trace import Trace


def keeps_of(trace: Trace) -> tuple[str, ...]:
    """The built-in orders by which a cap can keep assignments of a trace, the best one first.

    Scores, else weights, else the order of the tokens: engines often return ids alone.

    Raises:
        ValueError: if the trace doesn't say what each token chose.

    >>> from paceline.traces import sample
    >>> keeps_of(sample("esft_v2lite_law"))
    ('score', 'weight', 'first', 'last', 'random')
    """
    if not trace.header.per_token:
        raise ValueError(f"{trace.where} holds {trace.header.content}, not what each token chose.")
    first = next(iter(trace.chunks), None)
    weighed = first is not None and first.weights is not None
    scored = first is not None and (first.topk_scores is not None or first.scores is not None)
    lacking = {"contribution"}  # norms of outputs are a calibration's
    if not weighed:
        lacking.add("weight")
    if not scored and not (weighed and trace.header.scores_are_weights):
        lacking.add("score")
    return tuple(keep for keep in KEEPS if keep not in lacking)


def pools_of(trace: Trace) -> tuple[str, ...]:
    """The pools that a cap of a trace can have: whose tokens are told apart.

    >>> from paceline.traces import sample
    >>> pools_of(sample("gpt_oss_20b_decode"))
    ('batch', 'request')
    """
    first = next(iter(trace.chunks), None)
    return tuple(
        pool
        for pool in ("batch", "request", "source")
        if pool == "batch" or (first is not None and getattr(first, pool) is not None)
    )


def check_bearing(trace: Trace, policies: Mapping[str, Sequence[CapacityPolicy]]) -> None:
    """Refuse caps that keep or pool by what the trace doesn't hold.

    Args:
        trace: of choices.
        policies: whose they are, for the message -> to try on it.

    Raises:
        ValueError: naming what is possible.

    >>> from paceline.traces import sample
    >>> cap = CapacityPolicy(capacity_factor=1.0)
    >>> check_bearing(sample("esft_v2lite_law"), {"a plan": [cap]})
    """
    wanted = [(what, policy) for what, own in policies.items() for policy in own if policy.caps]
    if not wanted:
        return
    pools, keeps = pools_of(trace), keeps_of(trace)  # each reads the trace's beginning
    for what, policy in wanted:
        if policy.pool not in pools:
            raise ValueError(
                f"{what}: pool={policy.pool!r} needs the token_{policy.pool} of every token, which "
                f"{trace.where} doesn't hold: allowed are {', '.join(pools)}."
            )
        if policy.max_active is not None and "weight" not in keeps:
            raise ValueError(
                f"{what}: max_active={policy.max_active} needs weights, which {trace.where} "
                "doesn't hold: it keeps the experts with the largest sum of them."
            )
        if policy.factor is not None and policy.keep in KEEPS and policy.keep not in keeps:
            needed = {"weight": "weights", "contribution": "the norms of a calibration"}
            lacking = needed.get(policy.keep, "scores")
            raise ValueError(
                f"{what}: keep={policy.keep!r} needs {lacking}, which {trace.where} doesn't hold: "
                f"allowed are {', '.join(keeps)}."
            )
