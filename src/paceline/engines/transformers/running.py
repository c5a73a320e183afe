"""What the layers of one attached model share: the policy, and the forward that is running."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.engines.transformers.context import (
    ForwardContext,
    TokenSource,
    named_arguments,
    parameter_names,
    token_shape,
)
from paceline.policy import CapacityPolicy

if TYPE_CHECKING:
    from paceline.engines.transformers.layer import AttachedLayer


class SharedBudgetWarning(UserWarning):
    """Requests of one batch share a budget, so what one gets depends on the others."""


class Running:
    """What the layers of one attached model share: the policy and the forward that is running.

    Attributes:
        policy: in force.
        routes: whether the policy can drop anything, or count what would be dropped.
        context: of the running forward, None outside one.
        step: number of the forward, from 0, counted while keep="random" asks for it; a tensor, so
            that a compiled model isn't compiled anew for every forward.
        unproven: layers of which it isn't known yet that their experts are reached.
    """

    def __init__(self, token_source: TokenSource) -> None:
        self.policy = CapacityPolicy()
        self.routes = False
        self.context: ForwardContext | None = None
        with torch.inference_mode(False):
            self.step = torch.tensor(-1)
        self.unproven: list[AttachedLayer] = []
        self._stack: list[tuple[nn.Module, ForwardContext]] = []
        self._warned = False
        self.token_source = token_source

    def watch(self, module: nn.Module) -> list[Any]:
        """Follow a module's forwards; the innermost one that brings tokens of its own counts.

        A language model inside another model mostly gets the same tokens; a vision tower gets
        patches, and a decoder its own tokens.
        """
        names = parameter_names(module)
        takes_tokens = bool({"input_ids", "inputs_embeds"} & set(names))
        config = getattr(module, "config", None)

        def before(m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments = named_arguments(names, args, kwargs)
            if any(owner is m for owner, _ in self._stack):
                self._stack.clear()  # left by a forward that was interrupted
            inner = bool(self._stack)
            if inner and takes_tokens:
                outer = self._stack[-1][1]
                if outer.shape is not None and token_shape(arguments) in (None, outer.shape):
                    self._stack.append((m, outer))
                    return
            self.context = ForwardContext(arguments, config, self.token_source)
            self._stack.append((m, self.context))
            if inner:
                return
            if self.policy.keep == "random":
                self.step.add_(1)
            if self.routes and not self._warned and not torch.compiler.is_compiling():
                self._warn_of_sharing(self.context)

        def after(m: nn.Module, args: Any, out: Any) -> None:
            if self._stack and self._stack[-1][0] is m:
                self._stack.pop()
                self.context = self._stack[-1][1] if self._stack else None
                if not self._stack:
                    for layer in self.unproven:
                        layer.check_ran()

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, always_call=True),
        ]

    def _warn_of_sharing(self, context: ForwardContext) -> None:
        """Say once that users who share a batch affect each other (docs/method.md)."""
        policy = self.policy
        if policy.mode != "enforce" or policy.pool == "request":
            return
        if context.num_requests > 1:
            self._warned = True
            warnings.warn(
                f'{context.num_requests} sequences share one budget under pool="{policy.pool}", so '
                "what one of them gets depends on the others; where they belong to different "
                'users, say pool="request".',
                SharedBudgetWarning,
                stacklevel=2,
            )
