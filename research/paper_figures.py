"""Figures of the paper on Capacity-Aware Inference (arXiv 2503.05066), on our traces and model.

    python research/paper_figures.py table2     Expert Drop beside Token and Expanded Drop
    python research/paper_figures.py figure7    dropped share against the capacity factor
    python research/paper_figures.py figure8    gate scores by rank
    python research/paper_figures.py figure9    expert loads after each method
    python research/paper_figures.py all --write        also write results/paper_figures.json

With --json nothing but JSON is printed. In place of the paper's models there are the demo model (32
experts, 4 a token) on its held-out texts, mixed in batches, and the sample traces; in place of its
nine tasks there is perplexity. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline import CapacityPolicy, attach
from paceline.batches import Batch, cut, mixed
from paceline.demo.assets import domains, load_model, read_text
from paceline.evaluation.perplexity import Losses, batch_losses, change
from paceline.plan import Plan
from paceline.traces import Trace, open_trace, sample
from paceline.traces.policy_support import supported_keeps
from paceline.traces.record import Recorder
from paceline.traces.simulate import simulate

RESULTS = Path(__file__).resolve().parent / "results" / "paper_figures.json"
DEVICES, LENGTH, SEQUENCES, ROWS = 8, 256, 8, 24  # sequences of each text; rows of a batch
SKIPPED = 0.10
"""Share of the experts that Expert Drop skips in each forward: those with the fewest tokens."""
GAMMAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
METHODS = {
    "Token Drop": {},
    "Expanded Drop": {"expand": "own_device"},
}
"""Caps an expert, as the paper's."""
FACTORS = (2.0, 1.5, 1.0)
SAMPLES = {"DeepSeek-V2-Lite, law": "esft_v2lite_law", "DeepSeek-V2-Lite, intent":
           "esft_v2lite_intent", "gpt-oss-20b, decode": "gpt_oss_20b_decode"}  # fmt: skip


@lru_cache(maxsize=1)
def demo() -> tuple[Any, list[Batch]]:
    """Load the demo model, and batches in which all its texts are mixed."""
    model, tokenizer = load_model()
    parts = [cut(name, tokenizer(read_text(name), verbose=False)["input_ids"], LENGTH, SEQUENCES)
             for name in domains()]  # fmt: skip
    return model, mixed(parts, ROWS)


def skipped_experts(loads: Tensor, share: float = SKIPPED) -> Tensor:
    """Find the least loaded experts of a forward, at least one; of equal ones the first.

    Args:
        loads: [experts] tokens.
        share: of the experts.

    >>> skipped_experts(torch.tensor([3, 0, 5, 1]), share=0.5).tolist()
    [1, 3]
    """
    count = max(1, round(share * len(loads)))
    return torch.sort(loads, stable=True).indices[:count].sort().values


Seen = Callable[[int, Tensor, Tensor], None]
"""Told the layer, the loads before [experts], and those after."""


