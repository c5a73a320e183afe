"""Labels of tokens that a user passes where the forward has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

TokenLabels: TypeAlias = Callable[[int, int, torch.device], Tensor] | Tensor | None
"""A [batch] or [batch, length] tensor, or a function of (batch, length, device) that gives one."""

TokenSource: TypeAlias = "Literal['sequence'] | TokenLabels"


@dataclass(frozen=True, eq=False)
class UserLabels:
    """Labels of tokens from the user; None: taken from the forward.

    Attributes:
        source: device on which a token lives; "sequence": row i of a batch of B is on device
            i * devices // B.
        valid: bool, False for a row that is no token.
        request: any integer label of the request that a token belongs to.
        decode: bool, True for a token that is being generated (not prompt).
        modality: 0 for text, 1 image, 2 video, 3 audio, as Transformers' mm_token_type_ids.
    """

    source: TokenSource = None
    valid: TokenLabels = None
    request: TokenLabels = None
    decode: TokenLabels = None
    modality: TokenLabels = None

    def __post_init__(self) -> None:
        for name in ("source", "valid", "request", "decode", "modality"):
            labels: Any = getattr(self, name)
            if labels is None or isinstance(labels, Tensor) or callable(labels):
                continue
            if name == "source" and labels == "sequence":
                continue
            strings = '"sequence", ' if name == "source" else ""
            raise ValueError(
                f"token_{name} must be None, {strings}a tensor or a function of (batch, length, "
                f"device), got {labels!r}."
            )

    def of(self, name: str, batch: int, length: int, device: torch.device) -> Tensor | None:
        """Return [batch * length] labels of a batch, None where the user gave none.

        Raises:
            ValueError: if the user's labels don't fit this batch.
        """
        source: Any = getattr(self, name)
        if source is None:
            return None
        labels = source(batch, length, device) if callable(source) else source
        shapes = f"[{batch}] or [{batch}, {length}]"
        if not isinstance(labels, Tensor):
            raise ValueError(
                f"token_{name} must give a tensor of shape {shapes}, got a {type(labels).__name__}."
            )
        is_flag = name in ("valid", "decode")
        if labels.is_floating_point() or (labels.dtype is torch.bool) != is_flag:
            allowed = "bool" if is_flag else "an integer dtype"
            raise ValueError(f"token_{name} must have dtype {allowed}, got {labels.dtype}.")
        labels = labels.to(device)
        # [batch] comes first: with one token per sequence the two are the same
        if labels.shape == (batch,):
            return labels.repeat_interleave(length)
        if labels.shape == (batch, length):
            return labels.reshape(-1)
        if labels.numel() == batch * length and 1 in (batch, labels.dim()):
            return labels.reshape(-1)  # a layer run outside the model's forward sees one row
        raise ValueError(f"token_{name} must have shape {shapes}, got {list(labels.shape)}.")


NO_LABELS = UserLabels()
