"""What a user says of the tokens of a batch, where the forward doesn't: labels of the tokens."""

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
    """What the user says of tokens; None where the forward is to tell.

    Attributes:
        source: device on which a token lives; "sequence": row i of a batch of B lives on device
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
            given: Any = getattr(self, name)
            if given is None or isinstance(given, Tensor) or callable(given):
                continue
            if name == "source" and given == "sequence":
                continue
            strings = '"sequence", ' if name == "source" else ""
            raise ValueError(
                f"token_{name}={given!r} is not allowed: it is None, {strings}a tensor or a "
                "function of (batch, length, device)."
            )

    def of(self, name: str, batch: int, length: int, device: torch.device) -> Tensor | None:
        """[batch * length] labels of a batch, None where the user gave none.

        Raises:
            ValueError: if what the user gave doesn't fit this batch.
        """
        given: Any = getattr(self, name)
        if given is None:
            return None
        labels = given(batch, length, device) if callable(given) else given
        if not isinstance(labels, Tensor):
            raise ValueError(
                f"token_{name} gave a {type(labels).__name__}: allowed is a tensor of shape "
                f"[{batch}] or [{batch}, {length}]."
            )
        wants_bool = name in ("valid", "decode")
        if labels.is_floating_point() or (labels.dtype is torch.bool) != wants_bool:
            allowed = "bool" if wants_bool else "an integer dtype"
            raise ValueError(f"token_{name} has dtype {labels.dtype}: allowed is {allowed}.")
        labels = labels.to(device)
        # [batch] comes first: with one token a sequence the two are the same
        if labels.shape == (batch,):
            return labels.repeat_interleave(length)
        if labels.shape == (batch, length):
            return labels.reshape(-1)
        if labels.numel() == batch * length and 1 in (batch, labels.dim()):
            return labels.reshape(-1)  # a layer run outside the model's forward sees one row
        raise ValueError(
            f"token_{name} has shape {list(labels.shape)}: allowed is [{batch}] or "
            f"[{batch}, {length}]."
        )


NO_LABELS = UserLabels()
