"""Hear what a layer's router says, as the block gets it: after adapters, wrappers and hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.engines.transformers.layers.modules import LayerModules
from paceline.engines.transformers.patching import StandIn, first_argument, stand_in, stands_in
from paceline.engines.transformers.state import Running


class RouterWatch:
    """Keeps what the router of one layer gets and gives, for the thread that runs it.

    Args:
        modules: of the layer.
        running: what all layers share.
    """

    def __init__(self, modules: LayerModules, running: Running) -> None:
        self._modules, self._name, self._running = modules, modules.name, running
        self._watch: StandIn | _LastHook | None = None
        self._double: Any = self  # the router's forward while it is heard by a stand-in

    def ensure(self) -> None:
        """Keep what the router says from here on.

        An adapter, a wrapper or a hook may be put on the router at any time, so this is asked
        before every forward that may need scores.
        """
        router = self._modules.block._modules[self._modules.router_name]
        assert router is not None  # found with it
        if router.__dict__.get("forward") is self._double and not router._forward_hooks:
            return
        with self._running.changing:  # once, whatever other threads begin meanwhile
            if self._running.switch.on and not self._hears():
                self._listen()

    def undo(self) -> None:
        """Put the router back as it was."""
        if self._watch is not None:
            self._watch.undo()
        self._watch, self._double = None, self

    def _hears(self) -> bool:
        """Whether what is kept now is what the block gets."""
        router, watch = self._modules.router, self._watch
        if watch is None or watch.module is not router:
            return False
        hooks = router._forward_hooks
        if isinstance(watch, _LastHook):
            return next(reversed(hooks), None) == watch.key
        return not hooks and stands_in(router.__dict__.get("forward")) is watch

    def _listen(self) -> None:
        self.undo()
        router = self._modules.router
        if router._forward_hooks:  # what they change is what the block gets: be the last of them
            handle = router.register_forward_hook(self._hear, with_kwargs=True)
            self._watch = _LastHook(router, handle)
            return
        run = partial(self._run, router.forward)
        self._watch = stand_in(router, self._running.switch, run)
        self._double = router.__dict__["forward"]

    def _run(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out, running = run(*args, **kwargs), self._running
        if running.switch.on:
            given = args[0] if args else first_argument(args, kwargs)
            running.threads.here.router[self._name] = (given, out)
        return out

    def _hear(self, _: Any, args: Any, *rest: Any) -> None:
        if len(rest) == 2 and self._running.switch.on:  # else it was removed while the router ran
            given = first_argument(args, rest[0])
            self._running.here.router[self._name] = (given, rest[1])


@dataclass(frozen=True, eq=False)
class _LastHook:
    """A forward hook on a router that has others."""

    module: nn.Module
    handle: RemovableHandle

    @property
    def key(self) -> int:
        """Of the hook among the module's."""
        return self.handle.id

    def undo(self) -> None:
        self.handle.remove()
