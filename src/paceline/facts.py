"""Facts about tokens that a policy needs from an engine, in addition to the model's own choice."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from paceline.policy import CapacityPolicy


@dataclass(frozen=True)
class Facts:
    """Optional inputs of `route`, True for those that are needed; padding (`valid`) always is.

    Attributes:
        scores: gate scores, at least those of the chosen experts.
        all_scores: gate scores of all experts.
        source: device on which each token lives.
        request: request of each token.
        decode: which tokens are being generated.
        position: position of each token in its sequence.
        modality: which tokens are image, audio or video.
        step: number of the forward.
    """

    scores: bool = False
    all_scores: bool = False
    source: bool = False
    request: bool = False
    decode: bool = False
    position: bool = False
    modality: bool = False
    step: bool = False

    @staticmethod
    def union(*needed: Facts) -> Facts:
        """Return the facts that any of them needs.

        >>> Facts.union(Facts(scores=True), Facts(request=True)).request
        True
        """
        names = [field.name for field in fields(Facts)]
        return Facts(*(any(getattr(one, name) for one in needed) for name in names))


NO_FACTS = Facts()


@lru_cache(maxsize=256)
def facts_for(policy: CapacityPolicy) -> Facts:
    """Return the facts that `policy` needs; none if it caps nothing.

    >>> facts_for(CapacityPolicy(capacity_factor=1.5, pool="request")).request
    True
    """
    if not policy.caps:
        return NO_FACTS
    ranks = policy.factor is not None  # max_active alone ranks by the model's weights
    return Facts(
        scores=ranks and (policy.keep == "score" or policy.expand is not None),
        all_scores=ranks and policy.expand is not None,
        source=policy.pool == "source" or policy.expand == "own_device",
        request=policy.pool == "request",
        decode=policy.phase == "prefill",
        position=policy.protect_first > 0,
        modality=bool(policy.drop_first),
        step=policy.keep == "random",
    )
