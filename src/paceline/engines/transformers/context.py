"""What a forward of the model says of its tokens: padding, position, request, device, modality.

MoE layers see flattened rows. What stands in for the model's forward keeps its arguments;
what the policy needs is derived from them at most once a forward, and only when a layer asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.engines.transformers.forwards import argument_names

TokenSource: TypeAlias = (
    Literal["sequence"] | Callable[[int, int, torch.device], Tensor] | Tensor | None
)
_T = TypeVar("_T")
_CACHES = ("cache", "past_key_values", "cache_params")
_TOKEN_TYPES = ("mm_token_type_ids", "moe_mm_token_type_ids")
_MODALITY_OF_TYPE = {"image": 1, "video": 2, "audio": 3}
"""Values of Transformers' mm_token_type_ids; 0 is text."""


def _once(method: Callable[[ForwardContext], _T]) -> _T:
    """A property computed when first asked for (functools.cached_property locks: a graph break)."""
    name = method.__name__

    def value(self: ForwardContext) -> Any:
        if name not in self._known:
            self._known[name] = method(self)
        return self._known[name]

    # what a type checker sees is the value, as with any property
    return cast(_T, property(value, doc=method.__doc__))


class ForwardContext:
    """The tokens of one running forward, in rows `[batch * length]` as the MoE layers see them.

    Args:
        arguments: of the forward, by name.
        config: of the model that runs, for its modality token ids.
        token_source: what tells on which device a token lives.
        counts_past: whether anybody will ask what was cached before; a mask that needs it does.

    Attributes:
        tokens: ids [batch, length] or embeddings [batch, length, hidden], None where the forward
            doesn't tell.
        shape: (batch, length) of the tokens, None without them.
        rows: batch * length, None without tokens.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        config: Any,
        token_source: TokenSource,
        counts_past: bool = True,
    ) -> None:
        self._arguments, self._config, self._token_source = arguments, config, token_source
        self._known: dict[str, Any] = {}
        self.tokens = tokens = _tokens(arguments)
        self.shape: tuple[int, int] | None = None
        self.rows: int | None = None
        if tokens is not None:
            batch, length = tokens.shape[:2]
            self.shape, self.rows = (batch, length), batch * length
        mask = arguments.get("attention_mask")
        self._past: int | Tensor = 0
        if counts_past or (mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2)):
            self._past = _cached_tokens(arguments)  # read now: the forward adds to the cache

    def has_tokens_of(self, arguments: dict[str, Any]) -> bool:
        """Whether a forward inside this one, called so, gets these tokens, in this or other form.

        It does too where it is given none that can be seen.
        """
        if self.tokens is None:
            return False
        tokens = _tokens(arguments)
        return tokens is None or tokens is self.tokens or tokens.shape[:2] == self.shape

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        return torch.device("cpu") if self.tokens is None else self.tokens.device

    @property
    def _ends(self) -> Tensor | None:
        """[requests] where each sequence packed into the one row ends, None for a usual batch.

        Continuous batching packs so, and fills the row up with fabricated tokens.
        """
        starts = self._arguments.get("cu_seq_lens_q")
        packed = isinstance(starts, Tensor) and self.shape is not None and self.shape[0] == 1
        return starts[1:] if packed and isinstance(starts, Tensor) else None

    @property
    def num_requests(self) -> int:
        """Requests of this forward, as far as the host knows."""
        return len(self._ends) if self._ends is not None else self.shape[0] if self.shape else 0

    @_once
    def valid(self) -> Tensor | None:
        """[rows] bool, False for padding; None: every token is real."""
        mask = self._arguments.get("attention_mask")
        if self.shape is None:
            return None
        if self._ends is not None:
            return torch.arange(self.shape[1], device=self.device) < self._ends[-1]
        if mask is None:
            return None
        if isinstance(mask, dict):
            mask = mask.get("full_attention", next(iter(mask.values()), None))
        batch, length = self.shape
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= length:
            own = mask[:, -1] if length == 1 else mask[:, -length:].reshape(-1)
            return own != 0
        if isinstance(mask, Tensor) and mask.dim() == 4:
            # a token is real where it may attend to itself
            mask = mask if mask.dtype is torch.bool else mask == 0
            own = mask[:, 0].diagonal(self.past_length, 1, 2)
            if own.shape == self.shape:
                return own.reshape(-1)
            if own.shape == (1, length):
                return own.expand(batch, length).reshape(-1)
        if mask is None:
            return None
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask {shape} can't be read as padding: allowed is [batch, tokens "
            "so far] or "
            "[batch, 1, length, tokens so far]."
        )

    @_once
    def past_length(self) -> int:
        """Tokens that were cached before this forward."""
        return int(self._past)

    @property
    def is_decode(self) -> bool:
        """Whether the host knows that every sequence adds one token to what is cached."""
        if self._ends is not None:
            return self._arguments.get("max_length_q") == 1 and _cache(self._arguments) is not None
        return self.shape is not None and self.shape[1] == 1 and self.past_length > 0

    @_once
    def decode(self) -> Tensor | None:
        """[rows] bool, True for a token that is the only one its sequence adds; None: none is."""
        if self._ends is not None and self.request is not None and self.position is not None:
            lengths = torch.diff(self._ends, prepend=self._ends.new_zeros(1))
            last = len(lengths) - 1
            return (lengths[self.request.clamp(max=last)] == 1) & (self.position > 0)
        if not self.is_decode or self.rows is None:
            return None
        return torch.ones(self.rows, dtype=torch.bool, device=self.device)

    @_once
    def position(self) -> Tensor | None:
        """[rows] int64 position of each token among the real tokens of its sequence."""
        if self.shape is None:
            return None
        batch, length = self.shape
        mask = self._arguments.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            return ((mask != 0).long().cumsum(1) - 1)[:, -length:].reshape(-1)
        positions = self._arguments.get("position_ids")
        if isinstance(positions, Tensor) and positions.shape == self.shape:
            return positions.reshape(-1).long()
        row = torch.arange(length, device=self.device) + self.past_length
        return row.expand(batch, length).reshape(-1)

    @_once
    def request(self) -> Tensor | None:
        """[rows] int64: the row of the batch, or the packed sequence, is the request."""
        if self.shape is None:
            return None
        if self._ends is not None:
            row = torch.arange(self.shape[1], device=self.device, dtype=self._ends.dtype)
            return torch.searchsorted(self._ends, row, right=True)
        return torch.arange(self.shape[0], device=self.device).repeat_interleave(self.shape[1])

    @_once
    def modality(self) -> dict[str, Tensor]:
        """Name -> [rows] bool for image, video and audio; empty where everything is text."""
        if self.shape is None:
            return {}
        length = self.shape[1]
        mask = self._arguments.get("attention_mask")
        so_far = mask.shape[1] if isinstance(mask, Tensor) and mask.dim() == 2 else length
        for name in _TOKEN_TYPES:
            kinds = self._arguments.get(name)
            # a prompt's types that decode steps still carry say nothing of the new token
            if (
                isinstance(kinds, Tensor)
                and kinds.dim() == 2
                and kinds.shape[1] in (length, so_far)
            ):
                kinds = kinds[:, -length:].reshape(-1)
                return {m: kinds == value for m, value in _MODALITY_OF_TYPE.items()}
        ids = self._arguments.get("input_ids")
        if not isinstance(ids, Tensor):
            return {}
        return {m: ids.reshape(-1) == token for m, token in modality_tokens(self._config).items()}

    def source(self, num_devices: int) -> Tensor | None:
        """[rows] int64 device on which each token lives.

        Raises:
            ValueError: if the user's token_source doesn't fit this batch.
        """
        kind = self._token_source
        if kind is None or self.shape is None:
            return None
        batch, length = self.shape
        if isinstance(kind, str):
            device = torch.arange(batch, device=self.device) * num_devices // batch
            return device.repeat_interleave(length)
        given = kind(batch, length, self.device) if callable(kind) else kind.to(self.device)
        if given.numel() == batch * length:
            return given.reshape(-1)
        if given.shape == (batch,):
            return given.repeat_interleave(length)
        raise ValueError(
            f"token_source has shape {list(given.shape)}: allowed is [{batch}] or "
            f"[{batch}, {length}]."
        )

    def subset(self, rows: int, layer: str) -> Tensor | None:
        """[rows] indices into the batch of a layer that sees only text, or only other, tokens.

        None where no such subset has that many rows.
        """
        if not self.modality:
            return None
        other = torch.stack(list(self.modality.values())).any(0)
        named_other = any(word in layer for word in ("vision", "image", "visual"))
        for members in (other, ~other) if named_other else (~other, other):
            index = members.nonzero().flatten()
            if len(index) == rows:
                return index
        return None


def _cache(arguments: dict[str, Any]) -> Any:
    """The cache a forward is given, under whichever name."""
    return next((c for name in _CACHES if (c := arguments.get(name)) is not None), None)


def _cached_tokens(arguments: dict[str, Any]) -> int | Tensor:
    """Tokens in a forward's cache; where a device counts them, no host waits for it."""
    cache = _cache(arguments)
    if not hasattr(cache, "get_seq_length"):
        return 0
    try:
        length = cache.get_seq_length()
    except ValueError:  # a cache of linear attention layers alone counts no tokens
        return int(bool(getattr(cache, "has_previous_state", lambda: False)()))
    return length.clone() if isinstance(length, Tensor) else int(length)


