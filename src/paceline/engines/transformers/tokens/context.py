"""Tokens of a running forward: padding, position, request, device and modality of each.

MoE layers see flattened rows. The patch of the model's forward keeps its arguments; what the policy
needs is derived from them at most once per forward, and only when a layer asks.
"""

from __future__ import annotations

from typing import Any

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
from paceline.engines.transformers.tokens.modality import (
    by_modality,
    read_modality,
    rows_of_modality,
    tower_modality,
)
from paceline.facts import Facts
from paceline.routing.tensors import lazy


class ForwardContext:
    """The tokens of one running forward, in rows `[batch * length]` as the MoE layers see them.

    Args:
        arguments: of the forward, by name.
        config: of the model that runs, for its modality token ids.
        generation: the `generate` that runs the forward, None outside one.
        counts_past: whether `past_length` is needed; a 4-d mask needs it anyway.

    Attributes:
        arguments: of the forward, by name.
        tokens: ids [batch, length] or embeddings [batch, length, hidden], None where the forward
            doesn't tell.
        shape: (batch, length) of the tokens, None without them.
        rows: batch * length, None without tokens.
        step: number of the forward, a 0-d tensor while a policy asks for it.
        rules: in force for this forward, one per layer.
        watchers: of this forward, with the facts that they ask for.
        calls: record of the layers' calls where a backward may repeat them, else None.
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
        self._around: dict[str, Any] = {}
        self._inner_calls: dict[int, int] = {}
        self.step: Tensor | int = 0
        self.rules: tuple[Any, ...] = ()
        self.watchers: tuple[tuple[Any, Facts], ...] = ()
        self.calls: Any = None
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

    # -- forwards inside this one -----------------------------------------------------------------

    def inside(self, arguments: dict[str, Any], config: Any, module: int | None) -> ForwardContext:
        """Return the context of a forward inside this one: this one, if that has the same tokens.

        A language model inside another model mostly gets the same tokens in another form. But a
        module may run it twice, on other tokens or under another mask.

        Args:
            config: of the inner module, None without one.
            module: a number of its own for each inner module that takes tokens; None: it takes
                none, so that its arguments are all there is.
        """
        own = arguments if module is None else self._arguments_inside(arguments, module)
        if own is None:
            return self
        if own is not arguments or config is None:
            config = self._config
        inner = ForwardContext(own, config, self._labels, self._generation, self._counts_past)
        inner.step, inner.rules, inner.watchers = self.step, self.rules, self.watchers
        inner.calls = self.calls
        inner._around = self.arguments
        return inner

    def _arguments_inside(self, arguments: dict[str, Any], module: int) -> dict[str, Any] | None:
        """Return the arguments that describe an inner forward's tokens, None if these here do."""
        calls = self._inner_calls.get(module, 0)
        self._inner_calls[module] = calls + 1
        tokens, mask = tokens_of(arguments), arguments.get("attention_mask")
        own = self.arguments.get("attention_mask")
        if self.tokens is None:
            return arguments
        if tokens is self.tokens and mask is own:
            return None
        if tokens is None or self.shape is None:
            return None
        if tokens.shape[:2] != self.shape:
            return arguments
        if not tokens.is_floating_point() and not _same_ids(self.tokens, tokens):
            return arguments
        if is_padding_mask(mask):
            if mask is own:
                return None
            passed = {name: value for name, value in arguments.items() if value is not None}
            return {**self.arguments, **passed}
        if calls == 0 or tokens is self.tokens:
            return None
        # the same module once more, on embeddings of its own: only its own arguments count now
        known = mask is not None or own is None
        return arguments if known else {}

    # -- properties of the tokens -----------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Device of the tokens."""
        return torch.device("cpu") if self.tokens is None else self.tokens.device

    @property
    def is_masked(self) -> bool:
        """True if the forward was given a mask of any kind, readable or not."""
        return any(value is not None for name, value in self.arguments.items() if "mask" in name)

    @property
    def _ends(self) -> Tensor | None:
        """[requests] end of each sequence packed into the one row, None for a usual batch.

        Continuous batching packs this way, and fills the row up with fabricated tokens.
        """
        starts = self.arguments.get("cu_seq_lens_q")
        packed = isinstance(starts, Tensor) and self.shape is not None and self.shape[0] == 1
        return starts[1:] if packed and isinstance(starts, Tensor) else None

    @property
    def _restarts(self) -> Tensor | None:
        """[batch, length] bool, True where another sequence of a row starts; None: none can.

        Sequences packed into one row without a mask or a cache are told apart by their positions
        alone, as Transformers' own masks do (`find_packed_sequence_indices`).
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
        packed = self._restarts is not None or self._labels.request is not None
        request = self.request if packed and self.device.type == "cpu" else None
        return self.shape[0] if request is None else len(torch.unique(request))

    @lazy
    def valid(self) -> Tensor | None:
        """[rows] bool, False for padding and for sequences that have ended; None: all are tokens.

        Raises:
            ValueError: if the mask can't be read, or the user's labels don't fit this batch.
        """
        if self.shape is None:
            return None
        batch, length = self.shape
        valid, mask, ends = None, self.arguments.get("attention_mask"), self._ends
        if ends is not None:
            valid = torch.arange(length, device=self.device) < ends[-1]
        elif mask is not None:
            if isinstance(mask, dict):  # by kind of attention
                mask = mask.get("full_attention", next(iter(mask.values()), None))
            valid = None if mask is None else real_rows(mask, batch, length, self._past)
        labels = self._labels.valid
        if labels is not None:
            valid = _both(valid, self._labels.of("valid", batch, length, self.device))
        ended = None if self._generation is None else self._generation.ended
        if ended is not None and ended.shape[0] == batch:
            running = (~ended).to(self.device)
            valid = _both(valid, running if length == 1 else running.repeat_interleave(length))
        if valid is None or not valid.is_cpu or torch.compiler.is_compiling():
            return valid
        # looking is no wait here: layers needn't see flags that are all True
        return None if type(valid) is Tensor and bool(valid.all()) else valid

    @lazy
    def past_length(self) -> int:
        """Number of tokens that were cached before this forward."""
        return int(self._past)

    @property
    def is_decode(self) -> bool:
        """True if the host knows that every sequence has reached generation.

        `generate` knows. Elsewhere whatever comes behind cached tokens counts as generated, one
        token or several (guesses to be verified); for a prompt in parts there is `token_decode`.
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

    @lazy
    def decode(self) -> Tensor | None:
        """[rows] bool, True for a token of a sequence that has reached generation; None: none."""
        if self.shape is None or self.rows is None:
            return None
        labels = self._labels.of("decode", *self.shape, self.device)
        if labels is not None:
            return labels
        if self._ends is not None and self.request is not None and self.position is not None:
            lengths = torch.diff(self._ends, prepend=self._ends.new_zeros(1))
            last = len(lengths) - 1
            return (lengths[self._packed.clamp(max=last)] == 1) & (self.position > 0)
        if not self.is_decode:
            return None
        return torch.ones(self.rows, dtype=torch.bool, device=self.device)

    @lazy
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

    @lazy
    def request(self) -> Tensor | None:
        """[rows] int64 request of each token: its row of the batch, or its sequence in a row."""
        if self.shape is None:
            return None
        labels = self._labels.of("request", *self.shape, self.device)
        if labels is not None:
            return labels.long()
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
        """[rows] index of the sequence in a packed row that each token belongs to."""
        assert self._ends is not None
        assert self.shape is not None
        row = torch.arange(self.shape[1], device=self.device, dtype=self._ends.dtype)
        return torch.searchsorted(self._ends, row, right=True)

    @lazy
    def modality(self) -> dict[str, Tensor] | None:
        """Name -> [rows] bool for image, video and audio; empty: all is text; None: unknown."""
        if self.shape is None:
            return {}
        labels = self._labels.of("modality", *self.shape, self.device)
        if labels is not None:
            return by_modality(labels)
        decoding = self._generation is not None and self._generation.decoding
        return read_modality(self.arguments, self._config, decoding)

    @property
    def tower(self) -> str | None:
        """The one modality that a tower's forward reads, which has no text; None: not a tower's."""
        return tower_modality(self.arguments, self._around)

    def source(self, num_devices: int) -> Tensor | None:
        """Return [rows] int64, the device on which each token lives; None if unknown.

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
        """Return values [batch * length] of the rows that a layer sees, [rows].

        Raises:
            RuntimeError: if the layer sees other rows, and which ones is unknown.
        """
        if per_token is None or per_token.shape[0] == rows:
            return per_token
        index = rows_of_modality(self.modality, rows, layer)
        if index is not None:
            return per_token[index]
        if per_token.dtype is torch.bool and bool(per_token.all()):
            return None  # no padding anywhere, so none here
        raise RuntimeError(
            f"layer {layer} sees {rows} rows of a batch of {list(self.shape or ())} tokens, and it "
            "is unknown which tokens these are: give a batch without padding, or no policy."
        )

    def modality_of(self, rows: int, layer: str) -> dict[str, Tensor] | None:
        """Return `modality` of the rows that a layer sees; raises like `rows_of`."""
        if self.rows is None and self.tower is not None:
            return {self.tower: torch.ones(rows, dtype=torch.bool, device=self.device)}
        found = self.modality
        return found and {m: self.rows_of(t, rows, layer) for m, t in found.items()}


def _same_ids(own: Tensor, ids: Tensor) -> bool:
    """Return True if `ids` are the outer forward's, themselves or a view of them."""
    if ids is own:
        return True
    if own.is_floating_point() or torch.compiler.is_compiling():
        return False
    return ids.data_ptr() == own.data_ptr() and ids.stride() == own.stride()


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the flags that are True in both; None is True everywhere."""
    if one is None or other is None:
        return other if one is None else one
    return one & other
