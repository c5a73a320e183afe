"""Sum up the runs of the demo into the sections of results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.balance import percentile
from paceline.bench.timing import ratios
from paceline.demo.plan import BASELINE, Plan
from paceline.demo.study import PolicyRun, balance, drops, flat, layer_tables
from paceline.evaluation.perplexity import as_dict, change

Runs = Mapping[str, Mapping[str, PolicyRun]]
"""Kind of batch -> policy key -> run."""


def describe(model: Any, placement: Any) -> dict[str, Any]:
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


def stragglers(runs: Runs) -> dict[str, Any]:
    """Where the load goes without a cap: by kind of batch, text and layer."""
    result: dict[str, Any] = {}
    for kind, by_key in runs.items():
        run = by_key[BASELINE]
        peaks = [layer["device_peak_to_mean_before"] for layer in flat(run.layers)]
        result[kind] = {
            "overall": balance(flat(run.layers), "before"),
            "device_peak_to_mean_percentiles": {
                str(percent): percentile(peaks, percent) for percent in (0, 50, 90, 100)
            },
            "layers": layer_tables(run),
        }
    run = runs["one_domain"][BASELINE]
    result["one_domain"]["by_domain"] = {}
    for sources in run.sources:
        tables = layer_tables(run, sources[0])
        own = [x for x, s in zip(run.layers, run.sources, strict=True) if s == sources]
        result["one_domain"]["by_domain"][sources[0]] = {
            "overall": balance(flat(own), "before"),
            "layers": tables,
        }
    return result


def policies(plan: Plan, runs: Runs, timing: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for entry in plan.entries:
        row: dict[str, Any] = {
            "key": entry.key,
            "label": entry.label,
            "family": entry.family,
            "policy": str(entry.policy),
            "capacity_factor": entry.policy.capacity_factor,
            "counterpart": entry.counterpart,
            "placed": entry.placed,
        }
        for kind, by_key in runs.items():
            run = by_key[entry.key]
            row[kind] = {
                "perplexity": run.losses.perplexity(),
                "perplexity_change": as_dict(change(by_key[BASELINE].losses, run.losses)),
                **drops(flat(run.layers)),
                **balance(flat(run.layers), "after"),
                "stand_in_distance": _distance(flat(run.layers)),
                "emulated": timing[kind][entry.key],
            }
            if entry.counterpart is not None and entry.counterpart in by_key:
                row[kind]["against_counterpart"] = {
                    "perplexity_change": as_dict(
                        change(by_key[entry.counterpart].losses, run.losses)
                    ),
                    "speedup": ratios(
                        timing[kind][entry.counterpart]["seconds"],
                        timing[kind][entry.key]["seconds"],
                    ),
                }
        rows.append(row)
    return rows


def _distance(layers: Sequence[Mapping[str, Any]]) -> float | None:
    """How far inputs of stand-ins were from the calibration's, mean over (batch, layer) pairs."""
    known = [x["stand_in_distance"] for x in layers if x["stand_in_distance"] is not None]
    return sum(known) / len(known) if known else None


def example(runs: Runs) -> dict[str, Any]:
    """Device loads of the worst (batch, layer) without a cap, and under every policy."""
    base = runs["one_domain"][BASELINE]
    batch, layer = max(
        ((b, n) for b, layers in enumerate(base.layers) for n in range(len(layers))),
        key=lambda place: base.layers[place[0]][place[1]]["device_peak_to_mean_before"],
    )
    return {
        "domain": base.sources[batch][0],
        "layer": layer,
        "assignments": base.layers[batch][layer]["assignments"],
        "device_loads": {
            key: run.layers[batch][layer]["device_loads_after"]
            for key, run in runs["one_domain"].items()
        },
    }
