"""The handle that `attach` returns: policies, statistics, watching, and `detach`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from paceline.engines.rules import ALL_MODALITIES, check_policy
from paceline.engines.transformers.config import load_policy
from paceline.engines.transformers.layers.find import Places
from paceline.engines.transformers.layers.layer import (
    AttachedLayer,
    ReplacedExperts,
    identities,
)
from paceline.engines.transformers.state import AttachedState, Watcher
from paceline.engines.transformers.tokens.context import ForwardContext
from paceline.engines.transformers.tokens.modality import known_modalities
from paceline.facts import NO_FACTS, Facts
from paceline.numbers import check_count
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing.layer_stats import LayerStats
from paceline.settings import PoliciesLike, read_policies
from paceline.stand_ins.identity import LayerIdentity
from paceline.text import shortened


class CapNeverAppliedWarning(UserWarning):
    """A policy has a cap, and no forward so far was large enough for it."""


@dataclass(frozen=True)
class LayerSupport:
    """Support of one layer.

    Attributes:
        scoring: the router's scoring rule, None where it is unknown.
        level: "full", or "drop only": no expansion, and without `scoring` no keep="score".
        reason: why not full, else empty.
    """

    name: str
    scoring: str | None
    level: Literal["full", "drop only"]
    reason: str


@dataclass(frozen=True)
class ModelStats:
    """Load statistics of all attached layers, and the policy they were counted under last."""

    policy: str
    layers: list[LayerStats]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {"policy": self.policy, "layers": [layer.to_dict() for layer in self.layers]}


class Pace:
    """A policy attached to a model. Use it as a context manager, or `detach` it."""

    def __init__(
        self, layers: list[AttachedLayer], state: AttachedState, undo: ExitStack, model: nn.Module
    ):
        self._layers, self._state, self._undo, self._model = layers, state, undo, model
        self._places = Places(model, [layer.modules for layer in layers])
        self._attached, self._warned = True, False

    # -- policies ---------------------------------------------------------------------------------

    @property
    def policy(self) -> CapacityPolicy:
        """The policy in force, of the first layer where they differ; set another at any time.

        One policy for all layers, its short form, None, or a sequence with one per layer. A forward
        keeps the policies that were in force when it began.

        Raises:
            ValueError: if a layer can't run the new policy; the old one stays then.
        """
        return self.policies[0]

    @policy.setter
    def policy(self, policy: PoliciesLike) -> None:
        if not self._attached:
            raise ValueError("the policy can't be set: it is detached from its model.")
        self.set_policies(read_model_policies(policy, self._model, len(self._layers)))

    @property
    def policies(self) -> tuple[CapacityPolicy, ...]:
        """The policies in force, one per layer."""
        return tuple(rule.policy for rule in self._state.rules)

    def set_policies(self, policies: Sequence[CapacityPolicy]) -> None:
        """Put policies in force, one per layer; see `policy`."""
        labelled = self._state.labels.modality is not None
        modalities = ALL_MODALITIES if labelled else known_modalities(self._model)
        with self._state.changing:
            pairs = list(zip(self._layers, policies, strict=True))
            pairs = [(layer, layer.applicable(policy)) for layer, policy in pairs]
            self._layers[0].agree("policy", [str(policy) for _, policy in pairs])
            for layer, policy in pairs:
                check_policy(policy, layer.traits(modalities))
            rules = [layer.rule(policy) for layer, policy in pairs]
            for layer, rule in zip(self._layers, rules, strict=True):
                on_cpu = layer.modules.device.type == "cpu"
                layer.loads.min_expert_load = rule.min_expert_load[on_cpu] if rule.routes else None
            self._warned = False
            self._observe_routers([rule.needs_scores for rule in rules])
            self._state.set_rules(rules)

    def _observe_routers(self, scored: Sequence[bool]) -> None:
        """Observe routers, before every forward, where a policy or a watcher needs scores.

        A router once observed stays so until `detach`: a running forward may still need it.
        """
        everywhere = self._state.watched_facts.scores
        observed = tuple(
            layer.router.ensure
            for layer, needed in zip(self._layers, scored, strict=True)
            if (layer.scoring.rule is not None and (needed or everywhere)) or not layer.ran_block
        )
        for ensure_observed in observed:
            ensure_observed()
        called = tuple(layer.ensure_called for layer in self._layers)
        self._state.before_forward = (self._places.check, *called, *observed)

    # -- what is known of the layers --------------------------------------------------------------

    @property
    def placement(self) -> ExpertPlacement | None:
        """The experts' devices, of the first layer; None: every expert is a device of its own."""
        return self._layers[0].placement

    @property
    def placements(self) -> tuple[ExpertPlacement | None, ...]:
        """The experts' devices, one placement per layer."""
        return tuple(layer.placement for layer in self._layers)

    @property
    def layers(self) -> list[str]:
        """Names of the MoE layers, in order."""
        return [layer.name for layer in self._layers]

    @property
    def support(self) -> list[LayerSupport]:
        """The policies that each layer supports, and why not more."""
        return [
            LayerSupport(
                layer.name,
                layer.scoring.rule,
                "full" if layer.scoring.expands else "drop only",
                layer.scoring.reason,
            )
            for layer in self._layers
        ]

    def identity(self) -> list[LayerIdentity]:
        """Return each layer's sizes and weight fingerprints, to which a calibration is bound."""
        return identities(self._model, self._layers)

    def row_costs(self) -> list[float]:
        """Return each layer's cost of one token: weights per expert times experts per token."""
        return [layer.row_cost() for layer in self._layers]

    # -- watching ---------------------------------------------------------------------------------

    def watch(self, watcher: Watcher, facts: Facts = NO_FACTS) -> Callable[[], None]:
        """Call `watcher(layer, inputs, assignment)` on every layer of every forward.

        Args:
            watcher: gets the layer's name, the `RoutingInputs` and the `Assignment`; it must not
                change them. With a policy that caps nothing, or too small a forward, the assignment
                is the model's own choice.
            facts: that the inputs must have beside what the policy asks for, such as scores.

        Returns:
            A function that ends it.

        Raises:
            ValueError: if it can't be called, or `facts` are none.
        """
        if not callable(watcher):
            raise ValueError(
                f"watcher must be a function of (layer, inputs, assignment), got {watcher!r}."
            )
        if not isinstance(facts, Facts):
            raise ValueError(f"facts must be Facts, got {shortened(facts)}.")
        entry, state = (watcher, facts), self._state

        def change(watchers: tuple[tuple[Watcher, Facts], ...]) -> None:
            # routers first, for a forward that begins in another thread
            state.watched_facts = Facts.union(*(asked for _, asked in watchers))
            self._observe_routers([rule.needs_scores for rule in state.rules])
            state.watchers = watchers

        def end() -> None:
            with state.changing:
                change(tuple(other for other in state.watchers if other is not entry))

        with state.changing:
            change((*state.watchers, entry))
        return end

    def replace_experts(self, experts: ReplacedExperts) -> Callable[[], None]:
        """Replace the layers' way to run experts by `experts(layer, run, hidden, ids, weights)`.

        Args:
            experts: gets the layer's name; `run`, the layer's own way, which leaves out ids equal
                to the number of experts; and what that is given, [..., hidden], [tokens, slots]
                and [tokens, slots]. Over ranks it is called where experts live, on local ids.

        Returns:
            A function that restores the layers' own way.

        Raises:
            ValueError: if it can't be called.
        """
        if not callable(experts):
            raise ValueError(
                "experts must be a function of (layer, run, hidden, ids, weights), got "
                f"{shortened(experts)}."
            )
        for layer in self._layers:
            layer.replace_experts(experts)

        def undo() -> None:
            for layer in self._layers:
                layer.replace_experts(None)

        return undo

    @property
    def context(self) -> ForwardContext | None:
        """Tokens of the forward that runs in this thread; None outside one."""
        return self._state.context

    # -- statistics -------------------------------------------------------------------------------

    def stats(self) -> ModelStats:
        """Return each layer's loads before and after, drops and straggler loss so far.

        Raises:
            RuntimeError: if other experts have taken the place of a layer's, which a compiled
                forward doesn't notice.
        """
        if self._attached:
            self._places.check()
        policies = dict.fromkeys(map(str, self.policies))
        shown = next(iter(policies)) if len(policies) == 1 else f"{len(self.policies)} policies"
        stats = ModelStats(shown, [layer.loads.result() for layer in self._layers])
        if not self._warned:
            self._warned = self._warn_of_no_cap(stats)
        return stats

    def _warn_of_no_cap(self, stats: ModelStats) -> bool:
        """Warn once that a cap has never applied; returns True if it warned."""
        capped = [
            layer
            for layer, rule in zip(stats.layers, self._state.rules, strict=True)
            if rule.routes and layer.forwards
        ]
        if not capped or any(layer.capped_forwards for layer in capped):
            return False
        load = f"{capped[0].min_expert_load:g} tokens per expert (min_expert_load)"
        too_many = all(policy.factor is None for policy in self.policies)
        why = f"none had {load}, or all of them only decoded"
        if too_many:
            why = f"all had {load}, or too few tokens to need more experts than max_active"
        warnings.warn(
            f'the cap of "{stats.policy}" never applied in {capped[0].forwards} forwards: {why}.',
            CapNeverAppliedWarning,
            stacklevel=3,
        )
        return True

    def reset_stats(self) -> None:
        """Reset the statistics."""
        with torch.inference_mode(False):
            for layer in self._layers:
                layer.loads.reset()

    def number_forwards_from(self, number: int) -> None:
        """Set the number of the next forward, by which keep="random" draws."""
        self._state.start_at(check_count("number", number, 0))

    # -- the way back -----------------------------------------------------------------------------

    def detach(self) -> None:
        """Restore the model exactly; statistics can still be read. Idempotent.

        Copies made of the model while it was attached run as the untouched model from here on.
        """
        with self._state.changing:
            if self._attached:
                self._attached = False
                self._state.switch.on = False
                self._undo.close()

    def __enter__(self) -> Pace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()


def read_model_policies(
    policy: PoliciesLike, model: nn.Module, layers: int
) -> tuple[CapacityPolicy, ...]:
    """Return the policy of each of a model's layers; "config" is the one kept in its config.

    Raises:
        ValueError: if it is no policy, or the config has none.
    """
    if isinstance(policy, str) and policy == "config":
        policy = load_policy(model)
        if policy is None:
            raise ValueError('policy="config": the model\'s config has no capacity_policy.')
    return read_policies(policy, layers)
