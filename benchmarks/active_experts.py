"""Fewer active experts in decode: their cost in quality on the demo model.

Teacher-forced decode: one position of B sequences of held-out text is one step, routed as a decode
step is, so that a pass over whole sequences judges all of their steps; the prompt's positions are
left alone. Stand-ins and the searched placement are those that come with the package, fitted on
training text; judged on the second half of each held-out text. It is checked that a real decode
with the attached model, token by token through its cache, gives the same losses.

    python benchmarks/active_experts.py --json benchmarks/results/active_experts.json
    python benchmarks/active_experts.py --json benchmarks/results/active_experts.json --ship
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from decode_steps import Chosen, Rule, Step, at_most, by_layer, by_weight
from torch import Tensor

from paceline import attach
from paceline.batches import Batch
from paceline.cli.output import progress
from paceline.demo.assets import domains, load_calibration, load_model, read_text
from paceline.evaluation.perplexity import Losses, change
from paceline.files import to_json, write_text
from paceline.shipped import DECODE_FILE
from paceline.stand_ins.calibration_file import Calibration
from paceline.stand_ins.compensation import Compensation
from paceline.system_info import system_info

DEVICES = 8


@dataclass
class Counts:
    """Counts of the experts that the decode steps of one rule read, over steps and layers."""

    steps: int = 0
    most: dict[str, int] = field(default_factory=lambda: {"before": 0, "after": 0})
    total: dict[str, int] = field(default_factory=lambda: {"before": 0, "after": 0})
    new: int = 0  # read in a step and not in the last one
    tokens: int = 0
    without: int = 0
    assignments: int = 0
    dropped: int = 0

    def result(self) -> dict[str, float]:
        """Return means over steps and layers, and shares."""
        return {
            **{f"most_active_{when}": self.most[when] / self.steps for when in self.most},
            **{f"active_{when}": self.total[when] / self.steps for when in self.total},
            "newly_read": self.new / self.steps,
            "dropped_share": self.dropped / self.assignments,
            "tokens_without_expert_share": self.without / self.tokens,
        }


class Judge:
    """Judge of sequences that run through the model with a rule in its decode steps."""

    def __init__(self, model: Any, found: Calibration, batch: int, prompt: int) -> None:
        self.model, self.found, self.batch, self.prompt = model, found, batch, prompt
        self.logits: dict[str, Tensor] = {}

    @contextmanager
    def ruled(
        self, rule: Rule | None, stand_ins: bool, placed: bool, length: int
    ) -> Iterator[Counts]:
        """Apply `rule` to forwards of [sequences, length] inside the block."""
        counts, hooks = Counts(), []
        with attach(self.model, None, DEVICES) as pace:
            for layer in pace.layers:
                block = self.model.get_submodule(layer)

                def heard(_: Any, __: Any, out: Any, layer: str = layer) -> None:
                    self.logits[layer] = out[0]

                hooks.append(block.gate.register_forward_hook(heard))
            compensations = {
                layer: Compensation(found, None, torch.zeros(0))
                for layer, found in zip(pace.layers, self.found.layers, strict=True)
            }
            orders = {
                layer: torch.tensor(found.placement).argsort(stable=True)
                if placed
                else torch.arange(len(found.experts))
                for layer, found in zip(pace.layers, self.found.layers, strict=True)
            }
            explained = {
                layer: found.output_norm * (1 - found.explained_by_expert.clamp(0, 1)).sqrt()
                if stand_ins
                else found.output_norm
                for layer, found in zip(pace.layers, self.found.layers, strict=True)
            }

            def experts(layer: str, run: Any, hidden: Tensor, ids: Tensor, w: Tensor) -> Tensor:
                if rule is None:
                    unchanged: Tensor = run(hidden, ids, w)
                    return unchanged
                scores = self.logits[layer].float().softmax(1)
                known = (orders[layer], explained[layer])
                step, order = self.steps(ids, w, scores, known, length)
                step.layer = pace.layers.index(layer)
                chosen = rule(step)
                self.count(counts, step, chosen)
                new_ids, new_weights = ids.clone(), w.clone()
                k = ids.shape[1]
                new_ids[order] = chosen.ids.reshape(-1, k)
                new_weights[order] = chosen.weights.reshape(-1, k).to(w.dtype)
                out: Tensor = run(hidden, new_ids, new_weights)
                if stand_ins and chosen.dropped.numel():
                    dropped = torch.zeros_like(ids, dtype=torch.bool)
                    dropped[order] = chosen.dropped.reshape(-1, k)
                    out = compensations[layer](out, hidden, ids, w, dropped)
                return out

            undo = pace.replace_experts(experts)
            try:
                yield counts
            finally:
                undo()
                for hook in hooks:
                    hook.remove()

    def steps(
        self,
        ids: Tensor,
        weights: Tensor,
        scores: Tensor,
        known: tuple[Tensor, Tensor],
        length: int,
    ) -> tuple[Step, Tensor]:
        """Cut the decode steps out of rows [sequences * length]; also their rows, in order."""
        rows = torch.arange(len(ids)).view(-1, self.batch, length)[:, :, self.prompt :]
        rows = rows.transpose(1, 2)  # [groups, positions, batch]
        positions = rows.shape[1]
        order = rows.flatten()

        def cut(x: Tensor) -> Tensor:
            return x[order].view(-1, self.batch, x.shape[1])

        assert bool((weights[:, 1:] <= weights[:, :-1]).all())  # the best first
        return Step(cut(ids), cut(weights), cut(scores), DEVICES, *known, positions), order

    def count(self, counts: Counts, step: Step, chosen: Chosen) -> None:
        """Add up the experts that the steps read."""
        active = {"before": _active(step.ids, step), "after": _active(chosen.ids, step)}
        for when, table in active.items():
            counts.most[when] += int(step.most_of_a_device(table).sum())
            counts.total[when] += int(table.sum())
        after = active["after"].view(-1, step.sequences, step.experts)
        counts.new += int((after[:, 1:] & ~after[:, :-1]).sum())
        counts.steps += len(step.ids)
        counts.tokens += step.ids.shape[0] * step.ids.shape[1]
        kept = chosen.ids < step.experts
        counts.without += int((~kept.any(2)).sum())
        counts.assignments += step.ids.numel()
        counts.dropped += int(step.ids.numel() - kept.sum())

    def losses(
        self,
        batches: list[Batch],
        rule: Rule | None,
        stand_ins: bool = False,
        placed: bool = False,
    ) -> tuple[Losses, Counts]:
        """Compute the losses of the decode steps' predictions, by text."""
        found = Losses()
        length = batches[0].ids.shape[1] - 1
        with self.ruled(rule, stand_ins, placed, length) as counts, torch.inference_mode():
            for batch in batches:
                logits = self.model(input_ids=batch.ids[:, :-1], use_cache=False).logits
                judged = Batch(batch.ids[:, self.prompt :], batch.sources)
                found.add(judged, self.row_losses(logits, batch.ids))
        return found, counts

    def row_losses(self, logits: Tensor, ids: Tensor) -> list[float]:
        """Sum the loss of each row from the prompt's end on."""
        kept, targets = logits[:, self.prompt :], ids[:, self.prompt + 1 :]
        loss = torch.nn.functional.cross_entropy(
            kept.transpose(1, 2).float(), targets, reduction="none"
        )
        return loss.double().sum(1).tolist()


