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
        shape, dtype = self.topk_ids.shape, self.topk_ids.dtype
        if len(shape) != 2 or shape[1] < 1:
            raise ValueError(f"topk_ids has shape {list(shape)}: allowed is [tokens, k], k >= 1.")
        if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
            raise ValueError(f"topk_ids has dtype {dtype}: allowed is an integer dtype.")
        if not self.topk_weights.dtype.is_floating_point:
            raise ValueError(
                f"topk_weights has dtype {self.topk_weights.dtype}: allowed is a float dtype."
            )
        for name, tensor in (
            ("topk_weights", self.topk_weights),
            ("topk_scores", self.topk_scores),
        ):
            if tensor is not None and tensor.shape != shape:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}: allowed is {list(shape)}, as topk_ids."
                )
        scores = self.scores
        if scores is not None and (scores.dim() != 2 or scores.shape[0] != shape[0]):
            raise ValueError(
                f"scores has shape {list(scores.shape)}: allowed is [{shape[0]}, experts]."
            )
        for name, tensor in (
            ("valid", self.valid),
            ("token_source", self.token_source),
            ("token_request", self.token_request),
            ("token_priority", self.token_priority),
            ("token_decode", self.token_decode),
        ):
            if tensor is None:
                continue
            if tensor.shape != shape[:1]:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}: allowed is one entry a token, "
                    f"[{shape[0]}]."
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
        known = {}
        if placement is not None:
            known["placement"] = placement.num_experts
        if self.scores is not None:
            known["scores"] = self.scores.shape[1]
        if self.num_experts is not None:
            known["num_experts"] = self.num_experts
        if not known:
            raise ValueError(
                "the number of experts is unknown: give scores, a placement or num_experts."
            )
        if len(set(known.values())) > 1:
            said = ", ".join(f"{name} says {count}" for name, count in known.items())
            raise ValueError(f"the number of experts is not the same everywhere: {said}.")
        return next(iter(known.values()))
