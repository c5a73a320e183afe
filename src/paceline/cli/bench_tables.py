"""Results of `paceline bench` on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.bench.layer_timing import LayerRow
from paceline.bench.model_timing import ModelRow
from paceline.bench.run import EMULATED, Results
from paceline.cli.output import print_lines, print_table, print_verdict
from paceline.text import percent

Row = LayerRow | ModelRow


def show(results: Results) -> None:
    """Print the results of `bench layer` or `bench model`."""
    devices, rows = results.devices, results.policies
    where = f"{results.workload['label']}, {devices.count} {devices.kind}"
    print_verdict([_verdict(rows)])
    ratios = ("bound", "speed-up", "min", "max", "of bound")
    layers = [row for row in rows if isinstance(row, LayerRow)]
    lines = []
    if layers:
        _print(where, ["busiest device", "dropped", "ms", *ratios], [
            [_name(r), f"{r.peak_to_mean:.2f}", percent(r.dropped_share),
             f"{1e3 * r.seconds['median']:.2f}", *_ratios(r)] for r in layers
        ])  # fmt: skip
        _print("Stages in ms, medians of the device that computes longest",
               [*layers[0].stages, "sent MB"], [
            [_name(r), *(f"{1e3 * stage['median']:.2f}" for stage in r.stages.values()),
             "-" if r.bytes_sent is None else f"{r.bytes_sent / 1e6:.2f}"] for r in layers
        ])  # fmt: skip
    else:
        _print(where, ["first token ms", "prefill per s", "decode per s", *ratios], [
            [_name(r), f"{1e3 * r.first_token_seconds['median']:.1f}",
             f"{r.prefill_tokens_a_second['median']:.0f}",
             "-" if r.decode_tokens_a_second is None
             else f"{r.decode_tokens_a_second['median']:.1f}", *_ratios(r)]
            for r in rows if isinstance(r, ModelRow)
        ])  # fmt: skip
        lines.append("Tokens per second are of all ranks; the speed-up is of the first token.")
    if devices.kind == EMULATED:
        lines.append("Emulated: one process played all devices, and nothing was sent.")
    print_lines(lines)


def _verdict(rows: Sequence[Row]) -> str:
    """Name the policy that is fastest, and what its loads allow."""
    capped = [row for row in rows if row.policy != rows[0].policy]
    if not capped:
        return "No cap was timed."
    best = max(capped, key=lambda row: row.speedup["median"])
    unit = "layer" if isinstance(best, LayerRow) else "first token"
    low, middle, high = (best.speedup[name] for name in ("min", "median", "max"))
    if low <= 1.0:
        return f"No cap makes the {unit} faster beyond the spread of the rounds."
    return (
        f"{best.policy} makes the {unit} {middle:.2f} ({low:.2f}-{high:.2f}) times as fast; its "
        f"loads allow {best.bound:.2f}."
    )


_QUIET = 0.03  # relative difference of two runs of one case on a quiet machine


def show_fit(result: Mapping[str, Any]) -> None:
    """Print the results of `bench hardware`."""
    hardware = result["hardware"]
    print_verdict([
        f"{result['held_out_within_15_percent']} of {len(result['held_out'])} layers that took no "
        f"part in the fit are within 15%, the worst off by {result['held_out_worst']:.0%}; of "
        f"{result['decode_cases']} decode cases (few rows per expert, weights dominate) "
        f"{result['decode_within_15_percent']}.",
        f"{hardware['flops'] / 1e9:.0f} GFLOP/s in large products, "
        f"{hardware['memory'] / 1e9:.1f} GB/s of weights, {hardware['per_expert'] * 1e6:.0f} us "
        "per expert.",
    ])  # fmt: skip
    _print("Layers that took no part in the fit",
           ["rows per expert", "measured ms", "model's error"], [
        [f"{case['hidden']} x {case['expert_size']}",
         f"{sum(case['rows']) / len(case['rows']):.1f}",
         f"{case['seconds'] * 1e3:.2f}", f"{case['error']:+.0%}"] for case in result["held_out"]
    ], first="hidden x size")  # fmt: skip
    lines = []
    if result["each_size_left_out"]:
        lines.append(
            "Of the others, each size left out of the fit in turn: "
            f"{result['each_size_left_out_within_15_percent']} of {result['each_size_left_out']} "
            f"within 15%, the worst off by {result['each_size_left_out_worst']:.0%}."
        )
    lines.append(f"The fastest two runs of a case differ by {result['unrest']:.0%}.")
    if result["unrest"] > _QUIET:
        lines.append("The machine was not quiet: the fit can't be better than its timings.")
    print_lines(lines)


def _print(title: str, headers: list[str], lines: list[list[str]], first: str = "policy") -> None:
    print_table(title, (first, *headers), lines, fold=True)


def _name(row: Row) -> str:
    return row.policy.replace("capacity_factor=", "").replace(",", "\n")


def _ratios(row: Row) -> list[str]:
    faster = row.speedup
    values = (row.bound, faster["median"], faster["min"], faster["max"])
    return [f"{value:.2f}" for value in (*values, row.share_of_bound["median"])]
