"""Placement on recorded routing, on traffic it hasn't seen.

    python benchmarks/placement.py                     the traces that come with the package
    python benchmarks/placement.py --traces FOLDER     .npz traces of the same names there
    python benchmarks/placement.py --write             also write results/placement.json

Nothing here is timed: rows are counted. A placement is fitted on the first half of a traffic, in
pieces of 64 tokens, and judged on batches of the second half, or on another traffic.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import CapacityPolicy
from paceline.analysis.expert_map import ExpertMap
from paceline.analysis.placing import PlacementSpec, judge_placements, place
from paceline.analysis.traffic import Part, batches_of, count_batches
from paceline.plan import Plan
from paceline.traces import ImportOptions, Trace, open_trace, sample
from paceline.traces.simulate import simulate

NAMES = {"esft_v2lite_intent": 64, "esft_v2lite_law": 64, "gpt_oss_20b_decode": 32}
DEVICES = 8
SIZES: dict[str, tuple[int | None, ...]] = {
    "esft_v2lite_intent": (256, 1024),
    "esft_v2lite_law": (256, 1024),
    "gpt_oss_20b_decode": (None, 256, 1024),
}
RESULTS = Path(__file__).parent / "results" / "placement.json"


def load(folder: Path | None) -> dict[str, Trace]:
    """Open the traces, by name."""
    if folder is None:
        return {name: sample(name) for name in NAMES}
    return {
        name: open_trace(folder / f"{name}.npz", ImportOptions(experts=experts))
        for name, experts in NAMES.items()
    }


def held_out(traces: Mapping[str, Trace]) -> list[dict[str, Any]]:
    """Judge every placement on the second half of the trace it was fitted on."""
    rows = []
    for name, trace in traces.items():
        for size in SIZES[name]:
            _, result = place(trace, PlacementSpec(DEVICES, replicas=8), batch_tokens=size)
            assert result.second_half is not None
            ways = result.second_half.ways
            rows.append(
                {
                    "traffic": name,
                    "batch_tokens": 64 if size is None else size,
                    **{way: figures.device_peak_to_mean for way, figures in ways.items()},
                    "layers_where_eplb_was_better": sum(
                        a > b
                        for a, b in zip(ways["search"].layers, ways["eplb"].layers, strict=True)
                    ),
                    "layers": len(ways["search"].layers),
                }
            )
    return rows


def transfer(traces: Mapping[str, Trace], size: int = 1024) -> list[dict[str, Any]]:
    """Judge a placement fitted on one task on the other; and one fitted on both."""
    two = ("esft_v2lite_intent", "esft_v2lite_law")
    maps = {name: place(traces[name], PlacementSpec(DEVICES))[0] for name in two}
    rows = []
    for judge in two:
        cut = batches_of(traces[judge], size)
        part = Part(0, count_batches(cut))
        ways = {
            "in_order": [ExpertMap.contiguous(64, DEVICES)] * len(maps[judge]),
            **{f"fitted on {name}": found for name, found in maps.items()},
        }
        found = judge_placements(ways, cut, part).ways
        rows.append({"judged on": judge} | {w: f.device_peak_to_mean for w, f in found.items()})
    return rows


def place_then_cap(traces: Mapping[str, Trace], size: int = 1024) -> list[dict[str, Any]]:
    """Simulate a cap of 1.0 per device on experts in order, placed for this trace, or for the
    other one."""
    two = ("esft_v2lite_intent", "esft_v2lite_law")
    maps = {name: place(traces[name], PlacementSpec(DEVICES))[0] for name in two}
    policy = CapacityPolicy(capacity_factor=1.0, min_expert_load=0)
    rows = []
    for name in two:
        other = two[1 - two.index(name)]
        plans = {
            "in order": Plan((policy,), (DEVICES,)),
            "own placement": Plan((policy,), tuple(m.placement for m in maps[name])),
            "the other's placement": Plan((policy,), tuple(m.placement for m in maps[other])),
        }
        found = simulate(traces[name].regrouped(size), plans).plans
        rows += [
            {
                "traffic": name,
                "placement": way,
                "dropped_share": found[way].overall.dropped_share,
                "gate_mass_lost": found[way].overall.gate_mass_lost,
            }
            for way in plans
        ]
    return rows


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a Markdown table."""
    print(f"\n## {title}\n")
    names = list(rows[0])
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        cells = [f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--traces", type=Path, help="folder of .npz traces")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    traces = load(arguments.traces)
    result: dict[str, Any] = {
        "traces": "sample" if arguments.traces is None else "whole",
        "devices": DEVICES,
        "held_out": held_out(traces),
        "transfer": transfer(traces),
        "place_then_cap": place_then_cap(traces),
    }
    for name, rows in result.items():
        if isinstance(rows, list):
            show(name.replace("_", " "), rows)
    if arguments.write:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