def _active(ids: Tensor, step: Step) -> Tensor:
    """Mark the experts that any token uses, [steps, experts] bool."""
    table = torch.zeros(len(ids), step.experts + 1, dtype=torch.bool)
    return table.scatter(1, ids.flatten(1), True)[:, :-1]


# -- trials ----------------------------------------------------------------------------------------

Trial = tuple[str, dict[str, Any], Rule, bool]
"""Family, its setting, the rule, and True with stand-ins."""

PLACED = "max_active, placed"
"""Experts placed by the calibration, so that a step needs fewer of each device."""

GOAL = {4: 2, 16: 3}
"""Batch size -> experts per device, of 4, that cut about a third and a quarter of what is read."""
MIXED_LAYERS = {16: ((3, 2, 3, 3), (3, 2, 2, 3))}
"""Experts per device by layer, fewer where that cost least on the other halves of the texts."""

ONE_DEVICE = {4: (9, 6, 4), 16: (21, 16, 10)}
"""Experts of all 32 on a single device, about as many as the published ways read in all."""


def trials(batch: int, kind: str) -> Iterator[Trial]:
    """Iterate over Paceline's rule in all its settings, alike for both kinds of batches."""
    for most in (3, 2, 1):
        for stand_ins in (False, True):
            yield "max_active", {"most": most}, at_most(by_weight, most), stand_ins
        yield PLACED, {"most": most}, at_most(by_weight, most), True
    for layers in MIXED_LAYERS.get(batch, ()):
        yield PLACED, {"most": list(layers)}, by_layer(layers), True
    for most in ONE_DEVICE[batch]:
        for stand_ins in (False, True):
            rule = at_most(by_weight, most, devices=1)
            yield "max_active, one device", {"most": most}, rule, stand_ins


