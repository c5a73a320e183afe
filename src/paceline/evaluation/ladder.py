"""Ladder of bounds on the busiest device, for `paceline tune`.

Stand-ins and a placement are fitted to one part of the texts, factors by layer are chosen on
another, and every rung is judged on a third, so that nothing is judged on what chose it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from paceline.analysis.cost import LayerShape, layer_cost
from paceline.analysis.expert_map import ExpertMap
from paceline.analysis.hardware import Hardware
from paceline.batches import Sampling, make_batches
from paceline.evaluation.layer_factors import Sensitivity, measure_layers
from paceline.evaluation.perplexity import PolicyRun, change, changed_tokens, run_all
from paceline.evaluation.results import Form, Made, SubjectFacts
from paceline.evaluation.subject import BASELINE, STATE, Store, Subject
from paceline.evaluation.sweep_results import CostByText
from paceline.placement import ExpertPlacement
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.progress import Progress
from paceline.settings import PoliciesLike, read_placement
from paceline.text import percent, signed_percent, times

SCHEMA = "paceline-ladder/1"
BOUNDS = (2.0, 1.5, 1.25, 1.0, 0.75, 0.5)
"""Rungs: the mean over layers of the capacity factor per device."""
FACTORS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.3, 1.7, 2.2)
"""Factors at which each layer is measured; those between are interpolated."""
SHARES = {"fit": 0.6, "choose": 0.15, "judge": 0.25}
"""Part of every text that each purpose gets, in this order."""
SURE = 1.645
"""Standard errors above a change that it stays below with a confidence of 95%."""
_LITTLE = 1.02  # a gain below this pays for nothing


class Rung(CostByText):
    """One bound, and what it costs on text that took no part in choosing its factors.

    Attributes:
        bound: mean capacity factor over layers.
        policies: of the layers, in their short form.
        at_most: change of perplexity that it stays below with a confidence of 95%; None with too
            few sequences for a standard error.
        speedup: of the MoE layers by the cost model, without the work of stand-ins; None without
            hardware.
    """

    bound: float
    policies: list[str]
    at_most: float | None
    speedup: float | None

    @property
    def gain(self) -> float:
        """Speed-up, or 1 / busiest device where no hardware is known."""
        return 1 / self.device_peak_to_mean if self.speedup is None else self.speedup


class DecodeRung(Rung):
    """One value of max_active, its `bound`, and what it costs in decode steps.

    Attributes:
        experts_read: that the device with the most reads per step, mean over steps and layers;
            `speedup` is the same number without max_active / this one, a bound.
    """

    experts_read: float


class DecodeLadder(Form):
    """Values of max_active, from the loosest to the tightest.

    Attributes:
        tokens: that were decoded, of the part to judge on.
        sequences: that decode together.
        hosted: experts of a device, at most.
        experts_read: without max_active.
        chosen: value that the plan holds, None: none.
        together: cost of the choice after prompts under the plan's cap, None without one.
        verdict: sentences.
    """

    tokens: int
    sequences: int
    hosted: int
    experts_read: float
    rungs: list[DecodeRung]
    chosen: int | None
    together: CostByText | None
    verdict: list[str]


class Ladder(Made):
    """Content of ladder.json.

    Attributes:
        split: text -> purpose -> its first character and the one behind its last.
        tokens: purpose -> tokens that were run.
        hardware: of the speed-ups, None without.
        loss: greatest change of perplexity that was allowed, None if it was left open.
        in_order: busiest device without a policy and with the experts in order.
        chosen: bound of the rung that the plan holds, None: none.
        verdict: sentences.
        decode: of max_active, where it was asked for.
    """

    subject: SubjectFacts
    split: dict[str, dict[str, tuple[int, int]]]
    tokens: dict[str, int]
    batch_size: int
    sequence_length: int
    hardware: str | None
    loss: float | None
    baseline: CostByText
    in_order: float
    rungs: list[Rung]
    chosen: float | None
    verdict: list[str]
    decode: DecodeLadder | None = None


AnyRung = TypeVar("AnyRung", bound=Rung)


@dataclass(frozen=True)
class Machine:
    """Devices that the cost model times a ladder on."""

    hardware: Hardware
    shape: LayerShape


def split_texts(
    texts: Mapping[str, str],
) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, tuple[int, int]]]]:
    """Split every text into the parts of `SHARES`, at white space.

    Returns:
        Purpose -> text -> part, and text -> purpose -> its first character and the one behind its
        last.

    >>> parts, spans = split_texts({"a": "one two three four five six seven"})
    >>> parts["choose"]["a"], spans["a"]["choose"]
    (' five', (18, 23))
    """
    parts: dict[str, dict[str, str]] = {purpose: {} for purpose in SHARES}
    spans: dict[str, dict[str, tuple[int, int]]] = {name: {} for name in texts}
    for name, text in texts.items():
        start, share = 0, 0.0
        for purpose, own in SHARES.items():
            share += own
            end = len(text) if purpose == "judge" else _white_space(text, round(share * len(text)))
            parts[purpose][name], spans[name][purpose] = text[start:end], (start, end)
            start = end
    return parts, spans


def _white_space(text: str, near: int) -> int:
    """Return the last white space at or before a character, or the character itself."""
    last = min(near, len(text) - 1)
    return next((at for at in range(last, max(0, last - 1000), -1) if text[at].isspace()), near)


def measure_rungs(
    subject: Subject, texts: Mapping[str, str], sampling: Sampling, base: CapacityPolicy,
    out: Path | None = None, progress: Progress | None = None,
) -> Sensitivity:  # fmt: skip
    """Measure what a cap of each layer alone costs, for factors of any rung.

    Args:
        subject: its policies are not read.
        texts: the part to choose on.
        base: of every layer, with another factor each; its own is not read.
        out: folder from which a run that was killed goes on.
    """
    base = base.replace(capacity_factor=BOUNDS[0])
    return measure_layers(
        subject.model, subject.tokenizer, texts, base, plan=subject.plan,
        calibration=subject.calibration, sampling=sampling, factors=FACTORS, progress=progress,
        store=store_in(out), fingerprint=subject.fingerprint(),
    )  # fmt: skip


def judge_rungs(
    subject: Subject,
    texts: Mapping[str, str],
    sampling: Sampling,
    machine: Machine | None,
    out: Path | None = None,
    progress: Progress | None = None,
) -> tuple[CostByText, float, list[Rung], int]:
    """Judge rungs against no policy, in batches of one text each.

    Args:
        subject: with a policy per layer for each bound, by `named`.
        texts: the part to judge on.
        machine: to time the rungs on; None: no speed-ups.
        out: folder from which a run that was killed goes on.

    Returns:
        The cost of no policy, its busiest device with the experts in order, the rungs, and the
        tokens that were run.
    """
    batches, tokens = make_batches(subject.tokenizer, texts, sampling)
    runs = run_all(subject, {"one_text": batches}, store_in(out), progress)["one_text"]
    base = runs[BASELINE]
    before = None if machine is None else _seconds(base, subject.plan, machine)
    rungs = []
    for name, policies in subject.policies.items():
        if name == BASELINE:
            continue
        seconds = None if machine is None else _seconds(runs[name], subject.plan, machine)
        speedup = None if before is None or not seconds else before / seconds
        rungs.append(
            rung_of(
                Rung,
                cost_of(base, runs[name]),
                bound=float(name),
                policies=_texts(policies),
                speedup=speedup,
            )
        )
    return cost_of(base, base), _in_order(base, subject.plan), rungs, sum(tokens.values())


def named(bound: float) -> str:
    """Write a bound as the name of its rung.

    >>> named(1.0), named(0.75)
    ('1', '0.75')
    """
    return f"{bound:g}"


def rung_of(kind: type[AnyRung], cost: CostByText, **values: Any) -> AnyRung:
    """Make a rung of what it cost and its other attributes."""
    error = cost.standard_error
    at_most = None if error is None else cost.change + SURE * error
    return kind(**cost.to_dict(), at_most=at_most, **values)


def store_in(out: Path | None) -> Store:
    """Return the results kept in a folder, from which a run that was killed goes on."""
    return Store(None if out is None else out / STATE)


def _texts(policies: PoliciesLike) -> list[str]:
    own = [policies] if isinstance(policies, CapacityPolicy) else policies or ()
    return [str(policy) for policy in own]


def cost_of(base: PolicyRun, run: PolicyRun) -> CostByText:
    """Return what a run costs beside one without a policy."""
    found, shares = change(base.losses, run.losses), run.shares()
    return CostByText(
        change=found.mean,
        standard_error=found.standard_error,
        by_text=found.by_domain,
        changed_next_tokens=changed_tokens(base.greedy, run.greedy),
        dropped_share=shares.dropped_share,
        device_peak_to_mean=shares.device_peak_to_mean,
    )


def _in_order(run: PolicyRun, plan: Plan) -> float:
    """Return the busiest device / mean of a run without a policy, were the experts in order."""
    busiest = mean = 0.0
    for number, layers in enumerate(zip(*run.layers, strict=True)):
        for layer in layers:
            loads = np.array(layer.expert_loads_after)
            place = read_placement(plan.placement_of(number), len(loads), f"layer {number}")
            devices = len(loads) if place is None else place.num_devices
            home = ExpertPlacement.contiguous(len(loads), devices).expert_to_device
            each = np.bincount(home, loads, minlength=devices)
            busiest, mean = busiest + each.max(), mean + each.mean()
    return busiest / mean if mean else 1.0


def _seconds(run: PolicyRun, plan: Plan, machine: Machine) -> float:
    """Add up the modelled seconds of all MoE layers and batches."""
    total = 0.0
    for number, layers in enumerate(zip(*run.layers, strict=True)):
        loads = [layer.expert_loads_after for layer in layers]
        place = read_placement(plan.placement_of(number), len(loads[0]), f"layer {number}")
        layer = ExpertMap.of_placement(place or ExpertPlacement.per_expert(len(loads[0])))
        tokens = [each.assignments / machine.shape.k for each in layers]
        total += float(
            layer_cost(loads, tokens, layer, machine.shape, machine.hardware).total.sum()
        )
    return total


# -- choice ----------------------------------------------------------------------------------------


UNTRAINED = (
    "Nothing is chosen: the model looks untrained, as all its normalisation weights are constants, "
    "and what a cap costs it says nothing about a trained one."
)


def gains_of(baseline: CostByText, rungs: Sequence[Rung]) -> list[float]:
    """Return what each rung gains beside no policy, as a share."""
    loosest = 1 / baseline.device_peak_to_mean if rungs[0].speedup is None else 1.0
    return [rung.gain / loosest - 1 for rung in rungs]


def choose_rung(
    rungs: Sequence[AnyRung], gains: Sequence[float], loss: float | None, balanced: str
) -> tuple[AnyRung | None, str]:
    """Choose a rung, or none.

    Args:
        rungs: from the loosest to the tightest.
        gains: of each rung, as a share.
        loss: greatest change of perplexity, to be kept with a confidence of 95%; None: the knee,
            where the gain up to there is greatest beside what is lost, both as shares of those of
            the tightest rung.
        balanced: what there is without a policy, for the reason why nothing pays.

    Returns:
        The rung, and the reason in a sentence.
    """
    paying = [rung for rung, gain in zip(rungs, gains, strict=True) if gain >= _LITTLE - 1]
    if not paying:
        return None, (f"Nothing pays: {balanced}, and no rung gains {percent(_LITTLE - 1, 0)}.")
    if loss is not None:
        sure = [rung for rung in paying if rung.at_most is not None and rung.at_most < loss]
        if sure:
            best = min(sure, key=lambda rung: rung.bound)
            return (
                best,
                f"It is the tightest rung that loses less than {100 * loss:g}% for sure.",
            )
        return None, _unsure(paying, loss)
    losses = np.array([max(rung.change, 0.0) for rung in rungs])
    worth = np.array(gains) / max(*gains, 1e-12) - losses / max(losses.max(), 1e-12)
    best = rungs[int(worth.argmax())]
    if best not in paying or worth.max() <= 0:
        return None, "Nothing pays: every rung loses more than it gains, beside the tightest one."
    return best, "It is the knee: tighter rungs lose more for what they gain."


def _unsure(rungs: Sequence[Rung], loss: float) -> str:
    """Say whether every rung loses too much, or the texts can't tell."""
    near = min(rungs, key=lambda rung: rung.change)
    if near.change >= loss or near.standard_error is None:
        return (
            f"Nothing is chosen: the rung that costs least, {named(near.bound)}, costs "
            f"{signed_percent(near.change)}, and {100 * loss:g}% was allowed."
        )
    more = (SURE * near.standard_error / (loss - near.change)) ** 2
    return (
        f"Too little text to tell: rung {named(near.bound)} costs {signed_percent(near.change)} ± "
        f"{percent(near.standard_error, 2)}; about {more:.1f} times the text to judge on would "
        f"show if that is below {100 * loss:g}%."
    )


