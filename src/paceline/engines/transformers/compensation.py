"""Compensated Drop in one layer: what a dropped assignment leaves behind, computed at its token.

Nothing is sent and no load changes: the stand-in of a dropped expert, an affine map of small rank,
is added to what the kept experts give.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.calibration.file import LayerCalibration


class Compensation:
    """The stand-ins of a layer's experts.

    Args:
        layer: what a calibration found of it.
        experts: whose stand-ins are added here; None: all.
        like: a tensor of the dtype and on the device that the layer computes in.
    """

    def __init__(
        self, layer: LayerCalibration, experts: Sequence[int] | None, like: Tensor
    ) -> None:
        count = len(layer.experts)
        own = torch.arange(count) if experts is None else torch.tensor(experts, dtype=torch.int64)
        up, down = layer.up[own], layer.down[own]
        # bias + up (down (x - mean)) = up (down x) + constant
        moved = (down.double() @ layer.mean[own].double().unsqueeze(2)).squeeze(2)
        constant = layer.bias[own].double() - (up.double() @ moved.unsqueeze(2)).squeeze(2)
        local = torch.full((count + 1,), len(own), dtype=torch.int64)
        local[own] = torch.arange(len(own))
        with torch.inference_mode(False):
            self._down = down.to(like)  # [own, rank, hidden]
            self._up = up.transpose(1, 2).contiguous().to(like)  # [own, rank, hidden]
            self._constant = constant.to(like)  # [own, hidden]
            self._local = local.to(like.device)
        self._own = len(own)

    def __call__(
        self, out: Tensor, hidden: Tensor, ids: Tensor, weights: Tensor, dropped: Tensor
    ) -> Tensor:
        """`out` with what the stand-ins of dropped assignments give.

        Rows that lost nothing are as they were, to the bit.

        Args:
            out: [..., hidden] of the kept experts.
            hidden: [..., hidden] states of the tokens.
            ids: [tokens, k] the model's own choice.
            weights: [tokens, k] its combine weights.
            dropped: [tokens, k] bool.
        """
        if self._own == 0:
            return out
        if self._local.device != ids.device:  # the model was moved
            for name in ("_down", "_up", "_constant", "_local"):
                setattr(self, name, getattr(self, name).to(ids.device))
        local = self._local[torch.where(dropped, ids.long(), -1)]
        x = hidden.reshape(-1, hidden.shape[-1])
        # where a graph is made or a device runs ahead, shapes must not depend on what was dropped
        static = x.is_cuda or torch.compiler.is_compiling()
        give = self._dense if static else self._grouped
        flat = out.reshape(-1, out.shape[-1])
        return give(flat, x.to(self._down.dtype), local, weights).reshape(out.shape)

    def _dense(self, out: Tensor, x: Tensor, local: Tensor, weights: Tensor) -> Tensor:
        """Every token times every stand-in, those of dropped assignments kept: no size is read."""
        tokens, rank = x.shape[0], self._down.shape[1]
        lost = torch.zeros((tokens, self._own + 1), dtype=x.dtype, device=x.device)
        lost = lost.scatter_add(1, local, weights.to(x.dtype))[:, : self._own]
        inner = (x @ self._down.reshape(-1, x.shape[1]).T).view(tokens, self._own, rank)
        share = lost.unsqueeze(2)
        inner = torch.where(share != 0, inner * share, 0).flatten(1)
        left = inner @ self._up.reshape(-1, x.shape[1]) + lost @ self._constant
        some = (local < self._own).any(1, keepdim=True)
        return torch.where(some, out + left.to(out.dtype), out)

    def _grouped(self, out: Tensor, x: Tensor, local: Tensor, weights: Tensor) -> Tensor:
        """The dropped assignments alone, expert by expert."""
        flat = local.flatten()
        pairs = (flat < self._own).nonzero().flatten()
        if pairs.shape[0] == 0:
            return out
        pairs = pairs[flat[pairs].argsort(stable=True)]
        tokens = pairs // local.shape[1]
        counts = torch.bincount(flat[pairs], minlength=self._own).tolist()
        left, start = [], 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            part = slice(start, start + count)
            inner = x[tokens[part]] @ self._down[expert].T
            left.append(torch.addmm(self._constant[expert], inner, self._up[expert]))
            start += count
        shares = weights.flatten()[pairs].float().unsqueeze(1)
        total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        total = total.index_add(0, tokens, torch.cat(left).float() * shares)
        some = torch.zeros(len(out), dtype=torch.bool, device=out.device)
        some[tokens] = True
        return torch.where(some.unsqueeze(1), out + total.to(out.dtype), out)