def sequences(tokenizer: Any, texts: dict[str, str], count: int, length: int) -> dict[str, Tensor]:
    """Cut each text into [count, length] token ids."""
    cut = {}
    for name, text in texts.items():
        ids = torch.tensor(tokenizer(text)["input_ids"])[: count * length]
        if len(ids) < count * length:
            raise SystemExit(f"{name} has too few tokens: give fewer --sequences.")
        cut[name] = ids.view(count, length)
    return cut


def batches_of(texts: dict[str, Tensor], kind: str, batch: int) -> list[Batch]:
    """Gather sequences to run at once; `batch` neighbours decode together."""
    names = list(texts)
    if kind == "one domain":
        return [Batch(ids, (name,) * len(ids)) for name, ids in texts.items()]
    rows = [(n, texts[n][i]) for i in range(len(texts[names[0]])) for n in names]
    size = len(rows) // len(names) // batch * batch
    parts = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
    return [Batch(torch.stack([r for _, r in p]), tuple(n for n, _ in p)) for p in parts]


def real_decode(model: Any, found: Calibration, batch: Batch, prompt: int, policy: str) -> Tensor:
    """Decode token by token with the attached model's own cap: [rows] losses."""
    total = torch.zeros(len(batch.ids), dtype=torch.float64)
    ids = batch.ids
    with attach(model, policy, DEVICES, calibration=found) as pace, torch.inference_mode():
        pace.policy = None  # the prompt's positions are left alone, however few
        out = model(input_ids=ids[:, :prompt], use_cache=True)
        pace.policy = policy
        for t in range(prompt, ids.shape[1] - 1):
            out = model(input_ids=ids[:, t : t + 1], past_key_values=out.past_key_values)
            loss = torch.nn.functional.cross_entropy(
                out.logits[:, -1].float(), ids[:, t + 1], reduction="none"
            )
            total += loss.double()
    return total


def shipped(data: Mapping[str, Any]) -> dict[str, Any]:
    """Select what the demo page shows: max_active on batches of one domain."""
    rows = [
        row
        for row in data["results"]
        if row["family"] in ("max_active", "max_active, placed")
        and row["kind"] == "one domain"
        and isinstance(row["most"], int)
    ]
    changes = [row["perplexity_change"] for row in rows]
    return {
        **{key: data[key] for key in ("model", "devices", "rank", "prompt", "decoded")},
        "sequences_a_text": data["sequences_a_text"],
        "texts": len(changes[0]["by_domain"]),
        "experts_a_device": 4,
        "points": [
            {
                "batch": row["batch"],
                "max_active": row["most"],
                "stand_ins": row["stand_ins"],
                "placed": row["family"] != "max_active",
                "read_before": row["most_active_before"],
                "read": row["most_active_after"],
                "change": change["mean"],
                "standard_error": change["standard_error"],
            }
            for row, change in zip(rows, changes, strict=True)
        ],
    }


