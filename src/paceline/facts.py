"""Which facts about its tokens a policy asks an engine for, beside the model's own choice."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from paceline.policy import CapacityPolicy


@dataclass(frozen=True)
class Facts:
    """What an engine has to tell `route` for a policy; padding (`valid`) it always has to.

    Attributes:
        scores: gate scores, or at least those of the chosen experts.
        all_scores: gate scores of all experts.
        source: the device on which each token lives.
        request: the request of each token.
        decode: which tokens are being generated.
        position: the position of each token in its sequence.
        modality: which tokens are image, audio or video.
        step: the number of the forward.
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
    def union(*asked: Facts) -> Facts:
        """What any of them asks for.

        >>> Facts.union(Facts(scores=True), Facts(request=True)).request
        True
        """
        names = [field.name for field in fields(Facts)]
        return Facts(*(any(getattr(one, name) for one in asked) for name in names))


NO_FACTS = Facts()


@lru_cache(maxsize=256)
def facts_for(policy: CapacityPolicy) -> Facts:
    """What `policy` asks for; nothing where it caps nothing.

    >>> facts_for(CapacityPolicy(capacity_factor=1.5, pool="request")).request
    True
    """
    if not policy.caps:
        return NO_FACTS
    ranks = policy.factor is not None  # max_active alone goes by the model's weights
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
