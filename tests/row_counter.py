"""Counts the rows that are really multiplied with each expert's weights, below every Python layer.

Knows nothing of Paceline: a dispatch mode looks at each matrix product that reaches torch and asks
whether one operand lies in the storage of an experts' parameter, and in which expert's part of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "matmul",
    "_grouped_mm",
    "grouped_mm_fallback",
)


class RowCounter(TorchDispatchMode):
    """`counter.rows(name)` is [experts] after the block: rows each expert of it computed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._found: dict[int, tuple[str, str, int, int]] = {}
        self._counts: dict[str, dict[str, Tensor]] = {}
        for name, module in model.named_modules():
            if name.split(".")[-1] != "experts":
                continue
            for key, p in module.named_parameters():
                if p.dim() < 2 or "bias" in key:
                    continue
                experts = p.shape[0] if p.dim() == 3 else module.num_experts
                self._found[p.untyped_storage().data_ptr()] = (
                    name,
                    key,
                    experts,
                    p.numel() // experts,
                )
                self._counts.setdefault(name, {})[key] = torch.zeros(experts, dtype=torch.int64)

    def rows(self, name: str) -> Tensor:
        """[experts] rows; every weight of an expert must have seen the same ones."""
        counts = list(self._counts[name].values())
        width = min(len(c) for c in counts)
        for c in counts:
            assert torch.equal(c[:width], counts[0][:width]), f"{name}: weights saw different rows"
            assert not c[width:].any()
        return counts[0][:width]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _PRODUCTS:
            self._product(name, args, kwargs or {})
        elif name in ("index", "index_select", "gather") and isinstance(args[0], Tensor):
            # weights gathered for a batched product: every gathered one is used for a row
            known = self._lookup(args[0])
            if known is not None and args[0].dim() == 3:
                picked = args[1][0] if name == "index" else args[2]
                self._add(known, torch.bincount(picked.flatten(), minlength=known[2]))
        return out

    def _lookup(self, t: Any) -> tuple[str, str, int, int] | None:
        return self._found.get(t.untyped_storage().data_ptr()) if isinstance(t, Tensor) else None

    def _add(self, known: tuple[str, str, int, int], rows: Tensor) -> None:
        self._counts[known[0]][known[1]] += rows

    def _product(self, name: str, args: Any, kwargs: Any) -> None:
        tensors = [a for a in args if isinstance(a, Tensor)]
        for i, t in enumerate(tensors):
            known = self._lookup(t)
            if known is None or t.dim() < 2:
                continue
            if "grouped" in name:
                offsets = kwargs.get("offs", next((a for a in tensors if a.dim() == 1), None))
                assert offsets is not None
                self._add(
                    known, torch.diff(offsets.long(), prepend=torch.zeros(1, dtype=torch.int64))
                )
            else:
                other = next(o for j, o in enumerate(tensors) if j != i and o.dim() >= 2)
                rows = torch.zeros(known[2], dtype=torch.int64)
                rows[t.storage_offset() // known[3]] = other.numel() // other.shape[-1]
                self._add(known, rows)
