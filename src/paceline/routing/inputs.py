"""What routing needs to know of one layer's tokens, checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.placement import ExpertPlacement


@dataclass(frozen=True, eq=False)
class RoutingInputs:
    """The model's choice for every token, and what else decides who stays.

    Attributes:
        topk_ids: [tokens, k] any integer dtype; an id outside [0, experts) is no assignment.
        topk_weights: [tokens, k] combine weights of the model, after its own scaling.
        scores: [tokens, experts] gate scores before renormalisation and scaling, taken as float32.
        topk_scores: [tokens, k] scores of the chosen experts alone, where the rest is not known.
        valid: [tokens] bool, False for padding; None: every token is real.
        token_source: [tokens] device on which a token lives, in [0, devices).
        token_request: [tokens] any integer label of the request that a token belongs to.
        token_priority: [tokens] small integers, higher is kept first, clamped to [-128, 127].
        token_decode: [tokens] bool, True where a token is being generated (not prompt).
        num_experts: experts of the layer, where neither scores nor a placement tell.
        layer: index of the layer; with `step` it varies keep="random".
        step: number of the forward, an int or a 0-d integer tensor on the tokens' device.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    scores: Tensor | None = None
    topk_scores: Tensor | None = None
    valid: Tensor | None = None
    token_source: Tensor | None = None
    token_request: Tensor | None = None
    token_priority: Tensor | None = None
    token_decode: Tensor | None = None
    num_experts: int | None = None
    layer: int = 0
    step: int | Tensor = 0

    def __post_init__(self) -> None:
        ids = self.topk_ids
        if ids.dim() != 2 or ids.shape[1] < 1:
            raise ValueError(f"topk_ids has shape {_shape(ids)}: allowed is [tokens, k], k >= 1.")
        if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
            raise ValueError(f"topk_ids has dtype {ids.dtype}: allowed is an integer dtype.")
        if not self.topk_weights.is_floating_point():
            raise ValueError(
                f"topk_weights has dtype {self.topk_weights.dtype}: allowed is a float dtype."
            )
        for name in ("topk_weights", "topk_scores"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != ids.shape:
                raise ValueError(
                    f"{name} has shape {_shape(tensor)}: allowed is {_shape(ids)}, as topk_ids."
                )
        if self.scores is not None and (
            self.scores.dim() != 2 or self.scores.shape[0] != ids.shape[0]
        ):
            raise ValueError(
                f"scores has shape {_shape(self.scores)}: allowed is [{ids.shape[0]}, experts]."
            )
        for name in ("valid", "token_source", "token_request", "token_priority", "token_decode"):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tensor.shape != ids.shape[:1]:
                raise ValueError(
                    f"{name} has shape {_shape(tensor)}: allowed is one entry a token, "
                    f"[{ids.shape[0]}]."
                )
            wants_bool = name in ("valid", "token_decode")
            if tensor.is_floating_point() or (tensor.dtype is torch.bool) != wants_bool:
                allowed = "bool" if wants_bool else "an integer dtype"
                raise ValueError(f"{name} has dtype {tensor.dtype}: allowed is {allowed}.")

    def experts(self, placement: ExpertPlacement | None) -> int:
        """Number of experts E, from whichever of placement, scores and num_experts tell.

        Raises:
            ValueError: where none tells, or two disagree.
        """
        told = {
            "placement": None if placement is None else placement.num_experts,
            "scores": None if self.scores is None else int(self.scores.shape[1]),
            "num_experts": self.num_experts,
        }
        known = {name: count for name, count in told.items() if count is not None}
        if not known:
            raise ValueError(
                "the number of experts is unknown: give scores, a placement or num_experts."
            )
        if len(set(known.values())) > 1:
            said = ", ".join(f"{name} says {count}" for name, count in known.items())
            raise ValueError(f"the number of experts is not the same everywhere: {said}.")
        return next(iter(known.values()))


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
