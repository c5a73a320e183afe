"""Figures of the demo model, and the card, curve and JSON that state them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5",
           "#9c6b4e")  # fmt: skip
WINDOW = 256  # tokens of a training and evaluation sequence
HARDWARE = "2 cores of an AMD EPYC"


def peak_to_mean(loads: Tensor) -> float:
    """Largest load over mean load of one layer; loads are [experts] assignments."""
    return float(loads.max() / loads.float().mean().clamp(min=1e-9))


def balance(loads: Tensor) -> dict[str, Any]:
    """Balance figures of every layer; loads are [layers, experts] assignments."""
    mean = loads.float().mean(1)
    return {
        "peak_to_mean": [round(peak_to_mean(layer), 3) for layer in loads],
        "least_to_mean": [round(float(x), 3) for x in loads.amin(1) / mean],
        "unused_experts": [int((layer == 0).sum()) for layer in loads],
        "loads": loads.tolist(),
    }


def unigram(counts: Tensor, labels: Tensor) -> float:
    """Perplexity of labels under token frequencies; counts are [vocabulary], at least 1 each."""
    return math.exp(-float((counts.double() / counts.sum()).log()[labels].mean()))


def curve_svg(curve: list[dict[str, Any]], width: int = 720, height: int = 380) -> str:
    """Training loss by domain over tokens as a small SVG, 5 points averaged to one."""
    domains = list(curve[0]["loss"])
    groups = [curve[i : i + 5] for i in range(0, len(curve) - len(curve) % 5, 5)] or [curve]
    xs = [group[-1]["tokens"] / 1e6 for group in groups]
    top, right = 8.0, max(xs)

    def at(x: float, y: float) -> str:
        return f"{50 + x / right * (width - 150):.1f},{height - 40 - y / top * (height - 60):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for y in range(0, 9, 2):
        x1, y1 = at(0, y).split(",")
        x2 = at(right, y).split(",")[0]
        parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y1}" stroke="#ddd"/>')
        parts.append(f'<text x="40" y="{float(y1) + 4:.1f}" text-anchor="end">{y}</text>')
    for i in range(5):
        x, y0 = at(right * i / 4, 0).split(",")
        label = f"{right * i / 4:.0f}M"
        parts.append(f'<text x="{x}" y="{float(y0) + 18:.1f}" text-anchor="middle">{label}</text>')
    for i, domain in enumerate(domains):
        ys = [sum(p["loss"][domain] for p in group) / len(group) for group in groups]
        points = " ".join(at(x, min(y, top)) for x, y in zip(xs, ys, strict=True))
        colour = COLOURS[i % len(COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        parts.append(f'<text x="{width - 88}" y="{40 + 18 * i}" fill="{colour}">{domain}</text>')
    parts.append(f'<text x="50" y="14">training loss (nats a token) over tokens seen, {HARDWARE}')
    return "\n".join(parts) + "</text></svg>\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _sources(manifest: dict[str, Any]) -> str:
    rows = []
    for domain, entry in manifest.items():
        names = "; ".join(f"`{n}` {v} ({k}, {lic})" for k, n, v, lic, _ in entry["sources"])
        rows.append(
            [
                domain,
                names,
                f"{entry['train_bytes'] / 1e6:.1f} MB",
                f"{entry['held_out_bytes'] / 1e3:.0f} kB",
                f"{100 * entry['held_out_lines_of_30_also_in_training']:.1f}%",
            ]
        )
    return _table(["domain", "packages", "training", "held out", "lines also in training"], rows)


def _perplexity(figures: dict[str, Any]) -> str:
    rows = [
        [
            domain,
            f"{f['held_out_tokens']:,}",
            f"**{f['perplexity']:.1f}**",
            f"{f['unigram_perplexity_all_domains']:.0f}",
            f"{f['unigram_perplexity_own_domain']:.0f}",
            f"{f['train_tokens']:,}",
        ]
        for domain, f in figures["domains"].items()
    ]
    head = ["domain", "held-out tokens", "perplexity", "unigram, all domains"]
    return _table([*head, "unigram, own domain", "training tokens"], rows)


def _loads(figures: dict[str, Any]) -> str:
    rows = []
    for domain, f in [*figures["domains"].items(), ("all, mixed", figures["mixed"])]:
        pairs = zip(f["peak_to_mean"], f["least_to_mean"], strict=True)
        rows.append([domain, *(f"{high:.2f} ({low:.2f})" for high, low in pairs)])
    return _table(["domain", *(f"layer {i}" for i in range(len(rows[0]) - 1))], rows)


def _runs(runs: list[dict[str, Any]]) -> str:
    lines = []
    for i, run in enumerate(runs):
        start = f"resumed at step {run['from_step']:,}, optimizer moments anew" if i else "started"
        budget = f"schedule over {run['minutes']:.0f} minutes in all"
        coefficient = f"balance loss coefficient {run['balance_loss_coefficient']}"
        lines.append(f"- {start}: {budget}, {coefficient}, CPU threads: {run['threads']}")
    return "\n".join(lines)


CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# Paceline demo model

A toy of {millions:.1f} million parameters, trained from scratch to demonstrate unbalanced experts:
the OLMoE architecture (`OlmoeForCausalLM`), 4 layers of 32 experts, 4 experts a token, hidden size
192, expert width 64, tied embeddings, a byte-level BPE of 6,000 tokens of its own. Its routers are
trained, so its loads differ by text as those of large models do. **It is not a model to use**: it
knows nothing, follows no instruction and writes plausible-looking nonsense; the context it was
trained on is {window} tokens. One seed, one training run.

Made by `examples/train_demo_model.py`, which repeats every step from public packages;
[training.json](training.json) holds the curve and every figure below.

## Data
Packages were unpacked, not installed. Held-out documents were set aside before the tokenizer was
trained. Training lines of 60 or more characters that also occur in the held-out text of the same
domain were removed; the last column is the share of held-out lines of 30 or more characters that
still occur in that domain's training text (stock phrases of code). Near-duplicates (a theorem
and its variants, say) were not looked for. The german and french texts are messages of programs.

{sources}

{notes}

Licence texts that the sources ask to keep are in [NOTICE](NOTICE).

## Training
{tokens:.1f} million tokens in {steps:,} steps, {minutes:.0f} minutes on {hardware}
that other work shared ({speed:,.0f} tokens a second).

{recipe}

{runs}

![training curve](training_curve.svg)

## Held-out perplexity
In windows of {window} tokens, of the exported bfloat16 weights computed in float32. Unigram: the
token frequencies of the training text (add one), of all domains together or of the same domain.

{perplexity}

## Expert loads on the held-out text
Peak-to-mean of the experts of a layer: the largest number of assignments over the mean (in
brackets: the smallest over the mean). Mixed: all held-out texts together. The busiest expert of any
layer gets {share:.0%} of the mixed tokens (a mean expert gets {even:.1%}); experts that no mixed
token chooses: {unused}.

{loads}
"""