def ladder_verdict(ladder: Ladder, chosen: Rung | None, reason: str) -> list[str]:
    """Sum a ladder up in three sentences, or the reason why no rung was chosen."""
    lines = [reason]
    if ladder.hardware is not None:
        tokens_of_batch = ladder.batch_size * ladder.sequence_length
        lines.append(
            f"Times are modelled for {ladder.hardware} x {ladder.subject.devices} and batches of "
            f"{tokens_of_batch:,} tokens."
        )
    tokens = f"{ladder.tokens['judge']:,} tokens"
    if chosen is not None:
        placed = ladder.baseline.device_peak_to_mean
        before = times(placed)
        if ladder.in_order > placed * _LITTLE:
            before = f"{times(ladder.in_order)} (in order; {before} placed)"
        after = times(chosen.device_peak_to_mean)
        error = "" if chosen.standard_error is None else f" ± {percent(chosen.standard_error, 2)}"
        lines = [
            f"Rung {named(chosen.bound)}: busiest device {before} to {after} the mean, perplexity "
            f"{signed_percent(chosen.change)}{error} on {tokens} that took no part in it.",
            f"{reason[:-1]}; {_saved(ladder, chosen)}.",
        ]
        name, most = max(chosen.by_text.items(), key=lambda item: item[1])
        if len(chosen.by_text) > 1:
            lines.append(f"{name} loses most, {signed_percent(most)}.")
    return lines


def _saved(ladder: Ladder, chosen: Rung) -> str:
    if chosen.speedup is not None:
        return f"the MoE layers are {times(chosen.speedup)} as fast on {ladder.hardware} (modelled)"
    bound = ladder.baseline.device_peak_to_mean / chosen.device_peak_to_mean
    return f"by the loads the experts are at most {times(bound)} as fast"
