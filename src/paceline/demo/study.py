"""Run every policy over the same batches and sum up loads, drops and losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.balance import combine_peaks, straggler_loss
from paceline.batches import Batch, Sequences, cut
from paceline.demo.assets import domains, read_text
from paceline.evaluation.perplexity import Losses, batch_losses

LayerDict = Mapping[str, Any]


@dataclass
class PolicyRun:
    """What one policy did over all batches of one kind.

    Attributes:
        losses: negative log-likelihoods by text.
        layers: per batch, the statistics of every layer (`LayerStats` as dictionaries).
        sources: per batch, the texts in it.
    """

    losses: Losses = field(default_factory=Losses)
    layers: list[list[LayerDict]] = field(default_factory=list)
    sources: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, batch: Batch, losses: Sequence[float], layers: list[LayerDict]) -> None:
        self.losses.add(batch, losses)
        self.layers.append(layers)
        self.sources.append(tuple(dict.fromkeys(batch.sources)))


def held_out(
    tokenizer: Any, length: int, limit: int, max_domains: int | None = None
) -> list[Sequences]:
    """The first sequences of each held-out text, at most `limit`, of `length` tokens each."""
    return [
        cut(
            domain,
            tokenizer(read_text(domain), add_special_tokens=False, verbose=False)["input_ids"],
            length,
            limit=limit,
        )
        for domain in domains()[:max_domains]
    ]


def run_policy(
    model: Any, pace: Any, policy: Any, batches: Sequence[Batch], step: Callable[[], None]
) -> PolicyRun:
    """Run an attached model over the batches under a policy; `step` is called after each."""
    pace.policy = policy
    run = PolicyRun()
    for batch in batches:
        pace.reset_stats()
        losses = batch_losses(model, batch)
        run.add(batch, losses, pace.stats().to_dict()["layers"])
        step()
    return run


def flat(layers: Sequence[Sequence[LayerDict]]) -> list[LayerDict]:
    """All (batch, layer) pairs of a run."""
    return [layer for batch in layers for layer in batch]


def overall_peak(layers: Sequence[LayerDict], unit: str, when: str) -> float:
    """Peak-to-mean over (batch, layer) pairs, which run one after the other."""
    return combine_peaks(
        [layer[f"{unit}_peak_to_mean_{when}"] for layer in layers],
        [layer["assignments"] for layer in layers],
    )


def balance(layers: Sequence[LayerDict], when: str) -> dict[str, float]:
    """Balance figures over (batch, layer) pairs; worst is the highest single pair."""
    device = overall_peak(layers, "device", when)
    return {
        "device_peak_to_mean": device,
        "device_peak_to_mean_worst": max(x[f"device_peak_to_mean_{when}"] for x in layers),
        "straggler_loss": straggler_loss(device),
        "expert_peak_to_mean": overall_peak(layers, "expert", when),
        "expert_peak_to_mean_worst": max(x[f"expert_peak_to_mean_{when}"] for x in layers),
    }


def drops(layers: Sequence[LayerDict]) -> dict[str, float]:
    """Shares over (batch, layer) pairs, each pair weighted by its assignments."""
    assignments = sum(layer["assignments"] for layer in layers)
    kept = sum(layer["gate_mass_kept"] * layer["assignments"] for layer in layers)
    return {
        "dropped_share": sum(layer["dropped"] for layer in layers) / assignments,
        "extras_share": sum(layer["extras"] for layer in layers) / assignments,
        "gate_mass_kept": kept / assignments,
    }


def layer_tables(run: PolicyRun, source: str | None = None) -> list[dict[str, Any]]:
    """Loads and balance of every layer, over the batches (of one text, if named).

    Loads are summed over the batches; peak-to-mean is over batches run one after the other.
    """
    chosen = [
        layers
        for layers, sources in zip(run.layers, run.sources, strict=True)
        if source is None or sources == (source,)
    ]
    tables = []
    for same_layer in zip(*chosen, strict=True):
        entry: dict[str, Any] = {"name": same_layer[0]["name"]}
        for unit in ("expert", "device"):
            for when in ("before", "after"):
                key = f"{unit}_loads_{when}"
                entry[key] = [
                    math.fsum(loads) for loads in zip(*(x[key] for x in same_layer), strict=True)
                ]
        entry |= balance(same_layer, "before")
        tables.append(entry)
    return tables