def modality_tokens(config: Any) -> dict[str, int]:
    """Modality -> id of the placeholder token that a config names for it."""
    found = {}
    parts = [config, getattr(config, "thinker_config", None)]
    for modality in _MODALITY_OF_TYPE:
        for part in parts:
            for ending in ("token_id", "token_index"):
                token = getattr(part, f"{modality}_{ending}", None)
                if isinstance(token, int) and modality not in found:
                    found[modality] = token
    return found


def forward_models(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """The model and those of its parts that are models themselves and hold MoE layers."""
    wanted = {id(block) for block in blocks}
    found = [model]
    for module in model.modules():
        if module is model or not isinstance(module, PreTrainedModel):
            continue
        if any(id(m) in wanted for m in module.modules() if m is not module):
            found.append(module)
    return found


def _tokens(arguments: dict[str, Any]) -> Tensor | None:
    """Ids [batch, length] or embeddings [batch, length, hidden] a forward is given, if any."""
    for name in ("input_ids", "inputs_embeds", "decoder_input_ids"):
        tokens = arguments.get(name)
        if isinstance(tokens, Tensor) and tokens.dim() >= 2:
            return tokens
    return None


def named_arguments(
    names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """A call's arguments by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs} if args else kwargs


def parameter_names(module: nn.Module) -> list[str]:
    """Names of a module's forward parameters, in order."""
    return argument_names(module.forward)
