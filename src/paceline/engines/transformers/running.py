"""What the layers of one attached model share: the policy, and the forward that is running."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.engines.transformers.context import (
    ForwardContext,
    TokenSource,
    named_arguments,
    parameter_names,
)
from paceline.engines.transformers.forwards import stand_in
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
        self.routes = self._counts_past = False
        self.context: ForwardContext | None = None
        with torch.inference_mode(False):
            self.step = torch.tensor(-1)
        self.unproven: list[AttachedLayer] = []
        self._warned = False
        self.token_source = token_source

    def follow(self, policy: CapacityPolicy) -> None:
        """Put a policy in force."""
        self.policy, self.routes = policy, policy.caps
        self._counts_past = policy.phase == "prefill" or policy.protect_first > 0

    def watch(self, module: nn.Module) -> Callable[[], None]:
        """Follow a module's forwards; the innermost one that brings tokens of its own counts.

        A language model inside another model mostly gets the same tokens; a vision tower gets
        patches, and a decoder its own tokens.

        Returns:
            What ends it.
        """
        forward, names = module.forward, parameter_names(module)
        takes_tokens = bool({"input_ids", "inputs_embeds"} & set(names))
        config = getattr(module, "config", None)
        # Not a pair of hooks: of a small model's decode step they cost twice as much. And not a
        # closure: a copy of the model must run itself.
        watched = partial(self._watched, forward, names, takes_tokens, config)
        return stand_in(module, update_wrapper(watched, forward))

    def _watched(
        self,
        forward: Callable[..., Any],
        names: list[str],
        takes_tokens: bool,
        config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        outer, arguments = self.context, named_arguments(names, args, kwargs)
        if outer is None or not (takes_tokens and outer.has_tokens_of(arguments)):
            self._enter(ForwardContext(arguments, config, self.token_source, self._counts_past))
        try:
            out = forward(*args, **kwargs)
        finally:
            self.context = outer
        if outer is None:
            for layer in self.unproven:
                layer.check_ran()
        return out

    def _enter(self, context: ForwardContext) -> None:
        """The tokens of `context` are what layers see from here."""
        outermost, self.context = self.context is None, context
        if not (self.routes and outermost):
            return
        if self.policy.keep == "random":
            self.step.add_(1)
        if not self._warned and not torch.compiler.is_compiling():
            self._warn_of_sharing(context)

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