def write(folder: Path, state: dict[str, Any], manifest: dict[str, Any],
          figures: dict[str, Any]) -> None:  # fmt: skip
    """Write README.md, training.json and training_curve.svg into folder from measured figures."""
    seen = state["step"] * 6 * WINDOW  # tokens
    mixed = torch.tensor(figures["mixed"]["loads"])  # [layers, experts]
    tokens = sum(f["held_out_tokens"] for f in figures["domains"].values())
    notes = {n: note for e in manifest.values() for _, n, _, _, note in e["sources"] if note}
    settings = [[k.replace("_", " "), str(v)] for k, v in state["recipe"].items()]
    text = CARD.format(
        millions=figures["parameters"] / 1e6,
        window=WINDOW,
        sources=_sources(manifest),
        notes="\n".join(f"- `{name}`: {note}" for name, note in notes.items()),
        tokens=seen / 1e6,
        steps=state["step"],
        minutes=state["seconds"] / 60,
        hardware=HARDWARE,
        speed=seen / state["seconds"],
        recipe=_table(["setting", "value"], settings),
        runs=_runs(state["runs"]),
        perplexity=_perplexity(figures),
        loads=_loads(figures),
        share=float(mixed.max()) / tokens,
        even=4 / mixed.shape[1],
        unused=sum(figures["mixed"]["unused_experts"]),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    (folder / "training_curve.svg").write_text(curve_svg(state["curve"]), encoding="utf-8")
    record = {
        "hardware": HARDWARE,
        "steps": state["step"],
        "tokens": seen,
        "seconds": round(state["seconds"], 1),
        "recipe": state["recipe"],
        "runs": state["runs"],
        "data": manifest,
        "figures": figures,
        "curve": state["curve"],
    }
    (folder / "training.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