@contextmanager
def expert_drop(model: Any, told: Seen) -> Iterator[None]:
    """Skip the least loaded experts of every layer of every forward: their weights are 0."""

    def skip(layer: int, module: Any, args: Any) -> Any:
        hidden, ids, weights = args
        loads = torch.bincount(ids.flatten(), minlength=module.num_experts)
        gone = skipped_experts(loads)
        after = loads.clone()
        after[gone] = 0
        told(layer, loads, after)
        return hidden, ids, weights.masked_fill(torch.isin(ids, gone), 0)

    blocks = [m for m in model.modules() if hasattr(m, "gate") and hasattr(m, "experts")]
    hooks = [b.experts.register_forward_pre_hook(partial(skip, n)) for n, b in enumerate(blocks)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Counted:
    """Loads of every forward and layer, before and after a method.

    Attributes:
        before: [forwards x layers] of (layer, loads).
        after: likewise.
    """

    def __init__(self) -> None:
        self.before: list[tuple[int, list[int]]] = []
        self.after: list[tuple[int, list[int]]] = []

    def add(self, layer: int, before: Tensor, after: Tensor) -> None:
        self.before.append((layer, before.tolist()))
        self.after.append((layer, after.tolist()))

    def said(self) -> dict[str, float]:
        """Share of the rows that is gone (below 0: added), and the busiest expert / mean before."""
        total, left = (sum(sum(x) for _, x in part) for part in (self.before, self.after))
        means = sum(sum(x) / len(x) for _, x in self.before)
        return {
            "rows_gone": 1 - left / total,
            "busiest_expert": sum(max(x) for _, x in self.after) / means,
        }


@lru_cache(maxsize=1)
def measured() -> dict[str, tuple[Losses, Counted]]:
    """Run every method on every batch: losses and loads."""
    model, batches = demo()
    found: dict[str, tuple[Losses, Counted]] = {"none": (Losses(), Counted())}
    for batch in batches:
        found["none"][0].add(batch, batch_losses(model, batch))
    losses, counted = Losses(), Counted()
    with expert_drop(model, counted.add):
        for batch in batches:
            losses.add(batch, batch_losses(model, batch))
    found["Expert Drop"] = losses, counted
    for layer, loads in counted.before:
        found["none"][1].before.append((layer, loads))
        found["none"][1].after.append((layer, loads))
    for factor in FACTORS:
        for name, more in METHODS.items():
            policy = CapacityPolicy(capacity_factor=factor, unit="expert", **more)
            losses, counted = Losses(), Counted()
            with attach(model, policy, DEVICES, token_source="sequence") as pace:
                for batch in batches:
                    pace.reset_stats()
                    losses.add(batch, batch_losses(model, batch))
                    for index, stats in enumerate(pace.stats().layers):
                        counted.add(
                            index,
                            torch.tensor(stats.expert_loads_before),
                            torch.tensor(stats.expert_loads_after),
                        )
            found[f"{name}, {factor:g}"] = losses, counted
    return found


def table2() -> list[dict[str, Any]]:
    """Compare every method with no cap: perplexity change, and the load that is left."""
    runs = measured()
    base = runs["none"][0]
    rows = []
    for name, (losses, counted) in runs.items():
        against = change(base, losses)
        rows.append(
            {
                "method": name,
                "perplexity_change": against.mean,
                "standard_error": against.standard_error,
                **counted.said(),
            }
        )
    return rows


def figure7(traces: Mapping[str, Trace]) -> list[dict[str, Any]]:
    """Share of the assignments that Token Drop drops, by capacity factor and unit."""
    rows = []
    for traffic, trace in traces.items():
        plans = {"none": Plan(placements=(DEVICES,))}
        keep = supported_keeps(trace)[0]
        for unit in ("expert", "device"):
            for gamma in GAMMAS:
                cap: Any = {"unit": unit, "keep": keep, "min_expert_load": 0}
                policy = CapacityPolicy(capacity_factor=gamma, **cap)
                plans[f"{unit} {gamma}"] = Plan((policy,), (DEVICES,))
        found = simulate(trace, plans).plans
        rows += [
            {"traffic": traffic, "unit": unit}
            | {f"{g:g}": found[f"{unit} {g}"].overall.dropped_share for g in GAMMAS}
            for unit in ("expert", "device")
        ]
    return rows


def figure8(traces: Mapping[str, Trace]) -> list[dict[str, Any]]:
    """Compute the mean gate score of tokens' first, second, ... expert, as far as recorded."""
    rows = []
    for traffic, trace in traces.items():
        sums: Tensor | None = None
        count = 0
        for chunk in trace.chunks:
            scores = chunk.scores if chunk.scores is not None else chunk.topk_scores
            scores = chunk.weights if scores is None else scores
            if scores is None:
                raise ValueError(f"{trace.where} holds no scores.")
            ranked = scores.double().sort(dim=-1, descending=True).values  # [layers, tokens, rank]
            sums = ranked.sum((0, 1)) + (0 if sums is None else sums)
            count += ranked.shape[0] * ranked.shape[1]
        assert sums is not None
        k = trace.header.layers[0].k
        rows.append({"traffic": traffic, "k": k, "mean_score": (sums / count).tolist()})
    return rows


def figure9() -> list[dict[str, Any]]:
    """Loads of the experts of every layer / mean before, busiest first, after every method.

    Of the first batch; the order is that of the loads before. peak_to_mean: busiest after / mean
    after.
    """
    rows = []
    for name, (_, counted) in measured().items():
        layers = len({layer for layer, _ in counted.before})
        for (layer, before), (_, after) in zip(
            counted.before[:layers], counted.after[:layers], strict=True
        ):
            order = sorted(range(len(before)), key=lambda e: (-before[e], e))
            mean = sum(before) / len(before)
            rows.append(
                {
                    "method": name,
                    "layer": layer,
                    "loads": [after[e] / mean for e in order],
                    "peak_to_mean": max(after) * len(after) / sum(after),
                }
            )
    return rows


@contextmanager
def traffics() -> Iterator[dict[str, Trace]]:
    """Open the sample traces in batches of 512 tokens or steps, and the demo model's scores."""
    model, batches = demo()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        with attach(model) as pace, Recorder(pace, path, "scores", model="demo"):
            for batch in batches:
                batch_losses(model, batch)
        own = {name: sample(stem) for name, stem in SAMPLES.items()}
        yield {
            "demo model": open_trace(path),
            **{n: t if t.header.batches == "forward" else t.regrouped(512) for n, t in own.items()},
        }


def results(which: str) -> dict[str, Any]:
    """Make one of the figures, or all of them."""
    found: dict[str, Any] = {}
    if which in ("table2", "all"):
        found["table2"] = table2()
    if which in ("figure7", "figure8", "all"):
        with traffics() as traces:
            if which != "figure8":
                found["figure7"] = figure7(traces)
            if which != "figure7":
                found["figure8"] = figure8(traces)
    if which in ("figure9", "all"):
        found["figure9"] = figure9()
    return found


def table2_page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write table 2 as docs/study.md has it."""
    lines = ["| method | perplexity | rows | busiest expert / mean |", "|---|---|---|---|"]
    for row in rows:
        error = f" ± {row['standard_error']:.2%}" if row["method"] != "none" else ""
        lines.append(
            f"| {row['method']} | {_signed(row['perplexity_change'], 2)}{error} | "
            f"{_signed(-row['rows_gone'], 1)} | {row['busiest_expert']:.2f} |"
        )
    return "\n".join(lines)


def _signed(share: float, digits: int) -> str:
    """Write a change in percent; nothing has no sign."""
    rounded = round(100 * share, digits)
    return f"{rounded:+.{digits}f}%" if rounded else "0%"


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a Markdown table; of lists the first values."""

    def text(value: Any) -> str:
        if isinstance(value, list):
            return " ".join(f"{one:.3f}" for one in value[:8]) + (" ..." if len(value) > 8 else "")
        return f"{value:.4f}" if isinstance(value, float) else str(value)

    print(f"\n## {title}\n")
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(text(value) for value in row.values()) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=("table2", "figure7", "figure8", "figure9", "all"))
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.add_argument("--write", action="store_true", help="write results/paper_figures.json")
    options = parser.parse_args()
    if options.write and options.which != "all":
        parser.error("--write needs all")
    found = results(options.which)
    if options.write:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for title, rows in found.items():
        show(title, rows)


if __name__ == "__main__":
    main()
