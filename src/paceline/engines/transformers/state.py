"""State that the layers of one attached model share: rules in force, and running forwards.

Forwards of one model may overlap in several threads. Each thread has a running forward, a running
`generate` and router outputs of its own, and a forward keeps the rules and watchers that were in
force when it began. Within a thread forwards nest and never overlap.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType, peek_interpreter_stack

from paceline.engines.rules import LayerRule
from paceline.engines.sharing import shares_budget, warn_of_shared_cache, warn_of_sharing
from paceline.engines.transformers.patching import Patch, Switch, patch_method
from paceline.engines.transformers.recompute import Recomputation, is_recomputing
from paceline.engines.transformers.tokens.arguments import argument_names, cache_of
from paceline.engines.transformers.tokens.context import ForwardContext
from paceline.engines.transformers.tokens.generation import Generation, GenerationPatches
from paceline.engines.transformers.tokens.labels import UserLabels
from paceline.engines.transformers.tokens.modality import MODALITY_OF_TYPE
from paceline.facts import NO_FACTS, Facts
from paceline.routing import Assignment, RoutingInputs

Watcher: TypeAlias = Callable[[str, RoutingInputs, Assignment], None]
"""Called with a layer's name, what routing was given and what came out."""


class UnknownTokensWarning(UserWarning):
    """Warning that the padding of a layer is unknown, so that all rows count as tokens."""


class ThreadState:
    """State of one thread.

    Attributes:
        context: of the running forward, None outside one.
        generation: the running `generate`, None outside one.
        router: layer -> input and output of its router, until its experts have run; None while
            only its block has begun.
    """

    def __init__(self) -> None:
        self.context: ForwardContext | None = None
        self.generation: Generation | None = None
        self.router: dict[str, tuple[Tensor, Any] | None] = {}


class _Threads(threading.local):
    """A state per thread; never written to itself, as a compiler would lose it (torch 2.13)."""

    def __init__(self) -> None:
        self.current = ThreadState()


