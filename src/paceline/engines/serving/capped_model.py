"""All capped layers of a worker's model: their policies are checked, put in force and described."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.engines.rules import with_default_pool
from paceline.engines.serving.capped_layer import CappedLayer, Watcher
from paceline.engines.serving.environment import Settings
from paceline.facts import NO_FACTS, Facts
from paceline.policy import CapacityPolicy
from paceline.routing import RoutingInputs, route
from paceline.routing.layer_stats import LayerStats

RUNG = "rung "
OWN_BUDGETS = (
    "pool=request: with prefix caching on, every request has a budget of its own, so that no batch "
    "changes what others read from the cache"
)


class CappedModel:
    """The capped layers of the model that one worker runs; an engine's subclass finds them.

    Args:
        layers: in the model's order.
        settings: of the environment.
        rank: of the worker among all of them.

    Attributes:
        kernels: how experts leave dropped slots out, by their class.
        note: sentence on what was added to the policy in force, if anything.
    """

    engine = "paceline"  # as the source of a trace names it
    change = "change it at /paceline/policy (GET, POST, DELETE)"
    log = logging.getLogger("paceline")

    def __init__(self, layers: Sequence[CappedLayer], settings: Settings, rank: int) -> None:
        self.layers: Sequence[CappedLayer] = layers
        self.settings, self.rank = settings, rank
        self.accepted = settings.accept_shared_budget
        self.kernels: dict[str, str] = {}
        self.note: str | None = None

    # -- of an engine -----------------------------------------------------------------------------

    def shares_cache(self) -> bool:
        """Return True if requests read each other's cached prefixes."""
        raise NotImplementedError

    def check_settings(self, policies: Sequence[CapacityPolicy]) -> None:
        """Refuse settings of the engine that contradict a policy of a layer.

        Raises:
            ValueError: naming the setting and what is allowed.
        """
        raise NotImplementedError

    def request_ids(self) -> list[str] | None:
        """Return the engine's names of the running forward's requests, None if it has none."""
        raise NotImplementedError

    # -- policies ---------------------------------------------------------------------------------

    def set_policies(
        self, policies: Sequence[CapacityPolicy | None], text: str | None = None
    ) -> None:
        """Put one policy per layer in force, all or none; None: neither cap nor count.

        Args:
            text: that they come from, as for `parse`.

        Raises:
            ValueError: as `check_policies` does.
        """
        checked = self.check_policies(policies)
        for layer, policy in zip(self.layers, checked, strict=True):
            layer.set_policy(policy)
        pools = [(a.pool, b.pool) for a, b in zip(policies, checked, strict=True) if a and b]
        notes = [OWN_BUDGETS] if any(new == "request" != old for old, new in pools) else []
        if text is not None and text.startswith(RUNG):
            notes.append(self.settings.rung(text.removeprefix(RUNG))[1])
        self.note = "; ".join(notes) or None
        if self.note is not None and self.rank == 0:
            self.log.info("paceline: %s", self.note)

    def check_policies(
        self, policies: Sequence[CapacityPolicy | None]
    ) -> list[CapacityPolicy | None]:
        """Return the policies as they apply here.

        Raises:
            ValueError: if the engine's settings or a layer exclude one.
        """
        if len(policies) != len(self.layers):
            raise ValueError(
                f"policies must be one, or one for each of the {len(self.layers)} MoE layers, got "
                f"{len(policies)}."
            )
        several = self.layers[0].ranks.data_ranks > 1
        # a captured graph knows no requests
        shared = self.shares_cache() and not self.accepted and not self.layers[0].graphed
        checked = [p and with_default_pool(p, several, shared) for p in policies]
        self.check_settings([p for p in checked if p is not None])
        for layer, policy in zip(self.layers, checked, strict=True):
            if policy is not None:
                layer.check(policy)
        return checked

    def parse(self, text: str | None) -> list[CapacityPolicy | None]:
        """Return one policy per layer for a short form.

        Args:
            text: short form; "start": as the engine began; "rung NAME": of the ladder beside the
                plan; None: off.

        Raises:
            ValueError: if it is no policy.
        """
        if text is None:
            return [None] * len(self.layers)
        if text == "start":
            return list(self.start_policies())
        if text.startswith(RUNG):
            own, _ = self.settings.rung(text.removeprefix(RUNG))
            return [*own] if len(own) > 1 else [own[0]] * len(self.layers)
        return [CapacityPolicy.parse(text)] * len(self.layers)

    def start_policies(self) -> list[CapacityPolicy | None]:
        """Return one policy per layer as the settings name them."""
        policies = self.settings.policies
        return list(policies) if len(policies) > 1 else [policies[0]] * len(self.layers)

    # -- state ------------------------------------------------------------------------------------

    def stats(self) -> list[LayerStats]:
        """Return the loads and drops of every layer since the server started."""
        return [layer.stats() for layer in self.layers]

    def reset_stats(self) -> None:
        """Reset the counts of all layers."""
        for layer in self.layers:
            layer.reset_stats()

    def policy_text(self) -> str:
        """Return the policy in force, one per layer if they differ, or "off"."""
        texts = ["off" if p is None else str(p) for p in (la.policy for la in self.layers)]
        return texts[0] if len(set(texts)) == 1 else "; ".join(texts)

    def watch(self, watcher: Watcher, facts: Facts = NO_FACTS) -> Callable[[], None]:
        """Call `watcher(layer, inputs, assignment)` on every forward, until the result is called.

        Args:
            watcher: called while a policy is in force, be it observe.
            facts: that its inputs must have, in addition to those that the policy needs.
        """
        entry = (watcher, facts)
        for layer in self.layers:
            layer.watchers.append(entry)

        def undo() -> None:
            for layer in self.layers:
                layer.watchers.remove(entry)

        return undo

    def describe(self) -> dict[str, Any]:
        """Return the policy in force and all counts, as `control.WorkerState`."""
        stats = self.stats()
        ranks = self.layers[0].ranks
        policies = [layer.policy for layer in self.layers]
        one = policies[0] if len(set(policies)) == 1 else None
        return {
            "rank": self.rank,
            "layers": len(self.layers),
            "devices": self.layers[0].units.num_devices,
            "expert_rank": ranks.expert_rank,
            "data_ranks": ranks.data_ranks,
            "off": policies[0] is None,
            "policy": None if one is None else str(one),
            "fields": None if one is None else json.loads(one.to_json()),
            "policies": None if one is not None else [p and str(p) for p in policies],
            "min_expert_load": stats[0].min_expert_load,
            "note": self.note,
            "kernels": self.kernels,
            "forwards": max(layer.forwards for layer in stats),
            "capped_forwards": max(layer.capped_forwards for layer in stats),
            "assignments": sum(layer.assignments for layer in stats),
            "dropped": sum(layer.dropped for layer in stats),
            "dropped_computed": sum(layer.dropped_computed for layer in self.layers),
            "enforced": any(p is not None and p.mode == "enforce" for p in policies),
            "by_layer": [
                {
                    "name": layer.name,
                    "assignments": layer.assignments,
                    "dropped": layer.dropped,
                    "device_peak_to_mean_before": layer.device_peak_to_mean_before,
                    "device_peak_to_mean_after": layer.device_peak_to_mean_after,
                }
                for layer in stats
            ],
        }

    # -- start ------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Route made-up tokens, so that no request waits for the router to be compiled."""
        for layer in {layer.policy: layer for layer in self.layers}.values():
            policy = layer.policy
            if policy is None or not policy.caps or layer.graphed:
                continue
            rows = 64
            scores = torch.rand(rows, layer.num_experts)
            weights, ids = torch.topk(scores, layer.k)
            label = torch.zeros(rows, dtype=torch.int64)
            inputs = RoutingInputs(
                topk_ids=ids.int(), topk_weights=weights, scores=scores, token_request=label,
                token_source=label, token_decode=label.bool(),
                expert_norms=torch.ones(layer.num_experts),
            )  # fmt: skip
            if policy.capacity_factor is not None:
                route(inputs, policy.replace(min_expert_load=0, max_active=None), layer.units)
            if policy.max_active is not None:  # of forwards below min_expert_load
                route(inputs, policy.replace(min_expert_load=rows * layer.k), layer.units)

    def say_what_is_capped(self) -> None:
        """Log what is capped, how dropped slots are left out, and where to change it."""
        devices, text = self.layers[0].units.num_devices, self.policy_text()
        self.log.info("paceline: %d MoE layers on %d devices: %s", len(self.layers), devices, text)
        kernels = "; ".join(f"{name}: {form}" for name, form in self.kernels.items())
        self.log.info("paceline: %s", kernels)
        self.log.info("paceline: %s; see /metrics", self.change)
