"""What a forward of the model says of its tokens: padding, position, request, device, modality.

MoE layers see flattened rows. What stands in for the model's forward keeps its arguments;
what the policy needs is derived from them at most once a forward, and only when a layer asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from paceline.engines.transformers.tokens.arguments import (
    cache_of,
    cached_tokens,
    is_padding_mask,
    positions_of,
    real_rows,
    tokens_of,
)
from paceline.engines.transformers.tokens.generation import Generation
from paceline.engines.transformers.tokens.labels import NO_LABELS, UserLabels
from paceline.engines.transformers.tokens.modality import modality_of, told_apart, tower_modality
from paceline.engines.transformers.tokens.row_flags import both, known_to_be_all, subset_of
from paceline.facts import Facts

_T = TypeVar("_T")


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
        labels: what the user says of tokens.
        generation: the `generate` that runs the forward, None outside one.
        counts_past: whether anybody will ask what was cached before; a mask that needs it does.

    Attributes:
        arguments: of the forward, by name.
        inner_calls: forwards inside this one so far, by module.
        tokens: ids [batch, length] or embeddings [batch, length, hidden], None where the forward
            doesn't tell.
        shape: (batch, length) of the tokens, None without them.
        rows: batch * length, None without tokens.
        step: number of the forward, a 0-d tensor, where anybody counts.
        rules: in force for this forward, one a layer.
        watchers: of this forward, with the facts that they ask for.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        config: Any,
        labels: UserLabels = NO_LABELS,
        generation: Generation | None = None,
        counts_past: bool = True,
    ) -> None:
        self.arguments, self._config, self._labels = arguments, config, labels
        self._generation, self._counts_past = generation, counts_past
        self._known: dict[str, Any] = {}
        self._around: dict[str, Any] = {}
        self.inner_calls: dict[int, int] = {}
        self.step: Tensor | int = 0
        self.rules: tuple[Any, ...] = ()
        self.watchers: tuple[tuple[Any, Facts], ...] = ()
        self.tokens = tokens = tokens_of(arguments)
        self.shape: tuple[int, int] | None = None
        self.rows: int | None = None
        if tokens is not None:
            batch, length = tokens.shape[:2]
            self.shape, self.rows = (batch, length), batch * length
        mask = arguments.get("attention_mask")
        self._past: int | Tensor = 0
        if counts_past or (mask is not None and not is_padding_mask(mask)):
            self._past = cached_tokens(arguments)  # read now: the forward adds to the cache

    def inside(self, arguments: dict[str, Any], config: Any) -> ForwardContext:
        """The context of a forward inside this one, see `nested`."""
        config = self._config if config is None else config
        inner = ForwardContext(arguments, config, self._labels, self._generation, self._counts_past)
        inner.step, inner.rules, inner.watchers = self.step, self.rules, self.watchers
        inner._around = self.arguments
        return inner

    # -- what is said of the tokens ---------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        return torch.device("cpu") if self.tokens is None else self.tokens.device

    @property
    def is_masked(self) -> bool:
        """Whether the forward was given a mask of any kind, readable or not."""
        return any(value is not None for name, value in self.arguments.items() if "mask" in name)

    @property
    def _ends(self) -> Tensor | None:
        """[requests] where each sequence packed into the one row ends, None for a usual batch.

        Continuous batching packs so, and fills the row up with fabricated tokens.
        """
        starts = self.arguments.get("cu_seq_lens_q")
        packed = isinstance(starts, Tensor) and self.shape is not None and self.shape[0] == 1
        return starts[1:] if packed and isinstance(starts, Tensor) else None

    @property
    def _restarts(self) -> Tensor | None:
        """[batch, length] bool: where another sequence of the same row starts; None: none can.

        Sequences packed into one row without a mask or a cache are told apart by their positions
        alone: Transformers' own masks say so (`find_packed_sequence_indices`).
        """
        positions, mask = positions_of(self.arguments), self.arguments.get("attention_mask")
        if self.shape is None or mask is not None or cache_of(self.arguments) is not None:
            return None
        if positions is None:
            return None
        if positions.shape[1] != self.shape[1] or self.shape[1] == 1:
            return None
        return torch.diff(positions, prepend=positions[:, :1] - 1) != 1

    @property
    def num_requests(self) -> int:
        """Requests of this forward, as far as the host knows without waiting for a device."""
        if self._ends is not None:
            return len(self._ends)
        if self.shape is None:
            return 0
        told_apart = self._restarts is not None or self._labels.request is not None
        request = self.request if told_apart and self.device.type == "cpu" else None
        return self.shape[0] if request is None else len(torch.unique(request))

    @_once
    def valid(self) -> Tensor | None:
        """[rows] bool, False for what is no token: padding, a sequence that has ended; None: all.

        Raises:
            ValueError: if the mask can't be read, or the user's labels don't fit this batch.
        """
        if self.shape is None:
            return None
        valid = self._unpadded()
        if self._labels.valid is not None:
            valid = both(valid, self._labels.of("valid", *self.shape, self.device))
        ended = None if self._generation is None else self._generation.ended
        if ended is not None and ended.shape[0] == self.shape[0]:
            running = (~ended).to(self.device)
            if self.shape[1] > 1:
                running = running.repeat_interleave(self.shape[1])
            valid = both(valid, running)
        return None if valid is None or known_to_be_all(valid) else valid

    def _unpadded(self) -> Tensor | None:
        """[rows] bool, False for padding, as the forward's arguments say; None: no padding."""
        assert self.shape is not None
        if self._ends is not None:
            return torch.arange(self.shape[1], device=self.device) < self._ends[-1]
        mask = self.arguments.get("attention_mask")
        if isinstance(mask, dict):  # by kind of attention
            mask = mask.get("full_attention", next(iter(mask.values()), None))
        return None if mask is None else real_rows(mask, *self.shape, self._past)

    @_once
    def past_length(self) -> int:
        """Tokens that were cached before this forward."""
        return int(self._past)

    @property
    def is_decode(self) -> bool:
        """Whether the host knows that every sequence has reached generation.

        `generate` knows. Elsewhere whatever comes behind cached tokens is taken for generated, one
        token or several (guesses to be verified); a prompt in parts is told by `token_decode`.
        """
        if self._labels.decode is not None:
            return False  # the user knows, token by token
        if self._ends is not None:
            return self.arguments.get("max_length_q") == 1 and cache_of(self.arguments) is not None
        if self.shape is None:
            return False
        if self._generation is not None:
            return self._generation.decoding
        return self.past_length > 0

    @_once
    def decode(self) -> Tensor | None:
        """[rows] bool, True for a token of a sequence that has reached generation; None: none."""
        if self.shape is None or self.rows is None:
            return None
        said = self._labels.of("decode", *self.shape, self.device)
        if said is not None:
            return said
        if self._ends is not None and self.request is not None and self.position is not None:
            lengths = torch.diff(self._ends, prepend=self._ends.new_zeros(1))
            last = len(lengths) - 1
            return (lengths[self._packed.clamp(max=last)] == 1) & (self.position > 0)
        if not self.is_decode:
            return None
        return torch.ones(self.rows, dtype=torch.bool, device=self.device)

    @_once
    def position(self) -> Tensor | None:
        """[rows] int64 position of each token among the real tokens of its sequence."""
        if self.shape is None:
            return None
        batch, length = self.shape
        mask: Any = self.arguments.get("attention_mask")
        if is_padding_mask(mask):
            real: Tensor = mask != 0
            return (real.long().cumsum(1) - 1)[:, -length:].reshape(-1)
        positions = positions_of(self.arguments)
        if positions is not None and positions.shape in ((1, length), (batch, length)):
            return positions.expand(batch, length).reshape(-1).long()
        if self._ends is not None:
            starts = nn.functional.pad(self._ends, (1, 0)).long()
            return torch.arange(length, device=self.device) - starts[self._packed]
        row = torch.arange(length, device=self.device) + self.past_length
        return row.expand(batch, length).reshape(-1)

    @_once
    def request(self) -> Tensor | None:
        """[rows] int64: the row of the batch, or the sequence packed into it, is the request."""
        if self.shape is None:
            return None
        said = self._labels.of("request", *self.shape, self.device)
        if said is not None:
            return said.long()
        if self._ends is not None:
            return self._packed
        batch, length = self.shape
        row = torch.arange(batch, device=self.device)
        restarts = self._restarts
        if restarts is None:
            return row.repeat_interleave(length)
        return (restarts.cumsum(1) + row.unsqueeze(1) * length).reshape(-1)

    @property
    def _packed(self) -> Tensor:
        """[rows] which sequence of a packed row each token belongs to."""
        assert self._ends is not None
        assert self.shape is not None
        row = torch.arange(self.shape[1], device=self.device, dtype=self._ends.dtype)
        return torch.searchsorted(self._ends, row, right=True)

    @_once
    def modality(self) -> dict[str, Tensor] | None:
        """Name -> [rows] bool for image, video and audio; empty: all is text; None: unknown."""
        if self.shape is None:
            return {}
        said = self._labels.of("modality", *self.shape, self.device)
        if said is not None:
            return told_apart(said)
        decoding = self._generation is not None and self._generation.decoding
        return modality_of(self.arguments, self._config, decoding)

    @property
    def tower(self) -> str | None:
        """The modality that alone is read here: a tower's forward has no tokens of a text."""
        return tower_modality(self.arguments, self._around)

    def source(self, num_devices: int) -> Tensor | None:
        """[rows] int64 device on which each token lives; None: nobody says.

        Raises:
            ValueError: if the user's token_source doesn't fit this batch.
        """
        if self.shape is None:
            return None
        batch, length = self.shape
        if isinstance(self._labels.source, str):
            device = torch.arange(batch, device=self.device) * num_devices // batch
            return device.repeat_interleave(length)
        return self._labels.of("source", batch, length, self.device)

    # -- layers that see other rows ---------------------------------------------------------------

    def rows_of(self, per_token: Tensor | None, rows: int, layer: str) -> Any:
        """Values [batch * length], of the rows that a layer sees.

        Args:
            per_token: [batch * length] values, or None.
            rows: that the layer sees.
            layer: its name.

        Raises:
            RuntimeError: if the layer sees other rows, and which ones is unknown.
        """
        if per_token is None or per_token.shape[0] == rows:
            return per_token
        index = subset_of(self.modality, rows, layer)
        if index is not None:
            return per_token[index]
        if per_token.dtype is torch.bool and bool(per_token.all()):
            return None  # no padding anywhere, so none here
        raise RuntimeError(
            f"layer {layer} sees {rows} rows of a batch of {list(self.shape or ())} tokens, and "
            "which tokens they are is unknown: allowed is a batch without padding, or no policy."
        )

    def modality_of(self, rows: int, layer: str) -> dict[str, Tensor] | None:
        """`modality`, of the rows that a layer sees; see `rows_of`."""
        if self.rows is None and self.tower is not None:
            return {self.tower: torch.ones(rows, dtype=torch.bool, device=self.device)}
        found = self.modality
        return found and {m: self.rows_of(t, rows, layer) for m, t in found.items()}
