"""Cost of caps on a multimodal model, with images' or with text's assignments dropped first.

The picture model (`picture_model.py`) answers questions about pictures that it was not trained on.
Every policy sees the same conversations, and is compared with no cap on each of them.

    python research/multimodal.py --model research/models/pictures \
        --out research/results/multimodal.json
    python research/multimodal.py --page research/results/multimodal.json

The second writes the result's table into docs/multimodal.md.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from picture_model import QUESTIONS, answers, load
from pictures import CATEGORIES, IGNORED, Conversations, clothes, conversations
from torch import Tensor

from paceline import CapacityPolicy, attach
from paceline.batches import Batch
from paceline.calibration.collect import calibrate
from paceline.cli.output import progress
from paceline.engines.sharing import SharedBudgetWarning
from paceline.evaluation.results import Balance, LoadShares
from paceline.files import to_json, write_text
from paceline.routing.layer_stats import LayerStats
from paceline.system_info import system_info

Floats = NDArray[np.float64]
GROUPS = {
    "all": tuple(CATEGORIES),
    **{
        kind: tuple(name for name, of in CATEGORIES.items() if of == kind)
        for kind in ("perception", "cognition")
    },
    **{name: (name,) for name in CATEGORIES},
}
PAGE = Path(__file__).resolve().parents[1] / "docs" / "multimodal.md"
START, END = "<!-- table -->", "<!-- end of table -->"
FIRST = {"uniform": "", "image first": "image", "text first": "text"}
WAYS: dict[str, dict[str, Any]] = {
    "drop": {},
    "stand-ins": {"compensate": True},
    "expanded": {"expand": "own_device"},
}


class Judge:
    """What the model answers under one policy, and whose assignments were dropped.

    Attributes:
        right: [conversations, categories] right answers.
        loss: likewise, sums in nats.
        asked: likewise, questions.
        layers: per batch, the statistics of every layer.
        dropped: modality -> layer -> [2] dropped assignments and all.
    """

    def __init__(self) -> None:
        self.right: list[Floats] = []
        self.loss: list[Floats] = []
        self.asked: list[Floats] = []
        self.layers: list[list[LayerStats]] = []
        self.dropped: dict[str, dict[str, Floats]] = {"image": {}, "text": {}}

    def run(self, model: Any, pace: Any, batches: Sequence[Conversations]) -> None:
        for batch in batches:
            rows = batch.given["attention_mask"].flatten().bool()
            image = batch.given["mm_token_type_ids"].flatten().bool()
            of = {"image": rows & image, "text": rows & ~image}

            def count(layer: str, inputs: Any, out: Any, of: dict[str, Tensor] = of) -> None:
                lost, k = out.dropped_slots, inputs.topk_ids.shape[1]
                for modality, members in of.items():
                    here = self.dropped[modality].setdefault(layer, np.zeros(2))
                    here += (float(lost[members].sum()), float(members.sum()) * k)

            pace.reset_stats()
            undo = pace.watch(count)
            with torch.inference_mode():
                loss, right, category, _ = answers(model, batch)
            undo()
            row = (batch.labels != IGNORED).nonzero()[:, 0]
            cell = row * len(CATEGORIES) + category
            shape = (len(batch.labels), len(CATEGORIES))
            size = shape[0] * shape[1]
            for into, values in (
                (self.right, right.double()),
                (self.loss, loss.double()),
                (self.asked, torch.ones_like(loss).double()),
            ):
                into.append(torch.bincount(cell, values, minlength=size).reshape(shape).numpy())
            self.layers.append(pace.stats().layers)


def paired(base: Judge, other: Judge, what: str, group: str) -> dict[str, float]:
    """Change of a mean over questions, and its standard error over conversations.

    Questions about one picture are no independent ones: a conversation is what is drawn.
    """
    columns = [list(CATEGORIES).index(name) for name in GROUPS[group]]

    def summed(parts: list[Floats]) -> Floats:
        total: Floats = np.concatenate(parts)[:, columns].sum(1)
        return total

    asked = summed(base.asked)
    difference = summed(getattr(other, what)) - summed(getattr(base, what))
    mean = difference.sum() / asked.sum()
    spread = difference - mean * asked
    count = len(asked)
    error = float(np.sqrt((spread**2).sum() * count / (count - 1)) / asked.sum())
    return {"change": float(mean), "standard_error": error}


def level(judge: Judge, what: str, group: str) -> float:
    """Compute the mean over the questions of a group."""
    columns = [list(CATEGORIES).index(name) for name in GROUPS[group]]
    total = np.concatenate(getattr(judge, what))[:, columns].sum()
    return float(total / np.concatenate(judge.asked)[:, columns].sum())


def summary(policy: str, base: Judge, judge: Judge) -> dict[str, Any]:
    """Sum up the results of one policy."""
    layers = [layer for batch in judge.layers for layer in batch]
    figures: dict[str, Any] = {"policy": policy}
    for what, name in (("right", "accuracy"), ("loss", "loss")):
        figures[name] = {
            group: {"level": level(judge, what, group), **paired(base, judge, what, group)}
            for group in GROUPS
        }
    shares = {
        modality: {layer: float(lost / of) for layer, (lost, of) in by_layer.items()}
        for modality, by_layer in judge.dropped.items()
    }
    whole = {m: np.sum([*by_layer.values()], 0) for m, by_layer in judge.dropped.items()}
    figures["dropped"] = {
        **{
            m: {"share": float(both[0] / both[1]), "by_layer": shares[m]}
            for m, both in whole.items()
        },
        **LoadShares.of(layers).drops(),
    }
    figures["balance"] = {when: Balance.of(layers, when).to_dict() for when in ("before", "after")}
    return figures


def best_guess(batches: Sequence[Conversations]) -> dict[str, float]:
    """Share right of the most frequent answer to each category's questions."""
    labels = torch.cat([b.labels[b.labels != IGNORED] for b in batches])
    category = torch.cat([b.category[b.labels != IGNORED] for b in batches])
    hits = {
        name: (int(torch.bincount(labels[category == n]).max()), int((category == n).sum()))
        for n, name in enumerate(CATEGORIES)
    }
    return {
        group: sum(hits[n][0] for n in names) / sum(hits[n][1] for n in names)
        for group, names in GROUPS.items()
    }


