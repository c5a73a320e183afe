"""What the layers of one attached model share: the rules in force, and the forward that is running.

Forwards of one model may overlap in several threads: each thread has a running forward, a running
`generate` and router outputs of its own, and a forward keeps the rules and the watchers that there
were when it began. Within a thread forwards nest and never overlap.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from paceline.engines.rules import LayerRule
from paceline.engines.sharing import shares_budget, warn_of_shared_cache, warn_of_sharing
from paceline.engines.transformers.patching import StandIn, Switch, named_arguments, stand_in
from paceline.engines.transformers.tokens.arguments import cache_of, parameter_names
from paceline.engines.transformers.tokens.context import ForwardContext
from paceline.engines.transformers.tokens.generation import Generation, GenerationWatch
from paceline.engines.transformers.tokens.labels import UserLabels
from paceline.engines.transformers.tokens.modality import MODALITY_OF_TYPE
from paceline.engines.transformers.tokens.nested import arguments_inside
from paceline.facts import NO_FACTS, Facts
from paceline.routing import Assignment, RoutingInputs

Watcher: TypeAlias = Callable[[str, RoutingInputs, Assignment], None]
"""Called with a layer's name, what routing was given and what came out."""


class UnknownTokensWarning(UserWarning):
    """Which rows of a layer are padding is unknown, so all are counted as tokens."""


class Here:
    """What is running in one thread.

    Attributes:
        context: of the running forward, None outside one.
        generation: the running `generate`, None outside one.
        router: layer -> input and output of its router, until its experts have run.
    """

    def __init__(self) -> None:
        self.context: ForwardContext | None = None
        self.generation: Generation | None = None
        self.router: dict[str, tuple[Tensor, Any]] = {}


class _Threads(threading.local):
    """Each thread's own; itself never written to, as a compiler would lose it (torch 2.13)."""

    def __init__(self) -> None:
        self.here = Here()


