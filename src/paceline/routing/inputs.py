"""Inputs of routing for the tokens of one layer, and their checks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.numbers import whole_number
from paceline.placement import ExpertPlacement

_WIDE = (torch.int64, torch.int32)
_INTEGERS = (
    *_WIDE, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64
)  # fmt: skip
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FLAGS = (torch.bool,)
_NAMES = {
    _INTEGERS: "an integer dtype",
    _FLOATS: "dtype float32, bfloat16, float16 or float64",
    _FLAGS: "dtype bool",
}


@dataclass(frozen=True, eq=False)
class RoutingInputs:
    """The model's choice for every token, and all else that routing depends on.

    All tensors are on one device.

    Attributes:
        topk_ids: [tokens, k] any integer dtype, kept as int32 or int64; an id outside [0, experts)
            is no assignment.
        topk_weights: [tokens, k] combine weights of the model, after its own scaling.
        scores: [tokens, experts] gate scores before renormalisation and scaling, taken as float32.
        topk_scores: [tokens, k] scores of the chosen experts, if the others are not known.
        valid: [tokens] bool, False for padding; None: every token is real.
        token_source: [tokens] device on which a token lives, in [0, devices).
        token_request: [tokens] any integer label of the request that a token belongs to.
        token_priority: [tokens] small integers, higher is kept first, clamped to [-128, 127].
        token_decode: [tokens] bool, True where a token is being generated (not prompt).
        expert_norms: norm of what dropping an assignment leaves out, for keep="contribution":
            [experts] mean of each expert, or [tokens, experts] the value expected per assignment.
        num_experts: experts of the layer; needed with neither scores nor a placement.
        layer: index of the layer; with `step` it varies keep="random".
        step: number of the forward, an int or a 0-d integer tensor on the tokens' device.

    Raises:
        ValueError: naming the field whose type, dtype, shape or device is wrong.

    Examples:
        >>> ids, weights = torch.tensor([[1, 0]]), torch.tensor([[0.7, 0.3]])
        >>> RoutingInputs(ids, weights, num_experts=4).experts()
        4
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
    expert_norms: Tensor | None = None
    num_experts: int | None = None
    layer: int = 0
    step: int | Tensor = 0

    def __post_init__(self) -> None:
        ids, scores = self.topk_ids, self.scores
        if not isinstance(ids, Tensor):
            raise _no_tensor("topk_ids", ids)
        shape, device = ids.shape, ids.device
        if len(shape) != 2 or shape[1] < 1:
            raise ValueError(f"topk_ids must have shape [tokens, k], k >= 1, got {list(shape)}")
        if ids.dtype not in _WIDE:
            object.__setattr__(self, "topk_ids", expert_ids(ids))
        _check("topk_weights", self.topk_weights, shape, _FLOATS, device)
        # One by one, and nothing done for what is absent: this is on the path of every layer.
        if scores is not None:
            if isinstance(scores, Tensor) and (scores.dim() != 2 or scores.shape[0] != shape[0]):
                raise ValueError(
                    f"scores must have shape [{shape[0]}, experts], got {list(scores.shape)}"
                )
            _check("scores", scores, None, _FLOATS, device)
        if self.topk_scores is not None:
            _check("topk_scores", self.topk_scores, shape, _FLOATS, device)
        if self.valid is not None:
            _check("valid", self.valid, shape[:1], _FLAGS, device)
        if self.token_source is not None:
            _check("token_source", self.token_source, shape[:1], _INTEGERS, device)
        if self.token_request is not None:
            _check("token_request", self.token_request, shape[:1], _INTEGERS, device)
        if self.token_priority is not None:
            _check("token_priority", self.token_priority, shape[:1], _INTEGERS, device)
        if self.token_decode is not None:
            _check("token_decode", self.token_decode, shape[:1], _FLAGS, device)
        if self.expert_norms is not None:
            _check("expert_norms", self.expert_norms, None, _FLOATS, device)
            norms = self.expert_norms.shape
            if len(norms) != 1 and (len(norms) != 2 or norms[0] != shape[0]):
                raise ValueError(
                    f"expert_norms must have shape [experts] or [{shape[0]}, experts], got "
                    f"{list(norms)}"
                )
        if not (self.num_experts is None and type(self.layer) is type(self.step) is int):
            self._check_numbers()

    def _check_numbers(self) -> None:
        """Check the fields that are no tensors; integers of other libraries become Python's."""
        for name, value in (
            ("num_experts", self.num_experts), ("layer", self.layer), ("step", self.step)
        ):  # fmt: skip
            if type(value) is int or (value is None and name == "num_experts"):
                continue
            if name == "step" and isinstance(value, Tensor):
                if value.dim() or value.dtype not in _INTEGERS:
                    raise ValueError(
                        "step must be a whole number or a tensor with one, got shape "
                        f"{list(value.shape)} and dtype {value.dtype}"
                    )
                continue
            number = whole_number(value)
            if number is None:
                raise ValueError(f"{name} must be a whole number, got {value!r}")
            object.__setattr__(self, name, number)
        if self.num_experts is not None and self.num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {self.num_experts}")

    def experts(self, placement: ExpertPlacement | None = None) -> int:
        """Return the number of experts E, from placement, scores, expert_norms or num_experts.

        Raises:
            ValueError: if there is none of them, or two disagree.
        """
        known: dict[str, int] = {}
        if placement is not None:
            known["placement"] = placement.num_experts
        if self.scores is not None:
            known["scores"] = static(self.scores.shape[1])
        if self.expert_norms is not None:
            known["expert_norms"] = static(self.expert_norms.shape[-1])
        if self.num_experts is not None:
            known["num_experts"] = self.num_experts
        if not known:
            raise ValueError(
                "the number of experts is unknown: pass scores, a placement or num_experts."
            )
        if len(set(known.values())) > 1:
            counts = ", ".join(f"{count} from {name}" for name, count in known.items())
            raise ValueError(f"the number of experts must be the same everywhere, got {counts}")
        return next(iter(known.values()))


def expert_ids(ids: Tensor) -> Tensor:
    """Return ids in a dtype that also holds the number of experts, as uint8 doesn't hold 256.

    Args:
        ids: any shape, any integer dtype.

    Returns:
        The same tensor if it is int32 or int64, else int64; ids beyond int64 (uint64) become
        negative, which is no expert either.

    Raises:
        ValueError: if it is no tensor of integers.
    """
    if not isinstance(ids, Tensor):
        raise _no_tensor("topk_ids", ids)
    if ids.dtype in _WIDE:
        return ids
    if ids.dtype not in _INTEGERS:
        raise ValueError(f"topk_ids must have an integer dtype, got {ids.dtype}")
    return ids.to(torch.int64)


def static(size: int) -> int:
    """Return a size as a constant for a compiler: k and E, never the number of tokens."""
    return operator.index(size)


def _check(
    name: str,
    tensor: Any,
    shape: Sequence[int] | None,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check that it is a tensor of this shape (None: any) and device, and one of these dtypes."""
    if not isinstance(tensor, Tensor):
        raise _no_tensor(name, tensor)
    if shape is not None and tensor.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must have {_NAMES[dtypes]}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like topk_ids, got {tensor.device}")


def _no_tensor(name: str, value: Any) -> ValueError:
    return ValueError(f"{name} must be a torch tensor, got {type(value).__name__}")
