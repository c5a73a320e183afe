"""Compensated Drop in one layer: stand-ins of dropped experts, computed where the token is.

Nothing is sent and no load changes: the output of a dropped expert's stand-in, an affine map of
small rank, is added to that of the kept experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from paceline.stand_ins.calibration_file import LayerCalibration

OnDistance = Callable[[Tensor, Tensor], None]
"""Called with the sum of squared distances of dropped inputs and their number, 0-d tensors."""

_HAS_TRITON = find_spec("triton") is not None

_LOW = (torch.bfloat16, torch.float16, torch.float32)  # dtypes of the kernels

_BUFFERS = ("_down", "_up", "_shift", "_bias", "_scale", "_local", "_norms", "_log", "_slope")


class Compensation:
    """The stand-ins of a layer's experts.

    Args:
        layer: its part of a calibration.
        experts: those whose stand-ins are added here; None: all.
        like: a tensor with the dtype and device that the layer computes in.
    """

    def __init__(
        self, layer: LayerCalibration, experts: Sequence[int] | None, like: Tensor
    ) -> None:
        count = len(layer.experts)
        own = torch.arange(count) if experts is None else torch.tensor(experts, dtype=torch.int64)
        up, down = layer.up[own].float(), layer.down[own].float()
        shift = (down.double() @ layer.mean[own].double().unsqueeze(2)).squeeze(2)
        local = torch.full((count + 1,), len(own), dtype=torch.int64)
        local[own] = torch.arange(len(own))
        exact = torch.promote_types(like.dtype, torch.float32)
        with torch.inference_mode(False):
            self._down = down.to(like)  # [own, rank, hidden]
            self._up = up.transpose(1, 2).contiguous().to(like)  # [own, rank, hidden]
            self._bias = layer.bias[own].to(like)  # [own, hidden]
            self._shift = shift.to(like.device, exact)  # [own, rank] down times mean
            ranks = layer.ranks[own]
            scale = torch.where(ranks > 0, 1 / ranks, 0)
            self._scale = scale.to(like.device, exact)  # [own] 1 / rank, 0 without a stand-in
            self._local = local.to(like.device)
            known = layer.output_norm > 0  # the others had no rows
            self._norms = _or_mean(layer.output_norm, known).to(like.device)
            slope = layer.residual_slope.double()
            log = _or_mean(layer.residual_log, known) - (slope * layer.mean).sum(1)
            # of all experts, as survivors are chosen among all
            self._log = log.to(like.device, exact)  # [experts]
            self._slope = slope.T.contiguous().to(like.device, exact)  # [hidden, experts]
        self._own = len(own)

    def norms(self, hidden: Tensor, compensate: bool) -> Tensor:
        """Return the norm of what dropping an assignment leaves out of its token.

        Args:
            hidden: [..., hidden] states of the tokens.
            compensate: True if stand-ins are added.

        Returns:
            [experts] mean norm of the outputs; with stand-ins [tokens, experts] expected norm of
            the difference between an output and the stand-in's.
        """
        self._move_to(hidden.device)
        if not compensate:
            return self._norms
        x = hidden.detach().reshape(-1, hidden.shape[-1]).to(self._slope.dtype)
        return torch.addmm(self._log, x, self._slope).float().exp()

    def __call__(
        self,
        out: Tensor,
        hidden: Tensor,
        ids: Tensor,
        weights: Tensor,
        dropped: Tensor,
        on_distance: OnDistance | None = None,
    ) -> Tensor:
        """Add the stand-ins of dropped assignments to `out`.

        Rows that lost nothing stay the same to the bit.

        Args:
            out: [..., hidden] of the kept experts.
            hidden: [..., hidden] states of the tokens.
            ids: [tokens, k] the model's own choice.
            weights: [tokens, k] its combine weights.
            dropped: [tokens, k] bool.
            on_distance: called with how far inputs are from those of the calibration: the squared
                distance in a stand-in's directions over its mean there, about 1 per input.
        """
        if self._own == 0:
            return out
        self._move_to(ids.device)
        local = self._local[torch.where(dropped, ids.long(), -1)]
        x = hidden.reshape(-1, hidden.shape[-1])
        # where a graph is made or a device runs ahead, shapes must not depend on what was dropped
        compute = self._grouped
        if torch.compiler.is_compiling():
            compute = self._dense
        elif x.is_cuda:
            kernels = _HAS_TRITON and x.dtype in _LOW
            needs_grad = torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)
            compute = self._sorted if kernels and not needs_grad else self._dense
        flat = out.reshape(-1, out.shape[-1])
        return compute(flat, x.to(self._down.dtype), local, weights, on_distance).reshape(out.shape)

    def _move_to(self, device: torch.device) -> None:
        if self._local.device != device:  # the model was moved
            for name in _BUFFERS:
                setattr(self, name, getattr(self, name).to(device))

    def _dense(
        self, out: Tensor, x: Tensor, local: Tensor, weights: Tensor, on_distance: OnDistance | None
    ) -> Tensor:
        """Multiply every token by every stand-in and keep those dropped: no size is read."""
        tokens, rank = x.shape[0], self._down.shape[1]
        lost = torch.zeros((tokens, self._own + 1), dtype=self._shift.dtype, device=x.device)
        times = torch.zeros_like(lost).scatter_add(1, local, torch.ones_like(local).to(lost))
        lost = lost.scatter_add(1, local, weights.to(lost.dtype))[:, : self._own]
        times = times[:, : self._own]
        seen = (x @ self._down.reshape(-1, x.shape[1]).T).view(tokens, self._own, rank)
        seen = torch.where(times.unsqueeze(2) != 0, seen - self._shift, 0)
        if on_distance is not None:
            far = seen.detach().square().sum(2) * self._scale
            on_distance((far * times).sum(), (times * (self._scale > 0)).sum())
        inner = (seen * lost.unsqueeze(2)).flatten(1).to(x.dtype)
        left = inner @ self._up.reshape(-1, x.shape[1]) + lost.to(x.dtype) @ self._bias
        some = (local < self._own).any(1, keepdim=True)
        return torch.where(some, out + left.to(out.dtype), out)

    def _sorted(
        self, out: Tensor, x: Tensor, local: Tensor, weights: Tensor, on_distance: OnDistance | None
    ) -> Tensor:
        """Compute the dropped assignments alone, sorted on the device: no size is read."""
        from paceline.stand_ins.kernels import sum_stand_ins

        total, seen, expert = sum_stand_ins(
            x, local, weights, self._down, self._up, self._bias, self._shift
        )
        if on_distance is not None:
            scale = torch.nn.functional.pad(self._scale, (0, 1))[expert]
            on_distance((seen.detach().square().sum(1) * scale).sum(), (scale > 0).sum())
        some = (local < self._own).any(1, keepdim=True)
        return torch.where(some, out + total.to(out.dtype), out)

    def _grouped(
        self, out: Tensor, x: Tensor, local: Tensor, weights: Tensor, on_distance: OnDistance | None
    ) -> Tensor:
        """Compute the dropped assignments alone, expert by expert, touching few rows."""
        flat = local.flatten()
        pairs = (flat < self._own).nonzero().flatten()
        if pairs.shape[0] == 0:
            return out
        experts, order = flat[pairs].sort(stable=True)
        pairs = pairs[order]
        tokens = pairs // local.shape[1]
        exact = self._shift.dtype
        shares = weights.flatten()[pairs].to(exact)
        counts = torch.bincount(experts, minlength=self._own).tolist()
        some = [expert for expert, count in enumerate(counts) if count]
        sizes = [count for count in counts if count]
        looked = zip(some, torch.split(tokens, sizes), strict=True)
        seen = torch.cat([x[part] @ self._down[expert].T for expert, part in looked])
        seen = seen.to(exact) - self._shift[experts]
        if on_distance is not None:
            scale = self._scale[experts]
            on_distance((seen.detach().square().sum(1) * scale).sum(), (scale > 0).sum())
        inner = torch.split((seen * shares.unsqueeze(1)).to(x.dtype), sizes)
        share = torch.split(shares.to(x.dtype), sizes)
        if out.dtype is exact:
            rows, at, total = None, tokens, out.clone()
        else:  # added up exactly, and rounded once
            rows, at = torch.unique(tokens, return_inverse=True)
            total = out[rows].to(exact)
        parts = zip(some, inner, share, torch.split(at, sizes), strict=True)
        for expert, own, each, where in parts:
            left = (own @ self._up[expert]).addr_(each, self._bias[expert])
            total.index_add_(0, where, left.to(exact))
        return total if rows is None else out.index_copy(0, rows, total.to(out.dtype))


def _or_mean(values: Tensor, known: Tensor) -> Tensor:
    """Replace [experts] values of experts without rows by the mean of the others."""
    mean = values[known].mean() if bool(known.any()) else torch.ones(())
    return torch.where(known, values, mean)