def main(trials: Callable[[int, str], Iterator[Trial]] = trials) -> None:
    """Judge the trials of each batch size and kind of batches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--ship",
        action="store_true",
        help="measure nothing: write the demo page's decode.json from the results",
    )
    parser.add_argument("--sequences", type=int, default=16, help="of each text")
    parser.add_argument("--length", type=int, default=64, help="tokens decoded per sequence")
    parser.add_argument("--prompt", type=int, default=32, help="tokens before them, left alone")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--families", nargs="+", help="only these, such as max_active")
    parser.add_argument("--calibration", type=Path, help="another than that of the package")
    options = parser.parse_args()
    if options.ship:
        measured = json.loads(options.json.read_text(encoding="utf-8"))
        write_text(DECODE_FILE, to_json(shipped(measured)), private=False)
        return
    torch.set_num_threads(1)
    model, tokenizer = load_model()
    found = (
        load_calibration() if options.calibration is None else Calibration.load(options.calibration)
    )
    halves = {name: read_text(name) for name in domains()}
    halves = {name: text[len(text) // 2 :] for name, text in halves.items()}
    with progress() as tell:
        length = options.prompt + options.length + 1
        texts = sequences(tokenizer, halves, options.sequences, length)
        data: dict[str, Any] = {
            "schema": "paceline-active-experts/1",
            "model": "demo",
            "devices": DEVICES,
            "rank": found.layers[0].down.shape[1],
            "sequences_a_text": options.sequences,
            "prompt": options.prompt,
            "decoded": options.length,
            "explained_held_out": [layer.explained for layer in found.layers],
            "checked": [],
            "results": [],
            **system_info(),
        }
        for batch in options.batches:
            policy = f"max_active={GOAL[batch]},compensate=true"
            some = Batch(next(iter(texts.values()))[:batch], ("",) * batch)
            judge = Judge(model, found, batch, options.prompt)
            rule = at_most(by_weight, GOAL[batch])
            judged, _ = judge.losses([some], rule, True)
            real = real_decode(model, found, some, options.prompt, policy)
            apart = (torch.tensor(judged.sums[""]) - real).abs().max().item()
            if apart > 1e-2:
                raise SystemExit(f"a real decode differs by {apart} nats per sequence")
            data["checked"].append({"policy": policy, "batch": batch, "nats_apart": apart})
        for kind in ("one domain", "mixed"):
            for batch in options.batches:
                judge = Judge(model, found, batch, options.prompt)
                run = batches_of(texts, kind, batch)
                base, _ = judge.losses(run, None)
                chosen = [
                    trial
                    for trial in trials(batch, kind)
                    if not options.families or trial[0] in options.families
                ]
                for done, (family, setting, rule, stand_ins) in enumerate(chosen):
                    tell(done, len(chosen), f"rules, {kind}, batches of {batch}")
                    start = time.perf_counter()
                    losses, counts = judge.losses(run, rule, stand_ins, family == PLACED)
                    found_change = change(base, losses).to_dict()
                    row = {"kind": kind, "batch": batch, "family": family, **setting}
                    row |= {"stand_ins": stand_ins, "perplexity_change": found_change}
                    data["results"].append(row | counts.result())
                    print(
                        kind, batch, family, setting, "stand-ins" if stand_ins else "",
                        f"{found_change['mean']:+.4%}",
                        json.dumps({k: round(v, 3) for k, v in counts.result().items()}),
                        f"{time.perf_counter() - start:.0f} s", flush=True,
                    )  # fmt: skip
                    write_text(options.json, to_json(data), private=False)


if __name__ == "__main__":
    main()
