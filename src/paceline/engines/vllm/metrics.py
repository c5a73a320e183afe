"""A worker's counters on vLLM's /metrics, through prometheus_client's multiprocess mode."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from paceline.engines.vllm.capped_layer import CappedLayer
from paceline.engines.vllm.capped_model import CappedModel
from paceline.engines.vllm.environment import MULTIPROCESS
from paceline.routing.layer_stats import LayerStats

EVERY = 1.0  # seconds between two publications

_families: dict[str, Any] = {}


def families() -> dict[str, Any]:
    """The metrics, made once a process, after the environment is set."""
    if not _families:
        from prometheus_client import Counter, Gauge

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> None:
            _families[name] = Counter(f"paceline_{name}", text, labels)

        def gauge(name: str, text: str, mode: Any, labels: tuple[str, ...] = ()) -> None:
            _families[name] = Gauge(f"paceline_{name}", text, labels, multiprocess_mode=mode)

        counter(
            "assignments",
            "Rows of experts: as the router chose (before), and under the cap (after). rank is "
            "the one that hosts the experts.",
            ("layer", "rank", "stage"),
        )
        counter("dropped", "Assignments dropped; in shadow, that would be.", ("layer", "rank"))
        counter(
            "dropped_computed",
            "Dropped assignments that were computed with weight 0: leaving them out takes longer.",
            ("layer", "rank"),
        )
        counter("capped_forwards", "Forwards in which a capacity was set.")
        gauge(
            "device_peak_to_mean",
            "Rows of the busiest device over the mean, mean over layers and forwards.",
            "livemax",
            ("stage",),
        )
        gauge(
            "active_experts",
            "Experts with any row on the device with the most, mean over layers and forwards.",
            "livemax",
            ("stage",),
        )
        gauge("gate_mass_kept", "Share of the gate mass kept where a policy routed.", "livemin")
        gauge("policy_info", "1 for the policy in force.", "livemax", ("policy",))
    return _families


class Publisher:
    """Puts what a worker's layers counted where /metrics finds it.

    Args:
        model: whose layers.
    """

    def __init__(self, model: CappedModel) -> None:
        self._model = model
        self._last: dict[str, LayerStats] = {}
        self._computed: dict[str, int] = {}
        self._capped = 0
        self._policy = ""
        self._stop = threading.Event()
        self._lock = threading.Lock()
        families()
        self.publish()
        threading.Thread(target=self._run, name="paceline-metrics", daemon=True).start()

    def close(self) -> None:
        """Publish no more."""
        self._stop.set()

    def publish(self) -> None:
        """Bring the metrics up to what was counted until now."""
        with self._lock:
            stats = self._model.stats()
            for layer, counted in zip(self._model.layers, stats, strict=True):
                self._publish_layer(layer, counted)
            self._publish_whole(stats)

    def _publish_layer(self, layer: CappedLayer, stats: LayerStats) -> None:
        ranks, last = layer.ranks, self._last.get(layer.name)
        self._last[layer.name] = stats
        if ranks.expert_ranks == 1:
            rows = {0: tuple(range(layer.num_experts))}
        else:
            # where all ranks see the same tokens each counts its own experts' rows; a source of
            # tokens of its own counts them for whichever rank they go to
            several = ranks.data_ranks > 1
            mine = range(ranks.expert_ranks) if several else [ranks.expert_rank]
            rows = {rank: layer.units.experts_of(rank) for rank in mine}
        computed = layer.dropped_computed
        self._add("dropped_computed", computed - self._computed.get(layer.name, 0), layer.name,
                  str(ranks.expert_rank))  # fmt: skip
        self._computed[layer.name] = computed
        extras = stats.extras - (last.extras if last else 0)
        for rank, experts in rows.items():
            asked = _sum(stats.expert_loads_before, experts)
            done = _sum(stats.expert_loads_after, experts)
            if last is not None:
                asked -= _sum(last.expert_loads_before, experts)
                done -= _sum(last.expert_loads_after, experts)
            self._add("assignments", asked, layer.name, str(rank), "before")
            self._add("assignments", done, layer.name, str(rank), "after")
            if not extras:
                self._add("dropped", asked - done, layer.name, str(rank))
        if extras:  # which of a rank's rows are extras isn't known
            lost = stats.dropped - (last.dropped if last else 0)
            self._add("dropped", lost, layer.name, str(ranks.expert_rank))

    def _publish_whole(self, stats: list[LayerStats]) -> None:
        ranks = self._model.layers[0].ranks
        if ranks.data_ranks > 1 or ranks.expert_rank == 0:
            capped = max(layer.capped_forwards for layer in stats)
            self._add("capped_forwards", capped - self._capped)
            self._capped = capped
        if not any(layer.tokens for layer in stats):
            return self._publish_policy()
        count = len(stats)
        for name, figures in (
            ("device_peak_to_mean", [(s.device_peak_to_mean_before, s.device_peak_to_mean_after)
                                     for s in stats]),
            ("active_experts", [(s.most_active_experts_before, s.most_active_experts_after)
                                for s in stats]),
        ):  # fmt: skip
            for stage, values in zip(("before", "after"), zip(*figures, strict=True), strict=True):
                families()[name].labels(stage).set(sum(values) / count)
        families()["gate_mass_kept"].set(sum(layer.gate_mass_kept for layer in stats) / count)
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
        while not self._stop.wait(EVERY):
            self.publish()


def _sum(loads: list[int], experts: Sequence[int]) -> int:
    return sum(loads[expert] for expert in experts)


def publisher_for(model: CappedModel) -> Publisher | None:
    """What publishes a worker's counts, None where nothing collects them."""
    if not os.environ.get(MULTIPROCESS) or not any(layer.ranks.counts for layer in model.layers):
        return None
    return Publisher(model)
