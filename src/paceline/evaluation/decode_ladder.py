"""Ladder of `max_active` for decode steps, for `paceline tune --decode`.

What a device waits for in a decode step is the weights that it reads. Sequences are run as a server
runs them: texts mixed, the first half as prompts in one forward, then token by token through the
cache, all sequences of a batch together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from paceline.batches import Batch, Sampling, make_batches
from paceline.engines.transformers.tokens.arguments import cache_name
from paceline.evaluation.ladder import (
    DecodeLadder,
    DecodeRung,
    choose_rung,
    cost_of,
    named,
    rung_of,
)
from paceline.evaluation.perplexity import PolicyRun, run_all
from paceline.evaluation.results import LayerLoads
from paceline.evaluation.subject import BASELINE, Store, Subject
from paceline.policy import CapacityPolicy
from paceline.progress import Progress
from paceline.text import percent, signed_percent, times

_SHARES = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25)  # of a device's experts


def experts_allowed(hosted: int) -> list[int]:
    """Return the values of max_active to try on devices of so many experts.

    >>> experts_allowed(4), experts_allowed(16), experts_allowed(1)
    ([3, 2, 1], [14, 12, 10, 8, 6, 4], [])
    """
    return sorted({max(1, int(share * hosted)) for share in _SHARES} - {hosted}, reverse=True)


def judge_decode(
    subject: Subject,
    texts: Mapping[str, str],
    sampling: Sampling,
    base: CapacityPolicy,
    loss: float | None,
    capped: tuple[CapacityPolicy, ...],
    store: Store,
    progress: Progress | None = None,
) -> DecodeLadder:
    """Judge values of max_active on decode steps, and choose one as a rung is chosen.

    Args:
        subject: model, placement and calibration.
        texts: the part to judge on.
        sampling: its batches are the sequences that decode together.
        base: of every layer, without a factor.
        loss: greatest change of perplexity, to be kept with a confidence of 95%; None: the knee.
        capped: policies of the rung that was chosen for prompts; the choice is judged again with
            these.
        store: of results.

    Raises:
        ValueError: if every device has one expert, or the model keeps no cache.
    """
    cache_name(subject.model.forward)
    way = "mixed" if len(texts) > 1 else "one_text"
    drawn = replace(sampling, mix=way == "mixed")
    batches, tokens = make_batches(subject.tokenizer, texts, drawn)
    hosted = subject.describe().experts_per_device
    if max(hosted) < 2:
        raise ValueError("max_active needs devices with several experts, they have one each.")
    allowed = {named(most): base.replace(max_active=most) for most in experts_allowed(max(hosted))}
    tried = replace(subject, policies={BASELINE: None, **allowed})
    runs = run_all(tried, {way: batches}, store, progress, step_by_step)[way]
    read = {name: _experts_read(run) for name, run in runs.items()}
    rungs = [
        rung_of(
            DecodeRung, cost_of(runs[BASELINE], runs[name]), bound=float(name),
            policies=[str(policy)], speedup=read[BASELINE] / read[name], experts_read=read[name],
        )
        for name, policy in allowed.items()
    ]  # fmt: skip
    balanced = f"a device reads at most {read[BASELINE]:.2f} of its {max(hosted)} experts per step"
    chosen, reason = choose_rung(rungs, [rung.gain - 1 for rung in rungs], loss, balanced)
    together = None
    if chosen is not None and capped:
        both = tuple(policy.replace(max_active=int(chosen.bound)) for policy in capped)
        tried = replace(subject, policies={BASELINE: None, "together": both})
        runs = run_all(tried, {way: batches}, store, progress, step_by_step)[way]
        together = cost_of(runs[BASELINE], runs["together"])
    found = DecodeLadder(
        tokens=sum(tokens.values()) // 2, sequences=len(batches[0].ids), hosted=max(hosted),
        experts_read=read[BASELINE], rungs=rungs,
        chosen=None if chosen is None else int(chosen.bound), together=together, verdict=[],
    )  # fmt: skip
    found.verdict = _verdict(found, chosen, reason)
    return found


def step_by_step(pace: Any, model: Any, batch: Batch) -> tuple[list[float], list[list[int]]]:
    """Run the first half of a batch as prompts, the second token by token with the text's tokens.

    Loads are those of the steps alone.
    """
    ids = batch.ids.to(model.device)
    rows, length = ids.shape
    cache = cache_name(model.forward)
    losses, greedy = torch.zeros(rows, dtype=torch.float64), []
    with torch.no_grad():
        out = model(input_ids=ids[:, : length // 2], use_cache=True)
        pace.reset_stats()
        for at in range(length // 2, length - 1):
            known = {cache: out.past_key_values}
            out = model(input_ids=ids[:, at : at + 1], use_cache=True, **known)
            logits = out.logits[:, -1].float()
            each = torch.nn.functional.cross_entropy(logits, ids[:, at + 1], reduction="none")
            losses += each.double().cpu()
            greedy.append(logits.argmax(-1).cpu())
    return losses.tolist(), torch.stack(greedy, 1).tolist()


def _experts_read(run: PolicyRun) -> float:
    """Return the experts that the device with the most reads, mean over steps and layers."""
    layers: list[LayerLoads] = run.all_layers()
    steps = sum(layer.forwards for layer in layers)
    return sum(layer.most_active_experts_after * layer.forwards for layer in layers) / steps


def _verdict(ladder: DecodeLadder, chosen: DecodeRung | None, reason: str) -> list[str]:
    if chosen is None:
        return [f"Decode: {reason[0].lower()}{reason[1:]}"]
    error = "" if chosen.standard_error is None else f" ± {percent(chosen.standard_error, 2)}"
    lines = [
        f"Decode, {ladder.sequences} sequences together: with max_active={named(chosen.bound)} a "
        f"device reads at most {chosen.experts_read:.2f} experts per step instead of "
        f"{ladder.experts_read:.2f}, a bound of {times(chosen.gain)} on the speed-up of its "
        f"experts; perplexity {signed_percent(chosen.change)}{error}. {reason}"
    ]
    if ladder.together is not None:
        both = ladder.together
        error = "" if both.standard_error is None else f" ± {percent(both.standard_error, 2)}"
        lines.append(
            f"After prompts that are capped as above: {signed_percent(both.change)}{error}."
        )
    return lines
