"""The tokens of one forward of a serving engine, in the rows that its MoE layers see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


def _unknown() -> None:
    """Tell no requests."""


@dataclass(eq=False)
class Batch:
    """Tokens of one forward, in the rows that the MoE layers see.

    Attributes:
        rows: number of rows of every layer's input.
        real: False for a profile run, a warm-up or the dummy forward of an idle rank.
        valid: [rows] bool, False for padding; None: every row is a token.
        tokens: number of real tokens among the rows.
        everywhere: number of tokens of all data-parallel ranks together.
        read_requests: returns [requests + 1] first rows of the requests and the end, and
            [requests] tokens that were computed earlier; None where the engine doesn't tell.
    """

    rows: int
    real: bool
    valid: Tensor | None = None
    tokens: int = 0
    everywhere: int = 0
    read_requests: Callable[[], tuple[Tensor, Tensor] | None] = _unknown

    @cached_property
    def _starts_and_computed(self) -> tuple[Tensor, Tensor] | None:
        return self.read_requests()

    def _requests(self) -> tuple[Tensor, Tensor]:
        """Return [requests + 1] first rows and the end, and [requests] tokens computed earlier.

        Raises:
            RuntimeError: if the engine doesn't tell them.
        """
        if self._starts_and_computed is None:
            raise RuntimeError(
                "paceline: this policy needs the requests, which this forward doesn't tell."
            )
        return self._starts_and_computed

    @property
    def requests(self) -> int:
        """Number of requests in the forward, 0 if it is unknown."""
        known = self._starts_and_computed
        return 0 if known is None else len(known[0]) - 1

    @cached_property
    def request(self) -> Tensor:
        """[rows] int64 index of each token's request; padding has the last one's."""
        index = torch.searchsorted(self._requests()[0][1:], torch.arange(self.rows), right=True)
        return index.clamp(max=max(self.requests - 1, 0))

    @cached_property
    def position(self) -> Tensor:
        """[rows] int64 position of each token in its sequence."""
        starts, computed = self._requests()
        return computed[self.request] + torch.arange(self.rows) - starts[self.request]

    def decode(self, prompt_lengths: Tensor) -> Tensor:
        """Return [rows] bool, True for tokens of requests that have computed their whole prompt.

        Args:
            prompt_lengths: [requests] int64.
        """
        return (self._requests()[1] >= prompt_lengths)[self.request]