def policies() -> list[tuple[dict[str, str], CapacityPolicy]]:
    """Return the policies of the study: (labels, policy)."""
    found = []
    for unit in ("device", "expert"):
        for factor in ("1", "0.5", "0.1"):
            for way, settings in WAYS.items():
                if way == "expanded" and unit == "device":
                    continue  # the paper's Table 4 is per expert
                for first, modality in FIRST.items():
                    if factor == "0.1" and (unit == "device" or way == "expanded" or modality):
                        continue  # only to see what the experts are worth
                    policy = CapacityPolicy(
                        capacity_factor=float(factor), unit=unit, drop_first=modality, **settings
                    )
                    labels = {"unit": unit, "gamma": factor, "way": way, "first": first}
                    found.append((labels, policy))
    return found


def calibration(model: Any, draw: np.random.Generator, data: Path, batches: int, rank: int) -> Any:
    """Fit stand-ins on conversations about training pictures, in four parts."""
    images, kinds = clothes(data, "train")
    given = []
    for number in range(batches):
        made = conversations(draw, images, kinds, 16, QUESTIONS).given
        ids = made.pop("input_ids")
        given.append(Batch(ids, (f"part {number % 4}",) * len(ids), made))
    return calibrate(model, None, given, rank=rank)


def study(given: argparse.Namespace, tell: Callable[[int, int, str], None]) -> dict[str, Any]:
    """Run the whole study; its results as JSON-able values."""
    warnings.simplefilter("ignore", SharedBudgetWarning)  # the conversations are nobody's
    model = load(given.model)
    found = calibration(model, np.random.default_rng(3), given.data, given.calibrate, given.rank)
    images, kinds = clothes(given.data, "t10k")
    draw = np.random.default_rng(4)
    batches = [conversations(draw, images, kinds, 16, QUESTIONS) for _ in range(given.batches)]
    tried, results = policies(), []
    with attach(model, None, given.devices, calibration=found, token_source="sequence") as pace:
        base = Judge()
        base.run(model, pace, batches)
        for number, (labels, policy) in enumerate(tried):
            tell(number, len(tried), str(policy))
            pace.policy = policy
            judge = Judge()
            judge.run(model, pace, batches)
            results.append({**labels, **summary(str(policy), base, judge)})
    tokens = [int(b.given["attention_mask"].sum()) for b in batches]
    pictured = [int(b.given["mm_token_type_ids"].sum()) for b in batches]
    return {
        "schema": "paceline-multimodal/1",
        "devices": given.devices,
        "conversations": sum(len(b.labels) for b in batches),
        "questions": sum(int((b.labels != IGNORED).sum()) for b in batches),
        "tokens_a_batch": float(np.mean(tokens)),
        "image_share": sum(pictured) / sum(tokens),
        "calibrated_on": dict(zip(found.texts, found.tokens, strict=True)),
        "explained_held_out": [layer.explained for layer in found.layers],
        "rank": given.rank,
        "best_guess": best_guess(batches),
        "base": summary("no cap", base, base),
        "results": results,
        **system_info(),
    }