class AttachedState:
    """State that the layers of one attached model share.

    Attributes:
        rules: in force, one per layer.
        step: number of the forward, from 0, counted while keep="random" asks for it; a tensor, so
            that a compiled model isn't compiled anew for every forward.
        watchers: of forwards that begin from now on, with the facts that they ask for.
        watched_facts: at least those that the watchers ask for; routers are observed for them.
        threads: `threads.current` is the state of the calling thread.
        changing: held while policies, watchers and patches of routers are changed.
        before_forward: called before every forward.
        recomputation: the forwards that a backward may repeat in part.
    """

    def __init__(self, labels: UserLabels) -> None:
        self.labels = labels
        self.rules: tuple[LayerRule, ...] = ()
        self.switch = Switch()
        with torch.inference_mode(False):
            self.step = torch.tensor(-1)
        self.before_forward: tuple[Callable[[], None], ...] = ()
        self._routes = self._enforces = self._counts_past = self._counts_steps = False
        self._warned_of_sharing = self._warned_of_cache = self._warned_of_unknown = False
        self._patched_modules = 0
        self._of_this_process()

    def _of_this_process(self) -> None:
        self.threads = _Threads()
        self._lock = threading.Lock()
        self.changing = threading.RLock()
        self.recomputation = Recomputation()
        self.watchers: tuple[tuple[Watcher, Facts], ...] = ()
        self.watched_facts = NO_FACTS

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: a copy runs forwards of its own, unwatched."""
        own = ("threads", "_lock", "changing", "recomputation", "watchers", "watched_facts")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._of_this_process()

    @property
    def thread(self) -> ThreadState:
        """State of the calling thread."""
        return self.threads.current

    @property
    def context(self) -> ForwardContext | None:
        """Tokens of the forward that runs in this thread, None outside one."""
        return self.threads.current.context

    def set_rules(self, rules: Sequence[LayerRule]) -> None:
        """Put rules in force, one per layer; forwards that are running keep theirs."""
        policies = [rule.policy for rule in rules if rule.routes]
        self._counts_past = any(p.phase == "prefill" or p.protect_first for p in policies)
        self._counts_steps = any(rule.facts.step for rule in rules)
        self._shared = next((p for p in policies if shares_budget(p)), None)
        self._enforces = any(p.caps and p.mode == "enforce" for p in policies)
        self._routes = bool(policies)
        self.rules = tuple(rules)

    def prompt_alone(self) -> bool:
        """Return True if a prompt must be processed without guessed tokens behind it."""
        return any(r.policy.phase == "prefill" and r.policy.mode == "enforce" for r in self.rules)

    # -- forwards of the model --------------------------------------------------------------------

    def patch_module(self, module: nn.Module) -> list[Patch]:
        """Patch a module's forward, and its `generate` if it has one.

        The innermost forward that brings tokens of its own counts: a language model inside another
        model mostly gets the same tokens, a vision tower gets patches, a decoder its own tokens.
        """
        names = argument_names(module.forward)
        self._patched_modules += 1
        takes_tokens = "input_ids" in names or "inputs_embeds" in names
        number = self._patched_modules if takes_tokens else None
        config = getattr(module, "config", None)
        forward = partial(self._forward, module.forward, names, config, number)
        generation = GenerationPatches(self)
        return [patch_method(module, self.switch, forward), *generation.patch(module)]

    def _forward(
        self,
        forward: Callable[..., Any],
        names: list[str],
        config: Any,
        number: int | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if args and args[0] is getattr(forward, "__self__", None):
            args = args[1:]  # bound a second time, as by Accelerate's unwrap_model
        if not self.switch.on or is_recomputing():  # each layer finds its first call then
            return forward(*args, **kwargs)
        thread, arguments = self.threads.current, kwargs
        if args:
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        outer = thread.context
        if outer is None:
            thread.router = {}  # a recomputation may stop between a router and its experts
            thread.context = self._begin(thread, arguments, config)
        else:
            thread.context = outer.inside(arguments, config, number)
        try:
            out = forward(*args, **kwargs)
            if outer is None and thread.context.calls is not None:
                calls, thread.context.calls = thread.context.calls, None
                calls.finish(out)
            if outer is None and thread.router and self.switch.on:  # else detached meanwhile
                layer, seen = next(iter(thread.router.items()))
                raise RuntimeError(
                    f"layer {layer} can't be handled: its {'block' if seen is None else 'router'} "
                    "ran, but not its experts' forward (is it replaced by a kernel?); detach to go "
                    "on without it."
                )
            return out
        finally:
            thread.context = outer
            if outer is None and thread.router:
                thread.router = {}

    def _begin(self, thread: ThreadState, arguments: dict[str, Any], config: Any) -> ForwardContext:
        """Return the context of an outermost forward, whose tokens the layers see from here on."""
        watchers = self.watchers
        counts_past = self._counts_past
        if watchers:
            counts_past |= any(facts.decode or facts.position for _, facts in watchers)
        context = ForwardContext(arguments, config, self.labels, thread.generation, counts_past)
        context.rules, context.watchers = self.rules, watchers
        if not torch.compiler.is_compiling():  # modules don't change while a graph is made of them
            self._check_transforms()
            for prepare in self.before_forward:
                prepare()
            context.calls = self.recomputation.begin()
        if not self._routes:
            return context
        if self._counts_steps:
            context.step = self._next_step()
        if not torch.compiler.is_compiling():
            if not self._warned_of_sharing:
                self._warn_of_sharing(context)
            if self._enforces and not self._warned_of_cache:
                self._warn_of_cache(arguments)
        return context

    def _check_transforms(self) -> None:
        """Refuse transforms of torch.func in which tensors have no values to choose or count by."""
        transform = peek_interpreter_stack()
        if transform is not None and (self._routes or transform.key() == TransformType.Vmap):
            raise RuntimeError(
                "an attached model can't run inside torch.func.vmap, nor under a cap inside "
                "torch.func.grad and its like: detach, or use mode=observe."
            )

    def start_at(self, step: int) -> None:
        """Give the next forward this number."""
        with self._lock, torch.inference_mode(False):
            self.step.fill_(step - 1)

    def _next_step(self) -> Tensor:
        if torch.compiler.is_compiling():
            return self.step.add_(1).clone()
        with self._lock:
            return self.step.add_(1).clone()

    def _warn_of_sharing(self, context: ForwardContext) -> None:
        """Warn once that users who share a batch affect each other (docs/method.md)."""
        requests = 0 if self._shared is None else context.num_requests
        if self._shared is not None and requests > 1:
            self._warned_of_sharing = True
            warn_of_sharing(self._shared, requests, stacklevel=4)

    def _warn_of_cache(self, arguments: dict[str, Any]) -> None:
        """Warn once that cached prefixes depend on the tokens that followed them."""
        if getattr(cache_of(arguments), "use_prefix_sharing", False):  # continuous batching
            self._warned_of_cache = True
            remedy = "set allow_block_sharing=False in ContinuousBatchingConfig"
            warn_of_shared_cache(remedy, stacklevel=4)

    # -- layers outside such a forward ------------------------------------------------------------

    def unknown_tokens(
        self, index: int, layer: str, rows: int, device: torch.device
    ) -> ForwardContext:
        """Return a context for a layer that runs outside a forward with known tokens.

        Returns:
            One sequence of `rows` tokens, described by the user's labels alone.

        Raises:
            RuntimeError: if the rule in force needs what is unknown.
        """
        outer, labels = self.context, self.labels
        rules = self.rules if outer is None else outer.rules
        rule: LayerRule = rules[index]
        facts = rule.facts
        tower = None if outer is None else outer.tower
        known = {
            "source": labels.source,
            "request": labels.request,
            "decode": tower or labels.decode,  # what a tower reads is never generated
            "modality": tower or labels.modality,
            "position": None,
        }
        missing = [n for n, label in known.items() if getattr(facts, n) and label is None]
        outside = outer is None or outer.is_masked
        if labels.valid is None and outside:
            missing.insert(0, "valid")
        if missing and rule.policy.caps and rule.policy.mode == "enforce":
            names = {"valid": "padding"}
            raise RuntimeError(
                f"layer {layer} ran outside any forward of the attached model with known tokens, "
                f"so their {names.get(missing[0], missing[0])} is unknown, which "
                f'"{rule.policy}" needs: give attach token_valid, token_request, token_source, '
                "token_decode or token_modality."
            )
        all_real = tower is not None and not outside
        if labels.valid is None and not all_real and not self._warned_of_unknown:
            self._warned_of_unknown = True
            warnings.warn(
                f"layer {layer} ran outside any forward of the attached model with known tokens: "
                "every row is counted as a token, padding too; give attach token_valid to exclude "
                "it.",
                UnknownTokensWarning,
                stacklevel=4,
            )
        ids = torch.empty((1, rows), dtype=torch.int64, device=device)
        arguments = {"input_ids": ids}
        if tower is not None:
            arguments["mm_token_type_ids"] = torch.full_like(ids, MODALITY_OF_TYPE[tower])
        context = ForwardContext(arguments, None, labels, counts_past=False)
        context.rules = rules
        context.watchers = self.watchers if outer is None else outer.watchers
        context.calls = self.recomputation.begin() if outer is None else outer.calls
        return context

    def repeated_tokens(self, index: int, layer: str, ids: Tensor) -> ForwardContext | None:
        """Return the tokens of a layer's call that a backward repeats.

        Args:
            index: of the layer.
            ids: [tokens, k] its choice.

        Returns:
            None if the first call is unknown and no rule in force drops anything.

        Raises:
            RuntimeError: if the first call is unknown, so that it may have been capped otherwise.
        """
        found = self.recomputation.find(index, ids)
        rule = self.rules[index]
        if found is None and rule.routes and rule.policy.mode == "enforce":
            raise RuntimeError(
                f"layer {layer} is computed again in a backward, and its first forward is unknown, "
                "so a cap could drop other assignments: checkpoint with use_reentrant=False, parts "
                "of the model rather than the whole."
            )
        return found
