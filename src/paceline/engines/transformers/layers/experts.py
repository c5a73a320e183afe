"""Execution of a layer's experts in which a dropped slot costs no matmul.

Transformers dispatches experts on `config._experts_implementation`. Where the implementation in use
knows the sentinel of expert parallelism (an expert id equal to the number of experts), it is used
as it is; otherwise it gets only the kept (token, expert) pairs, one expert per row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import GeneralInterface

from paceline.engines.transformers.layers.find import LayerModules
from paceline.engines.transformers.layers.probe import Probe
from paceline.engines.transformers.patching import undisturbed

_WITH_SENTINEL = ("grouped_mm", "deepgemm", "sonicmoe")
"""Implementations that skip sentinels while `_is_expert_parallel` is set."""


class ExpertRunner:
    """One layer's experts, run so that slots with the id E, the number of experts, are left out.

    Attributes:
        wide_ids: whether the router names ids beyond the experts, which cost nothing (zero
            experts).
        skips_sentinel: whether the experts' own loop leaves out such slots.
    """

    def __init__(self, modules: LayerModules, found: Probe, num_experts: int) -> None:
        experts: Any = modules.experts
        self._experts, self._num_experts = experts, num_experts
        self._original: Callable[..., Tensor] = experts.forward
        self.wide_ids = bool((found.ids >= num_experts).any())
        self._interface = _interface(experts)
        # a forward that somebody else put there must run; Accelerate's only moves tensors around
        self._moved = hasattr(experts, "_hf_hook")
        self._replaced = "forward" in experts.__dict__ and not self._moved
        self._eager: Callable[..., Tensor] = experts.forward
        if self._interface is not None and not self._replaced:
            self._eager = partial(type(experts).forward.__wrapped__, experts)
        self.skips_sentinel = not self.wide_ids and _skips_sentinel(
            modules, self._eager, found, num_experts
        )
        if not self.wide_ids and not self.skips_sentinel:
            _check_one_slot(modules, found)

    def __call__(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, without slots of the sentinel E.

        Args:
            hidden: [..., hidden] states of the tokens.
            ids: [tokens, slots] int64.
            weights: [tokens, slots].

        Returns:
            [..., hidden], exact zeros for a token without experts.
        """
        # read once: `generate` changes it for its decode steps, in another thread perhaps
        how = "eager" if self._interface is None else self._experts.config._experts_implementation
        stock = self._interface is not None and not self._moved
        if self.wide_ids:
            return self._original(hidden, ids, weights)  # a zero expert with weight 0
        if how in (None, "eager"):
            if self.skips_sentinel:
                return (self._eager if stock else self._original)(hidden, ids, weights)
        elif self._replaced:
            pass
        elif how == "batched_mm" and hidden.dtype is torch.float64:
            pass  # torch has no grouped product of it
        elif how in _WITH_SENTINEL or (how == "batched_mm" and stock):
            # batched_mm computes every slot, whatever its weight
            how = "grouped_mm" if how == "batched_mm" else how
            run = partial(self._interface[how], self._experts) if stock else self._original
            _expect_sentinels(self._experts)
            try:
                return run(hidden, ids, weights)
            finally:
                _stop_expecting_sentinels(self._experts)
        return _compacted(self._original, hidden, ids, weights, self._num_experts)


_FLAGS = threading.Lock()
_USERS = "_paceline_sentinel_users"


def _expect_sentinels(experts: Any) -> None:
    """Make stock implementations leave out ids equal to the number of experts.

    The flag belongs to the module, so it stays set until the last thread is done; that others,
    which have no such ids, see it set too changes nothing for them.
    """
    if not torch.compiler.is_compiling():
        own = experts.__dict__
        with _FLAGS:
            own[_USERS] = own.get(_USERS, 0) + 1
            experts._is_expert_parallel = True
    else:
        experts._is_expert_parallel = True


def _stop_expecting_sentinels(experts: Any) -> None:
    if torch.compiler.is_compiling():
        experts._is_expert_parallel = False
        return
    own = experts.__dict__
    with _FLAGS:
        own[_USERS] -= 1
        if not own[_USERS]:
            del own[_USERS]
            experts._is_expert_parallel = False


def _compacted(
    original: Callable[..., Tensor], hidden: Tensor, ids: Tensor, weights: Tensor, sentinel: int
) -> Tensor:
    """Run the experts on the kept pairs only, one expert per row, and add up their outputs."""
    rows, slots = (ids != sentinel).nonzero(as_tuple=True)
    if rows.shape[0] == 0:
        return torch.zeros_like(hidden)
    flat = hidden.reshape(-1, hidden.shape[-1])
    pairs = original(flat[rows], ids[rows, slots].unsqueeze(1), weights[rows, slots].unsqueeze(1))
    pairs = pairs.reshape(rows.shape[0], -1)
    low = pairs.dtype in (torch.bfloat16, torch.float16)
    total = torch.zeros(
        (flat.shape[0], pairs.shape[1]),
        dtype=torch.float32 if low else pairs.dtype,
        device=pairs.device,
    )
    total = total.index_add(0, rows, pairs.to(total.dtype)).to(pairs.dtype)
    return total.view(*hidden.shape[:-1], pairs.shape[1])


def _interface(experts: nn.Module) -> Any:
    """Return the implementations that a class of Transformers dispatches to, else None."""
    if not hasattr(experts, "_is_expert_parallel") or not hasattr(experts, "config"):
        return None
    for cell in getattr(type(experts).forward, "__closure__", None) or ():
        if isinstance(cell.cell_contents, GeneralInterface):
            return cell.cell_contents
    return None


def _check_one_slot(modules: LayerModules, found: Probe) -> None:
    """Check that the experts take one expert per row, for `_compacted`.

    Raises:
        ValueError: naming the layer.
    """
    ids = found.ids[:2, :1]
    try:
        with torch.no_grad(), undisturbed(modules.block):
            out = modules.experts.forward(found.hidden[:2], ids, found.weights[:2, :1])
        fits = isinstance(out, Tensor) and out.numel() == 2 * out.shape[-1]
    except Exception:
        fits = False
    if not fits:
        raise ValueError(
            f"layer {modules.name} can't be handled: its experts neither skip the id one past the "
            "last nor take one expert per token."
        )


def _skips_sentinel(
    modules: LayerModules, eager: Callable[..., Tensor], found: Probe, num_experts: int
) -> bool:
    """Return True if an experts' own loop leaves out ids equal to the number of experts, unread.

    Only tried on a CPU: on an accelerator an index out of range is fatal to the process.
    """
    if modules.device.type != "cpu":
        return False
    hidden = found.hidden[:2]
    one = torch.zeros((2, 1), dtype=torch.int64)
    unit = torch.ones((2, 1), dtype=found.weights.dtype)
    ids = torch.tensor([[0, num_experts], [num_experts, num_experts]])
    weights = torch.full((2, 2), torch.nan, dtype=unit.dtype)
    weights[0, 0] = 1
    try:
        with torch.no_grad(), undisturbed(modules.block):
            want, got = eager(hidden, one, unit), eager(hidden, ids, weights)
    except Exception:
        return False
    want, got = want.reshape(2, -1), got.reshape(2, -1)
    near = torch.allclose(got[0].float(), want[0].float(), rtol=1e-2, atol=1e-5)
    return near and bool((got[1] == 0).all())