def table(data: dict[str, Any]) -> str:
    """Write the Markdown table: the shape of the paper's Table 4 beside its Figures 10 and 11."""
    base = data["base"]
    peak = base["balance"]["before"]["device_peak_to_mean"]
    head = ["unit", "gamma", "way", "first", "perception", "cognition", "change, points", "loss",
            "image dropped",
            "text dropped", "busiest device"]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    guess = [f"{data['best_guess'][g]:.1%}" for g in ("perception", "cognition")]
    lines.append(f"| best guess | | | | {' | '.join(guess)} | | | | | |")
    levels = [f"{base['accuracy'][g]['level']:.1%}" for g in ("perception", "cognition")]
    lines.append(f"| no cap | | | | {' | '.join(levels)} | | | 0% | 0% | {peak:.2f} |")
    for r in data["results"]:
        change = r["accuracy"]["all"]
        cells = [r["unit"], r["gamma"], r["way"], r["first"]]
        cells += [f"{r['accuracy'][g]['level']:.1%}" for g in ("perception", "cognition")]
        cells.append(f"{100 * change['change']:+.1f} ± {100 * change['standard_error']:.1f}")
        loss = r["loss"]["all"]
        cells.append(f"{loss['change']:+.3f} ± {loss['standard_error']:.3f}")
        cells += [f"{r['dropped'][m]['share']:.1%}" for m in ("image", "text")]
        cells.append(f"{r['balance']['after']['device_peak_to_mean']:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("research/models/pictures"))
    parser.add_argument("--data", type=Path, default=Path(".picture-data"))
    parser.add_argument("--out", type=Path, help="file for the result")
    parser.add_argument("--page", type=Path, help="a result to write into the docs instead")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--calibrate", type=int, default=16, help="batches to calibrate on")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    given = parser.parse_args()
    if given.page is not None:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
        made = table(json.loads(given.page.read_text(encoding="utf-8")))
        write_text(
            PAGE, f"{before}{START}\n\n{made}\n\n{END}{rest.partition(END)[2]}", private=False
        )
        return
    if given.out is None:
        parser.error("--out or --page is needed.")
    with progress() as tell:
        data = study(given, tell)
    write_text(given.out, to_json(data), private=False)
    print(table(data))


if __name__ == "__main__":
    main()
