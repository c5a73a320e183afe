"""Counters of a worker on vLLM's /metrics, through prometheus_client's multiprocess mode."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from paceline.engines.serving.capped_layer import CappedLayer
from paceline.engines.serving.capped_model import CappedModel
from paceline.engines.serving.environment import MULTIPROCESS
from paceline.routing.layer_stats import LayerStats

EVERY = 1.0  # seconds between two publications

_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "assignments": (
        "Rows of experts: as the router chose (before), and under the cap (after). rank is the one "
        "that hosts the experts.",
        ("layer", "rank", "stage"),
    ),
    "dropped": ("Dropped assignments; in shadow mode, those that would be.", ("layer", "rank")),
    "dropped_computed": (
        "Dropped assignments that were computed with weight 0, as to skip them takes longer.",
        ("layer", "rank"),
    ),
    "capped_forwards": ("Forwards in which a capacity was set.", ()),
}
_GAUGES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "device_peak_to_mean": (
        "Rows of the busiest device over the mean, averaged over layers and forwards.",
        ("stage",), "livemax",
    ),
    "active_experts": (
        "Experts with any row on the device with the most, averaged over layers and forwards.",
        ("stage",), "livemax",
    ),
    "gate_mass_kept": ("Share of the gate mass kept where a policy routed.", (), "livemin"),
    "policy_info": ("1 for the policy in force.", ("policy",), "livemax"),
}  # fmt: skip
"""Name -> description, labels, and how prometheus_client joins the values of processes."""


@lru_cache(maxsize=1)
def families() -> dict[str, Any]:
    """Make the metrics, once per process and after the environment is set."""
    from prometheus_client import Counter, Gauge

    made: dict[str, Any] = {}
    for name, (text, labels) in _COUNTERS.items():
        made[name] = Counter(f"paceline_{name}", text, labels)
    for name, (text, labels, mode) in _GAUGES.items():
        how: Any = mode
        made[name] = Gauge(f"paceline_{name}", text, labels, multiprocess_mode=how)
    return made


class Publisher:
    """Thread that publishes the counts of a worker's layers every second."""

    def __init__(self, model: CappedModel) -> None:
        self._model = model
        self._last: dict[str, LayerStats] = {}
        self._computed: dict[str, int] = {}
        self._capped = 0
        self._policy = ""
        self._lock = threading.Lock()
        self.publish()
        threading.Thread(target=self._run, name="paceline-metrics", daemon=True).start()

    def publish(self) -> None:
        """Add to the metrics what was counted since the last time."""
        with self._lock:
            stats = self._model.stats()
            for layer, counted in zip(self._model.layers, stats, strict=True):
                self._publish_layer(layer, counted)
            self._publish_model(stats)

    def _publish_layer(self, layer: CappedLayer, stats: LayerStats) -> None:
        ranks, last = layer.ranks, self._last.get(layer.name)
        self._last[layer.name] = stats
        if ranks.expert_ranks == 1:
            experts_of = {0: tuple(range(layer.num_experts))}
        else:
            # if all ranks see the same tokens, each counts its own experts' rows; a rank with
            # tokens of its own counts them for the rank that they go to
            several = ranks.data_ranks > 1
            own = range(ranks.expert_ranks) if several else [ranks.expert_rank]
            experts_of = {rank: layer.units.experts_of(rank) for rank in own}
        computed = layer.dropped_computed
        self._add("dropped_computed", computed - self._computed.get(layer.name, 0), layer.name,
                  str(ranks.expert_rank))  # fmt: skip
        self._computed[layer.name] = computed
        extras = stats.extras - (last.extras if last else 0)
        for rank, experts in experts_of.items():
            before = _sum(stats.expert_loads_before, experts)
            after = _sum(stats.expert_loads_after, experts)
            if last is not None:
                before -= _sum(last.expert_loads_before, experts)
                after -= _sum(last.expert_loads_after, experts)
            self._add("assignments", before, layer.name, str(rank), "before")
            self._add("assignments", after, layer.name, str(rank), "after")
            if not extras:
                self._add("dropped", before - after, layer.name, str(rank))
        if extras:  # which of a rank's rows are extras is not known
            dropped = stats.dropped - (last.dropped if last else 0)
            self._add("dropped", dropped, layer.name, str(ranks.expert_rank))

    def _publish_model(self, stats: list[LayerStats]) -> None:
        ranks = self._model.layers[0].ranks
        if ranks.data_ranks > 1 or ranks.expert_rank == 0:
            capped = max(layer.capped_forwards for layer in stats)
            self._add("capped_forwards", capped - self._capped)
            self._capped = capped
        if any(layer.tokens for layer in stats):
            metrics, count = families(), len(stats)
            for stage in ("before", "after"):
                for name, field in (
                    ("device_peak_to_mean", "device_peak_to_mean"),
                    ("active_experts", "most_active_experts"),
                ):
                    total = sum(getattr(layer, f"{field}_{stage}") for layer in stats)
                    metrics[name].labels(stage).set(total / count)
            metrics["gate_mass_kept"].set(sum(layer.gate_mass_kept for layer in stats) / count)
        self._publish_policy()

    def _publish_policy(self) -> None:
        policy = self._model.policy_text()
        if policy != self._policy:
            info = families()["policy_info"]
            if self._policy:
                info.labels(self._policy).set(0)
            info.labels(policy).set(1)
            self._policy = policy

    def _add(self, family: str, more: int, *labels: str) -> None:
        counter = families()[family]
        (counter.labels(*labels) if labels else counter).inc(max(more, 0))

    def _run(self) -> None:
        while True:
            time.sleep(EVERY)
            self.publish()


def _sum(loads: list[int], experts: Sequence[int]) -> int:
    return sum(loads[expert] for expert in experts)


def publisher_for(model: CappedModel) -> Publisher | None:
    """Return what publishes a worker's counts, None if nothing collects them."""
    if not os.environ.get(MULTIPROCESS) or not any(layer.ranks.counts for layer in model.layers):
        return None
    return Publisher(model)