class Running:
    """What the layers of one attached model share.

    Args:
        labels: what the user says of tokens.

    Attributes:
        rules: in force, one a layer.
        switch: of all stand-ins.
        step: number of the forward, from 0, counted while keep="random" asks for it; a tensor, so
            that a compiled model isn't compiled anew for every forward.
        watchers: of forwards that begin from now on, with the facts that they ask for.
        watched_facts: what routers are listened to for: at least what the watchers ask for.
        threads: their `here` is what is running in the calling thread.
        changing: held while policies, watchers and what stands in for routers are changed.
        before_forward: called before every forward.
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
        self._watched_modules = 0
        self._of_this_process()

    def _of_this_process(self) -> None:
        self.threads = _Threads()
        self._lock = threading.Lock()
        self.changing = threading.RLock()
        self.watchers: tuple[tuple[Watcher, Facts], ...] = ()
        self.watched_facts = NO_FACTS

    def __getstate__(self) -> dict[str, Any]:
        """A copy runs forwards of its own, which nobody watches."""
        own = ("threads", "_lock", "changing", "watchers", "watched_facts")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._of_this_process()

    @property
    def here(self) -> Here:
        """What is running in the calling thread."""
        return self.threads.here

    @property
    def context(self) -> ForwardContext | None:
        """Of the forward that runs in this thread, None outside one."""
        return self.here.context

    def follow(self, rules: Sequence[LayerRule]) -> None:
        """Put rules in force, one a layer; forwards that are running keep theirs."""
        policies = [rule.policy for rule in rules if rule.routes]
        self._counts_past = any(p.phase == "prefill" or p.protect_first for p in policies)
        self._counts_steps = any(rule.facts.step for rule in rules)
        self._shared = next((p for p in policies if shares_budget(p)), None)
        self._enforces = any(p.caps and p.mode == "enforce" for p in policies)
        self._routes = bool(policies)
        self.rules = tuple(rules)

    def prompt_alone(self) -> bool:
        """Whether a prompt must be processed without guessed tokens behind it."""
        return any(r.policy.phase == "prefill" and r.policy.mode == "enforce" for r in self.rules)

    # -- following the model's forwards -----------------------------------------------------------

    def follow_module(self, module: nn.Module) -> list[StandIn]:
        """Follow a module's forwards; the innermost one that brings tokens of its own counts.

        A language model inside another model mostly gets the same tokens; a vision tower gets
        patches, and a decoder its own tokens.
        """
        names = parameter_names(module)
        takes_tokens = bool({"input_ids", "inputs_embeds"} & set(names))
        config = getattr(module, "config", None)
        self._watched_modules += 1
        forward = partial(
            self._forward, module.forward, names, takes_tokens, config, self._watched_modules
        )
        generation = GenerationWatch(self)
        return [stand_in(module, self.switch, forward), *generation.follow(module)]

    def _forward(
        self,
        forward: Callable[..., Any],
        names: list[str],
        takes_tokens: bool,
        config: Any,
        number: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not self.switch.on:
            return forward(*args, **kwargs)
        here, arguments = self.threads.here, named_arguments(names, args, kwargs)
        outer = here.context
        if outer is None:
            here.context = self._begin(arguments, config)
        else:
            inner = arguments_inside(outer, arguments, number) if takes_tokens else arguments
            if inner is not None:
                here.context = outer.inside(inner, config if inner is arguments else None)
        try:
            out = forward(*args, **kwargs)
            if outer is None and here.router and self.switch.on:  # else detached meanwhile
                self._check_reached(here.router)
            return out
        finally:
            here.context = outer
            if outer is None and here.router:
                here.router = {}

    def _begin(self, arguments: dict[str, Any], config: Any) -> ForwardContext:
        """The outermost forward: its tokens are what layers see from here."""
        watchers = self.watchers
        counts_past = self._counts_past
        if watchers:
            counts_past |= any(facts.decode or facts.position for _, facts in watchers)
        generation = self.threads.here.generation
        context = ForwardContext(arguments, config, self.labels, generation, counts_past)
        context.rules, context.watchers = self.rules, watchers
        if not torch.compiler.is_compiling():  # modules don't change while a graph is made of them
            for prepare in self.before_forward:
                prepare()
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

    def start_at(self, step: int) -> None:
        """The next forward gets this number."""
        with self._lock, torch.inference_mode(False):
            self.step.fill_(step - 1)

    def _next_step(self) -> Tensor:
        if torch.compiler.is_compiling():
            return self.step.add_(1).clone()
        with self._lock:
            return self.step.add_(1).clone()

    def _warn_of_sharing(self, context: ForwardContext) -> None:
        """Say once that users who share a batch affect each other (docs/method.md)."""
        requests = 0 if self._shared is None else context.num_requests
        if self._shared is not None and requests > 1:
            self._warned_of_sharing = True
            warn_of_sharing(self._shared, requests, stacklevel=4)

    def _warn_of_cache(self, arguments: dict[str, Any]) -> None:
        """Say once that cached prefixes which requests share tell of what followed them."""
        if getattr(cache_of(arguments), "use_prefix_sharing", False):  # continuous batching
            self._warned_of_cache = True
            remedy = "say allow_block_sharing=False in ContinuousBatchingConfig"
            warn_of_shared_cache(remedy, stacklevel=4)

    def _check_reached(self, router: dict[str, tuple[Tensor, Any]]) -> None:
        """A router that chose experts which nobody ran here means a layer out of reach.

        Raises:
            RuntimeError: naming the layer.
        """
        name = next(iter(router))
        raise RuntimeError(
            f"layer {name} can't be handled: its router ran, but not its experts' forward (is it "
            "replaced by a kernel?); detach to go on without it."
        )

    # -- forwards that don't tell their tokens ----------------------------------------------------

    def unknown_tokens(
        self, index: int, layer: str, rows: int, device: torch.device
    ) -> ForwardContext:
        """The context of a layer that runs outside a forward which tells its tokens.

        Returns:
            One sequence of so many tokens, as far as the user's labels tell of them.

        Raises:
            RuntimeError: if the rule in force must know what is unknown.
        """
        outer, labels = self.context, self.labels
        rules = self.rules if outer is None else outer.rules
        rule: LayerRule = rules[index]
        facts = rule.facts
        tower = None if outer is None else outer.tower
        said = {
            "source": labels.source,
            "request": labels.request,
            "decode": tower or labels.decode,  # what a tower reads is never generated
            "modality": tower or labels.modality,
            "position": None,
        }
        missing = [n for n, given in said.items() if getattr(facts, n) and given is None]
        outside = outer is None or outer.is_masked
        if labels.valid is None and outside:
            missing.insert(0, "valid")
        if missing and rule.policy.caps and rule.policy.mode == "enforce":
            names = {"valid": "padding"}
            raise RuntimeError(
                f"layer {layer} ran outside a forward of the attached model that tells its tokens, "
                f"so their {names.get(missing[0], missing[0])} is unknown, which "
                f'"{rule.policy}" needs: say it with token_valid, token_request, token_source, '
                "token_decode or token_modality of attach."
            )
        all_real = tower is not None and not outside
        if labels.valid is None and not all_real and not self._warned_of_unknown:
            self._warned_of_unknown = True
            warnings.warn(
                f"layer {layer} ran outside a forward of the attached model that tells its tokens: "
                "every row is counted as a token, padding too; say which are with token_valid of "
                "attach.",
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
        return context
