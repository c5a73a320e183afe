"""Gate scores of all experts from a router's logits, by the rule that the router itself uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Scoring = Callable[[Tensor], Tensor]


def _softmax(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1, dtype=torch.float32)


def _sigmoid(logits: Tensor) -> Tensor:
    return logits.float().sigmoid()


def _sqrtsoftplus(logits: Tensor) -> Tensor:
    return torch.nn.functional.softplus(logits.float()).sqrt()


RULES: dict[str, Scoring] = {
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
}
"""vLLM's name of a rule -> logits [tokens, experts] to float32 scores [tokens, experts]."""


def scoring_of(router: Any) -> str | None:
    """The rule by which a vLLM router scores, None where it isn't known.

    A selection bias and groups only decide who is chosen; renormalisation and scaling come later.

    Args:
        router: any of vLLM's.
    """
    if getattr(router, "custom_routing_function", None) is not None:
        return None
    rule = getattr(router, "scoring_func", None)
    return rule if rule in RULES else None
