"""Device prices: tokens choose the k experts of highest score minus price of the expert's device.

    python research/device_prices.py --out research/results/device_prices.json

Prices move load away from busy devices before anything is dropped: BIP-based and loss-free
balancing of trained routers, applied to one that was trained without. Two kinds of prices: those
that balance the batch before of the same text (`past`, what a server could have), and those that
balance the very batch (`present`, more than a server could know). With and without a cap behind
them, and stand-ins for what it drops, beside the cap alone. The second sequences of each held-out
text are judged, in batches of 4,096 tokens of one text, 8 devices; the first teach past prices.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs, attach, route
from paceline.batches import Batch, separate
from paceline.cli.output import progress
from paceline.demo.assets import held_out, load_calibration, load_model
from paceline.demo.settings import DEVICES
from paceline.evaluation.perplexity import Losses, batch_losses, change
from paceline.facts import Facts
from paceline.files import to_json, write_text
from paceline.stand_ins.calibration_file import LayerCalibration
from paceline.stand_ins.compensation import Compensation
from paceline.system_info import system_info

STEPS, FIRST = 200, 0.02  # of the search for prices; the first step, a share of the scores' mean


@dataclass(frozen=True)
class Way:
    """How a layer is run: which prices, whether a cap follows, and what it leaves."""

    prices: str
    cap: bool
    stand_ins: bool

    def __str__(self) -> str:
        said = ["no prices" if self.prices == "none" else f"{self.prices} prices"]
        return ", ".join([*said, *["cap"] * self.cap, *["stand-ins"] * self.stand_ins])


WAYS = (
    Way("none", True, False), Way("none", True, True), Way("past", False, False),
    Way("past", True, False), Way("past", True, True), Way("present", False, False),
    Way("present", True, False), Way("present", True, True),
)  # fmt: skip


def loads_of(ids: Tensor, device: Tensor) -> Tensor:
    """Count the assignments of each device, [devices], of [tokens, k] experts."""
    return torch.bincount(device[ids.flatten()], minlength=DEVICES)


def balancing(scores: Tensor, k: int, device: Tensor, bound: float) -> Tensor:
    """Find prices, [devices], under which no device has more than bound x mean, approximately.

    Subgradient steps of falling size on the dual of the assignment problem.
    """
    prices, best, least = torch.zeros(DEVICES), torch.zeros(DEVICES), float("inf")
    mean = len(scores) * k / DEVICES
    for step in range(STEPS):
        ids = (scores - prices[device]).topk(k, dim=1).indices
        over = loads_of(ids, device) / mean
        if float(over.max()) < least:
            best, least = prices.clone(), float(over.max())
        if least <= max(1.0, bound):
            break
        prices += FIRST * float(scores.mean()) * 32 / (1 + step / 10) * (over - 1)
    return best


class Layers:
    """Runs every layer in one of the ways, and counts what its devices got."""

    def __init__(self, model: Any, calibration: Any) -> None:
        self.stand_ins = {
            layer.name: Compensation(layer, None, torch.empty(0)) for layer in calibration.layers
        }
        self.known: dict[str, LayerCalibration] = {x.name: x for x in calibration.layers}
        self.past: dict[tuple[str, float], Tensor] = {}
        self.scores: Tensor = torch.empty(0)
        self.way, self.bound = Way("none", False, False), 1.0
        self.peaks: list[float] = []
        self.moved: list[float] = []
        self.dropped: list[float] = []

    def see(self, _: str, inputs: Any, __: Any) -> None:
        """Choose the experts before they run."""
        self.scores = inputs.scores

    def run(self, name: str, run: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Run the experts of a layer with prices."""
        count = self.scores.shape[1]
        placement = ExpertPlacement.contiguous(count, DEVICES)
        device = torch.tensor(placement.expert_to_device)
        prices = torch.zeros(DEVICES)
        if self.way.prices == "past":
            prices = self.past[name, self.bound]
        elif self.way.prices == "present":
            prices = balancing(self.scores, ids.shape[1], device, self.bound)
            if self.way == Way("present", False, False):
                self.past[name, self.bound] = prices
        if self.way.prices != "none":
            # as the model weighs its own choice: scores, not renormalised
            chosen = (self.scores - prices[device]).topk(ids.shape[1], dim=1).indices
            own = (chosen.unsqueeze(2) == ids.unsqueeze(1)).any(2)
            self.moved.append(1 - float(own.float().mean()))
            ids, weights = chosen, self.scores.gather(1, chosen).to(weights.dtype)
        loads = loads_of(ids, device)
        if self.way.cap:
            policy = CapacityPolicy(capacity_factor=self.bound, min_expert_load=0)
            found = route(RoutingInputs(ids, weights, scores=self.scores), policy, placement)
            out: Tensor = run(hidden, found.topk_ids, found.topk_weights)
            if self.way.stand_ins:
                out = self.stand_ins[name](out, hidden, ids, weights, found.dropped_slots)
            loads = loads_of(found.topk_ids[found.kept], device)
            self.dropped.append(float(found.dropped_slots.float().mean()))
        else:
            out = run(hidden, ids, weights)
        self.peaks.append(float(loads.max()) * DEVICES / ids.numel())
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=16, help="of 256 tokens, judged, a text")
    parser.add_argument("--bounds", type=float, nargs="+", default=[1.25, 1.0, 0.75])
    given = parser.parse_args()
    model, tokenizer = load_model()
    parts = held_out(tokenizer, 256, 2 * given.sequences)
    before = separate([type(p)(p.source, p.ids[: given.sequences]) for p in parts], 16)
    judged = separate([type(p)(p.source, p.ids[given.sequences :]) for p in parts], 16)
    calibration = load_calibration()
    layers, base = Layers(model, calibration), Losses()
    Counts = tuple[Losses, list[float], list[float], list[float]]
    found: dict[tuple[float, Way], Counts] = {
        (bound, way): (Losses(), [], [], []) for bound in given.bounds for way in WAYS
    }
    total, done = len(judged) * (1 + len(given.bounds) * (1 + len(WAYS))), 0
    with attach(model, None, DEVICES) as pace, progress() as tell:

        def run(batch: Batch, bound: float, way: Way) -> list[float]:
            nonlocal done
            layers.way, layers.bound = way, bound
            layers.peaks, layers.moved, layers.dropped = [], [], []
            losses = batch_losses(model, batch)
            done += 1
            tell(done, total, "forwards")
            return losses

        for past, batch in zip(before, judged, strict=True):
            base.add(batch, batch_losses(model, batch))
            end = pace.watch(layers.see, Facts(scores=True))
            undo = pace.replace_experts(layers.run)
            for bound in given.bounds:
                run(past, bound, Way("present", False, False))
                prices = dict(layers.past)
                for way in WAYS:
                    losses, *counts = found[bound, way]
                    losses.add(batch, run(batch, bound, way))
                    for kept, new in zip(
                        counts, (layers.peaks, layers.moved, layers.dropped), strict=True
                    ):
                        kept += new
                    layers.past = dict(prices)
            undo()
            end()

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else 0.0

    rows = []
    for (bound, way), (losses, peaks, moved, dropped) in found.items():
        after = change(base, losses)
        beside = change(found[bound, Way("none", True, way.stand_ins)][0], losses)
        rows.append({
            "bound": bound, "way": str(way), "perplexity_change": after.to_dict(),
            "beside_cap": beside.to_dict(), "busiest_device": mean(peaks),
            "chosen_otherwise": mean(moved), "dropped_share": mean(dropped),
        })  # fmt: skip
        print(
            f"{bound} {way}: {100 * after.mean:+.3f}%, busiest {mean(peaks):.3f}, otherwise "
            f"{mean(moved):.1%}, dropped {mean(dropped):.1%}",
            flush=True,
        )
    data = {
        "schema": "paceline-device-prices/1",
        "model": "demo",
        "devices": DEVICES,
        "judged_tokens": sum(batch.ids.numel() for batch in judged),
        "tokens_a_batch": judged[0].ids.numel(),
        "rows": rows,
        **system_info(),
    }
    write_text(given.out, to_json(data), private=False)


if __name__ == "__main__":
    main()
