"""A layer's router at run time: its outputs, as the block gets them, and gate scores from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.engines.scoring import RULES
from paceline.engines.transformers.layers.find import LayerModules
from paceline.engines.transformers.patching import Patch, patch_method, patch_of
from paceline.engines.transformers.state import AttachedState
from paceline.engines.transformers.tokens.arguments import first_argument


@dataclass(frozen=True, eq=False)
class Scoring:
    """Gate scores of one layer, from its router's output.

    Attributes:
        rule: key of RULES; None where no rule fits, with the `reason`.
        expands: whether an extra's weight is known as well (score times the token's own scale).
        reason: why `rule` is None or `expands` is False; empty where all is well.
        num_experts: experts that have a score; the router may know further classes.
        logits_at: where the logits are among the tensors of the router's output.
        linear: the router's linear map, where logits are just that: they may come rounded.
    """

    rule: str | None
    expands: bool
    reason: str
    num_experts: int
    logits_at: int = 0
    linear: RouterLinear | None = None

    def __call__(self, router_input: Tensor, router_output: Any, rows: int) -> Tensor:
        """Return [tokens, experts] float32 gate scores.

        Raises:
            RuntimeError: if the router's output has no logits for these rows.
        """
        assert self.rule is not None
        logits = logits_of(router_output, self.logits_at, rows)
        if logits is None:
            raise RuntimeError("the router returned no logits for the rows that its experts got.")
        if self.linear is not None:
            logits = self.linear.unrounded(router_input, logits)
        return RULES[self.rule](logits.float())[:, : self.num_experts]


@dataclass(frozen=True, eq=False)
class RouterLinear:
    """A router's linear map, to compute logits in float32 that come rounded to half precision.

    Rounding makes false ties. The logits are computed again only while the map is what it was
    when it was found: where an adapter or a wrapper changes the router's output, that counts.

    Attributes:
        router: that the layer had.
        holder: of the weight [classes, hidden]: the router, or its only part that has any.
        name: of the holder within the router; empty: it is the router.
    """

    modules: LayerModules
    router: nn.Module
    holder: nn.Module
    name: str

    def unrounded(self, router_input: Tensor, logits: Tensor) -> Tensor:
        """Return [rows, classes] float32 logits; rows that aren't this map's stay as they are."""
        if logits.element_size() > 2 or not self._unchanged():
            return logits
        again = self._again(router_input)
        near = _within_rounding(again, logits).all(1, keepdim=True)
        return torch.where(near, again, logits.float())

    def explains(self, router_input: Tensor, logits: Tensor) -> bool:
        """Return True if these logits are just this map of this input."""
        return bool(_within_rounding(self._again(router_input), logits).all())

    def _again(self, router_input: Tensor) -> Tensor:
        weight, bias = self.holder.weight, getattr(self.holder, "bias", None)
        assert isinstance(weight, Tensor)
        rows = router_input.reshape(-1, weight.shape[1])
        bias = bias if isinstance(bias, Tensor) else None
        kind = weight.device.type
        if torch.is_autocast_enabled(kind):  # as for the router itself
            low = torch.get_autocast_dtype(kind)
            rows, weight = rows.to(low), weight.to(low)
            bias = None if bias is None else bias.to(low)
        with torch.autocast(kind, enabled=False):  # it would round what comes out
            return F.linear(rows.float(), weight.float(), None if bias is None else bias.float())

    def _unchanged(self) -> bool:
        """Return True if the layer's router is still this one, and its weight a plain parameter."""
        if self.modules.router is not self.router:
            return False
        if self.name and self.router.get_submodule(self.name) is not self.holder:
            return False
        # a parametrised weight is computed anew at every look, an offloaded one is away by now
        weight = self.holder._parameters.get("weight")
        return weight is not None and not weight.is_meta


def _within_rounding(exact: Tensor, rounded: Tensor) -> Tensor:
    """Return [rows, classes] bool: True where `rounded` is `exact` in its own precision."""
    step = max(torch.finfo(rounded.dtype).eps, 1e-4)  # float32 sums differ by their order
    rounded = rounded.float()
    scale = rounded.abs() + 0.05 * rounded.abs().amax(1, keepdim=True)
    return (exact - rounded).abs() <= step * scale


def logits_of(output: Any, at: int, rows: int) -> Tensor | None:
    """Return the tensor [rows, classes] at place `at` of a router's output, None without one."""
    tensors = output if isinstance(output, (tuple, list)) else (output,)
    logits = tensors[at] if at < len(tensors) else None
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.dim() < 2:
        return None
    flat = logits.reshape(-1, logits.shape[-1])
    return flat if flat.shape[0] == rows else None


# -- outputs ---------------------------------------------------------------------------------------


class RouterObserver:
    """Keeps input and output of one layer's router, for the thread that runs it.

    Args:
        state: that all layers share.
    """

    def __init__(self, modules: LayerModules, state: AttachedState) -> None:
        self._modules, self._name, self._state = modules, modules.name, state
        self._patch: Patch | _LastHook | None = None
        self._method: Any = self  # the router's forward while it is patched

    def ensure(self) -> None:
        """Observe the router from here on.

        An adapter, a wrapper or a hook may be put on the router at any time, so this is called
        before every forward that may need scores.
        """
        modules = self._modules
        router = modules.block._modules[modules.router_name]
        assert router is not None  # found with it
        if router.__dict__.get("forward") is self._method and not router._forward_hooks:
            return
        with self._state.changing:  # once, whatever other threads begin meanwhile
            if self._state.switch.on and not self._observes():
                self._observe()

    def undo(self) -> None:
        """Restore the router."""
        if self._patch is not None:
            self._patch.undo()
        self._patch, self._method = None, self

    def _observes(self) -> bool:
        """Return True if the output that is kept now is what the block gets."""
        router, patch = self._modules.router, self._patch
        if patch is None or patch.module is not router:
            return False
        hooks = router._forward_hooks
        if isinstance(patch, _LastHook):
            return next(reversed(hooks), None) == patch.key
        return not hooks and patch_of(router.__dict__.get("forward")) is patch

    def _observe(self) -> None:
        self.undo()
        router = self._modules.router
        if router._forward_hooks:  # they may change what the block gets: be the last of them
            handle = router.register_forward_hook(self._hook, with_kwargs=True)
            self._patch = _LastHook(router, handle)
            return
        run = partial(self._run, router.forward)
        self._patch = patch_method(router, self._state.switch, run)
        self._method = router.__dict__["forward"]

    def _run(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out, state = run(*args, **kwargs), self._state
        if state.switch.on:
            hidden = args[0] if args else first_argument(args, kwargs)
            state.threads.current.router[self._name] = (hidden, out)
        return out

    def _hook(self, _: Any, args: Any, *rest: Any) -> None:
        if len(rest) == 2 and self._state.switch.on:  # else it was removed while the router ran
            hidden = first_argument(args, rest[0])
            self._state.threads.current.router[self._name] = (hidden, rest[1])


@dataclass(frozen=True, eq=False)
class _LastHook:
    """A forward hook on a router that has others."""

    module: nn.Module
    handle: RemovableHandle

    @property
    def key(self) -> int:
        """Key of the hook among the module's."""
        return self.handle.id

    def undo(self) -> None:
        self.handle.remove()
