"""Pools: the tokens that share one budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.policy import Pool
from paceline.routing.inputs import RoutingInputs


@dataclass(frozen=True, eq=False)
class TokenPools:
    """Pools of one forward's tokens, of a static number.

    Attributes:
        of_token: [tokens] int64 pool of each token, in [0, count); anything for padding.
            None: one pool.
        count: number of pools (static: some may have no token).
        sizes: [count] int64 valid tokens of each pool.
        valid: [tokens] bool, or None: every token.
        rows: tokens, padding included.
    """

    of_token: Tensor | None
    count: int
    sizes: Tensor
    valid: Tensor | None
    rows: int

    def count_of(self, flags: Tensor) -> Tensor:
        """Count the valid tokens of each pool that are in `flags` [tokens] bool: [count] int64."""
        flags = flags if self.valid is None else flags & self.valid
        if self.of_token is None:
            return flags.sum().reshape(1)
        counts = torch.zeros_like(self.sizes)
        return counts.scatter_add(0, self.of_token, flags.long())

    @property
    def total(self) -> Tensor:
        """0-d int64: valid tokens of the forward."""
        return self.sizes.sum()

    def rank(self) -> Tensor:
        """Return [tokens] int64 index of a token among its pool's valid tokens; any for padding."""
        if self.of_token is None:
            if self.valid is None:
                return torch.arange(self.rows, device=self.sizes.device)
            return self.valid.long().cumsum(0) - 1
        pool = self.of_token
        if self.valid is not None:
            pool = torch.where(self.valid, pool, self.count)
        ordered, order = torch.sort(pool, stable=True)
        return torch.empty_like(pool).scatter_(0, order, position_in_run(ordered).long())


def token_pools(inputs: RoutingInputs, pool: Pool, num_devices: int) -> TokenPools:
    """Return the pools of these tokens: one, one per source device, or one per request.

    Requests may have any labels; pool i is the i-th smallest label among the valid tokens, and
    there are as many pools as rows, so that shapes don't depend on data.

    Raises:
        ValueError: if the labels that `pool` needs are missing, or (on CPU) a source is no device.
    """
    ids, valid = inputs.topk_ids, inputs.valid
    rows = ids.shape[0]
    if pool == "batch":
        if valid is None:
            sizes = torch.full((1,), rows, dtype=torch.int64, device=ids.device)
        else:
            sizes = valid.sum().reshape(1)
        return TokenPools(None, 1, sizes, valid, rows)
    counted = torch.ones_like(ids[:, 0], dtype=torch.int64) if valid is None else valid.long()
    if pool == "source":
        of_token, count = token_devices(inputs, num_devices, 'pool="source"'), num_devices
    else:
        if inputs.token_request is None:
            raise ValueError('pool="request" needs token_request, the request of each token.')
        of_token, count = _dense(inputs.token_request.long(), valid), rows
    sizes = torch.zeros(count, dtype=torch.int64, device=ids.device)
    sizes = sizes.scatter_add(0, of_token, counted)
    return TokenPools(of_token, count, sizes, valid, rows)


def token_devices(inputs: RoutingInputs, num_devices: int, needed_by: str) -> Tensor:
    """Return the [tokens] int64 device of each token, in [0, num_devices); 0 for padding.

    Raises:
        ValueError: if `token_source` is missing, or (where looking costs no sync) out of range;
            on an accelerator or under compilation a device-side assertion checks the range.
    """
    if inputs.token_source is None:
        raise ValueError(
            f"{needed_by} needs token_source, the device on which each token lives; where tokens "
            "are replicated on all devices they have none."
        )
    source = inputs.token_source.long()
    if inputs.valid is not None:
        source = torch.where(inputs.valid, source, 0)
    allowed = ((source >= 0) & (source < num_devices)).all()
    if source.device.type == "cpu" and not torch.compiler.is_compiling():
        if not allowed:
            raise ValueError(
                f"token_source must be from 0 to {num_devices - 1}, got {source.min()} to "
                f"{source.max()}"
            )
    else:
        torch._assert_async(allowed, f"token_source must be from 0 to {num_devices - 1}")
    return source.clamp(0, num_devices - 1)


def position_in_run(ordered: Tensor) -> Tensor:
    """Return [n] int32: index of each of n < 2 ** 31 elements in its run of equal neighbours."""
    position = torch.arange(ordered.shape[0], device=ordered.device, dtype=torch.int32)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    return position - torch.cummax(torch.where(starts, position, 0), 0).values


def _dense(labels: Tensor, valid: Tensor | None) -> Tensor:
    """Rank [n] labels among the distinct labels of valid tokens; padding comes last."""
    if valid is not None:
        labels = torch.where(valid, labels, torch.iinfo(torch.int64).max)
    ordered, order = torch.sort(labels, stable=True)
    changes = torch.zeros_like(ordered)
    changes[1:] = (ordered[1:] != ordered[:-1]).long()
    return torch.empty_like(labels).scatter_(0, order, changes.cumsum(0))
