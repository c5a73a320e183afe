"""`paceline demo`: stragglers, and the cost and the gain of a cap, on the embedded model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from paceline.balance import percentile
from paceline.batches import Batch, mixed, separate, tokens_by_source
from paceline.bench.emulated import CLOCK, ExpertTime, time_policies
from paceline.bench.timing import Spread, ratios
from paceline.demo.assets import held_out, load_calibration, load_model
from paceline.demo.settings import BASELINE, DEVICES, KINDS, REPEATS, DemoSettings, Entry
from paceline.engines.transformers import attach
from paceline.evaluation.perplexity import PolicyRun, change, run_policy
from paceline.evaluation.results import Balance, Form, LoadShares, Made, PerplexityChange
from paceline.placement import ExpertPlacement
from paceline.progress import Progress
from paceline.system_info import system_info

KIND = "paceline-demo/"
SCHEMA = KIND + "2"
Runs = dict[str, dict[str, PolicyRun]]
"""Kind of batch -> key of the policy -> run."""


class LayerTable(Balance):
    """Loads of one layer, summed over batches; its balance is without a cap."""

    name: str
    expert_loads_before: list[float]
    expert_loads_after: list[float]
    device_loads_before: list[float]
    device_loads_after: list[float]


class Loads(Form):
    """Loads without a cap, overall and by layer; of a kind of batch with more detail."""

    overall: Balance
    layers: list[LayerTable]
    device_peak_to_mean_percentiles: dict[str, float] | None = None
    by_domain: dict[str, Loads] | None = None


class BesideCounterpart(Form):
    """A policy beside the same cap in a simpler form."""

    perplexity_change: PerplexityChange
    speedup: Spread


class PolicyPart(LoadShares):
    """One policy on one kind of batch."""

    perplexity: dict[str, float]
    perplexity_change: PerplexityChange
    emulated: ExpertTime
    against_counterpart: BesideCounterpart | None = None


class PolicyRow(Form):
    """One policy on both kinds of batches."""

    key: str
    label: str
    family: str
    policy: str
    capacity_factor: float | None
    counterpart: str | None
    placed: bool
    one_domain: PolicyPart
    mixed: PolicyPart

    def part(self, kind: str) -> PolicyPart:
        """Return the figures of a kind of batch."""
        return self.one_domain if kind == "one_domain" else self.mixed


class Example(Form):
    """Device loads of the most unbalanced layer and batch without a cap, under every policy."""

    domain: str
    layer: int
    assignments: int
    device_loads: dict[str, list[int]]


class Findings(Form):
    """Sentences computed from the figures."""

    headline: str
    lines: list[str]


class DemoResult(Made):
    """Content of results.json of the demo."""

    reduced: bool
    model: dict[str, Any]  # type: ignore[assignment]
    data: dict[str, Any]
    calibration: dict[str, Any]
    stragglers: dict[str, Loads]
    policies: list[PolicyRow]
    example: Example
    timing: dict[str, Any]
    findings: Findings = Findings(headline="", lines=[])

    def row(self, key: str) -> PolicyRow | None:
        """Return the row of a policy; None where a reduced run lacks it."""
        return next((row for row in self.policies if row.key == key), None)


def run_demo(
    settings: DemoSettings | None = None,
    progress: Progress | None = None,
    command: str = "paceline demo",
) -> DemoResult:
    """Run the whole demo, all but its findings.

    Args:
        settings: size of the run; None is the full one.
        progress: called after every batch.
        command: of the user, for the page's footer.

    Raises:
        FileNotFoundError: if the model or the texts are missing from the installation.
    """
    settings = settings or DemoSettings()
    started, system = time.perf_counter(), system_info()
    model, tokenizer = load_model()
    sequences = held_out(tokenizer, settings.length, settings.sequences, settings.max_domains)
    batches = {
        "one_domain": separate(sequences, settings.sequences),
        "mixed": mixed(sequences, settings.sequences),
    }
    timed = {
        "one_domain": batches["one_domain"][:: settings.timed_every],
        "mixed": batches["mixed"][: settings.timed_mixed],
    }
    steps = len(settings.entries) * sum(map(len, batches.values())) + sum(map(len, timed.values()))
    done = 0

    def counter(words: str) -> Callable[[], None]:
        def count() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, steps, words)

        return count

    calibration = load_calibration()
    in_order = ExpertPlacement.contiguous(model.config.num_experts, DEVICES)
    placed = [ExpertPlacement.explicit(layer.placement) for layer in calibration.layers]
    placements = {False: [in_order] * len(placed), True: placed}
    runs: Runs = {kind: {} for kind in KINDS}
    for places, where in placements.items():
        with attach(model, None, where, calibration=calibration, token_source="sequence") as pace:
            for kind, words in KINDS.items():
                for entry in (entry for entry in settings.entries if entry.placed is places):
                    count = counter(f"{words}: {entry.label}")
                    run = run_policy(model, pace, entry.policy, batches[kind], count)
                    runs[kind][entry.key] = run
    times = {
        kind: time_policies(
            model,
            [batch.ids for batch in timed[kind]],
            {entry.key: (entry.policy, placements[entry.placed]) for entry in settings.entries},
            calibration,
            settings.rounds,
            REPEATS,
            counter(f"{words}: timing of emulated devices"),
        )
        for kind, words in KINDS.items()
    }
    return DemoResult(
        schema=SCHEMA,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command,
        reduced=settings.reduced,
        **system,
        model=_describe(model, in_order),
        data={
            "tokens_by_domain": tokens_by_source(sequences),
            "sequences_per_batch": settings.sequences,
            "sequence_length": settings.length,
            "one_domain_batches": len(batches["one_domain"]),
            "mixed_batches": len(batches["mixed"]),
            "predicted_tokens": runs["one_domain"][BASELINE].losses.predicted_tokens(),
        },
        calibration={
            "rank": calibration.layers[0].down.shape[1],
            "tokens": dict(zip(calibration.texts, calibration.tokens, strict=True)),
            "explained_of_texts_left_out": [layer.explained for layer in calibration.layers],
        },
        stragglers={kind: _loads(kind, by_key[BASELINE]) for kind, by_key in runs.items()},
        policies=[_row(entry, runs, times) for entry in settings.entries],
        example=_example(runs["one_domain"]),
        timing={
            "kind": "emulated devices, one process, expert computation only",
            "threads": 1,
            "rounds": settings.rounds,
            "repeats": REPEATS,
            "clock": CLOCK,
            "experts_implementation": getattr(model.config, "_experts_implementation", None),
            "batches": {kind: [_texts(batch) for batch in timed[kind]] for kind in KINDS},
        },
        seconds=round(time.perf_counter() - started, 1),
    )


def _texts(batch: Batch) -> list[str]:
    return list(dict.fromkeys(batch.sources))


def _describe(model: Any, placement: ExpertPlacement) -> dict[str, Any]:
    return {
        "architecture": model.config.model_type,
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": model.config.num_hidden_layers,
        "experts": placement.num_experts,
        "experts_per_token": model.config.num_experts_per_tok,
        "devices": placement.num_devices,
        "experts_per_device": list(placement.sizes),
        "expert_to_device": list(placement.expert_to_device),
    }


def _loads(kind: str, run: PolicyRun) -> Loads:
    """Sum up the loads of a kind of batch without a cap, overall, by layer and by text."""
    peaks = [layer.device_peak_to_mean_before for layer in run.all_layers()]
    found = _layer_tables(run.layers)
    found.device_peak_to_mean_percentiles = {
        str(percent): percentile(peaks, percent) for percent in (0, 50, 90, 100)
    }
    if kind == "one_domain":
        by_text: dict[str, list[list[Any]]] = {}
        for layers, texts in zip(run.layers, run.sources, strict=True):
            by_text.setdefault(texts[0], []).append(layers)
        found.by_domain = {text: _layer_tables(batches) for text, batches in by_text.items()}
    return found


def _layer_tables(batches: Sequence[Sequence[Any]]) -> Loads:
    """Sum loads over batches, [batches][layers]; they run one after the other."""
    tables = []
    for same_layer in zip(*batches, strict=True):
        names = (
            f"{unit}_loads_{when}" for unit in ("expert", "device") for when in ("before", "after")
        )
        sums: dict[str, Any] = {
            name: [math.fsum(x) for x in zip(*(getattr(s, name) for s in same_layer), strict=True)]
            for name in names
        }
        balance: dict[str, Any] = Balance.of(same_layer, "before").to_dict()
        tables.append(LayerTable(**balance, **sums, name=same_layer[0].name))
    return Loads(
        overall=Balance.of([layer for batch in batches for layer in batch], "before"), layers=tables
    )


def _row(entry: Entry, runs: Runs, times: Mapping[str, Mapping[str, ExpertTime]]) -> PolicyRow:
    parts = {}
    for kind, by_key in runs.items():
        run, timed, other = by_key[entry.key], times[kind], entry.counterpart
        beside = None
        if other is not None and other in by_key:
            beside = BesideCounterpart(
                perplexity_change=change(by_key[other].losses, run.losses),
                speedup=ratios(timed[other]["seconds"], timed[entry.key]["seconds"]),
            )
        parts[kind] = PolicyPart(
            perplexity=run.losses.perplexity(),
            perplexity_change=change(by_key[BASELINE].losses, run.losses),
            emulated=timed[entry.key],
            against_counterpart=beside,
            **run.shares().to_dict(),
        )
    return PolicyRow(
        key=entry.key,
        label=entry.label,
        family=entry.family,
        policy=str(entry.policy),
        capacity_factor=entry.policy.capacity_factor,
        counterpart=entry.counterpart,
        placed=entry.placed,
        **parts,
    )


def _example(by_key: Mapping[str, PolicyRun]) -> Example:
    """Find the most unbalanced batch and layer without a cap."""
    base = by_key[BASELINE]
    batch, layer = max(
        ((b, n) for b, layers in enumerate(base.layers) for n in range(len(layers))),
        key=lambda place: base.layers[place[0]][place[1]].device_peak_to_mean_before,
    )
    return Example(
        domain=base.sources[batch][0],
        layer=layer,
        assignments=base.layers[batch][layer].assignments,
        device_loads={
            key: run.layers[batch][layer].device_loads_after for key, run in by_key.items()
        },
    )
