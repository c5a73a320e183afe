"""Stages of `paceline tune` after the fit: choose factors for every rung, judge them, show them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.output import (
    command_line,
    emit,
    print_end,
    print_lines,
    print_table,
    print_verdict,
    progress,
)

if TYPE_CHECKING:
    from paceline.batches import Batch, Sampling
    from paceline.evaluation.ladder import Ladder, Machine, Rung
    from paceline.evaluation.subject import Subject
    from paceline.plan import Plan
    from paceline.policy import CapacityPolicy
    from paceline.stand_ins.calibration_file import Calibration
    from paceline.traces import Trace

PLAN = "plan.toml"
"""In the folder that is written: placements, policies by layer and the calibration's folder."""
LADDER, PAGE = "ladder.json", "ladder.html"
CHOOSE_TOKENS, JUDGE_TOKENS = 0.25, 0.5625
"""Tokens of these stages, as shares of those that are fitted to: 16384 and 36864 of 65536."""


def read_loss(text: str | None) -> float | None:
    """Read --loss, a percentage.

    Raises:
        ValueError: if it is none.

    >>> read_loss("0.5%")
    0.005
    """
    if text is None:
        return None
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not text.strip().endswith("%") or not 0 < share < 1:
        raise ValueError(f"--loss must be a percentage of perplexity such as 0.3%, got {text}.")
    return share


def machine_of(hardware: str, folder: Path) -> Machine:
    """Return the devices to time a model's layers on.

    Raises:
        ValueError: if the hardware or the model's config can't be read.
    """
    from paceline.analysis.cost import layer_shape
    from paceline.analysis.hardware import hardware_of
    from paceline.evaluation.ladder import Machine

    return Machine(hardware_of(hardware), layer_shape(folder / "config.json"))


def check_model(network: Any, traffic: Trace | None, devices: int | None, decode: bool) -> None:
    """Refuse, before any work, what a model's layers can't be tuned with.

    Raises:
        ValueError: if the trace is of another shape, or devices have one expert each.
    """
    from paceline.cli.sources import DEVICES
    from paceline.engines.transformers import attach

    with attach(network) as pace:
        experts = [len(layer.expert_loads_before) for layer in pace.stats().layers]
    if decode and max(experts) <= (devices or DEVICES):
        raise ValueError(
            f"--decode needs devices with several experts, got {devices or DEVICES} devices for "
            f"{max(experts)} experts."
        )
    if traffic is None:
        return
    found = [layer.experts for layer in traffic.header.layers]
    if found != experts:
        raise ValueError(
            f"--trace must be of {len(experts)} layers of {experts[0]} experts, got {len(found)} "
            f"of {found[0]}."
        )


def place_experts(
    network: Any, model: str, traffic: Trace | None, batches: Sequence[Batch] | None,
    devices: int, out: Path, as_json: bool,
) -> None:  # fmt: skip
    """Search a placement for a trace's traffic, or that of batches, and write its plan."""
    import tempfile

    from paceline.analysis.placing import PlacementSpec, layer_plan, place
    from paceline.batches import run_batch
    from paceline.cli.record import record_batches
    from paceline.traces import open_trace

    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder, progress() as tell:
        if traffic is None:
            recorded = Path(folder) / "trace"
            record_batches(network, model, batches or [], run_batch, recorded, "counts")
            traffic = open_trace(str(recorded))
        maps, result = place(traffic, PlacementSpec(devices), progress=tell)
        layer_plan(traffic, maps, []).save(out / PLAN)
    emit(result, as_json, lambda found: print_verdict(found.verdict), plan=str(out / PLAN))
    if not as_json:
        print_end([out / PLAN])


def climb(
    subject: Subject,
    parts: Mapping[str, Mapping[str, str]],
    sampling: Sampling,
    base: CapacityPolicy,
    *,
    bound: float | None,
    loss: float | None,
    machine: Machine | None,
    decode: bool,
    out: Path,
) -> tuple[Ladder, tuple[CapacityPolicy, ...]]:
    """Choose factors for every rung on one part of the texts, and judge the rungs on another.

    Args:
        subject: model, placement and calibration.
        parts: purpose -> text -> part.
        sampling: its tokens are those of the fit.
        base: policy of every layer, without its factor.
        bound: of the only rung; None: the whole ladder.
        loss: greatest change of perplexity.
        decode: judge max_active on decode steps too.
        out: folder from which a run that was killed goes on.

    Returns:
        The ladder, without what only the caller knows, and the policies of the rung that was
        chosen, one per layer; none if no rung pays.
    """
    import time

    from paceline.analysis.observe import constant_norms
    from paceline.evaluation.decode_ladder import judge_decode
    from paceline.evaluation.ladder import (
        BOUNDS,
        SCHEMA,
        UNTRAINED,
        Ladder,
        choose_rung,
        gains_of,
        judge_rungs,
        ladder_verdict,
        measure_rungs,
        named,
        store_in,
    )
    from paceline.evaluation.run import header
    from paceline.evaluation.subject import BASELINE
    from paceline.text import times

    started = time.perf_counter()
    drawn = replace(sampling, tokens=round(CHOOSE_TOKENS * sampling.tokens))
    with progress() as tell:
        found = measure_rungs(subject, parts["choose"], drawn, base, out, tell)
    bounds = BOUNDS if bound is None else (bound,)
    policies = {named(each): found.share(base.replace(capacity_factor=each)) for each in bounds}
    tried = replace(subject, policies={BASELINE: None, **policies})
    drawn = replace(sampling, tokens=round(JUDGE_TOKENS * sampling.tokens))
    with progress() as tell:
        baseline, in_order, rungs, judged = judge_rungs(
            tried, parts["judge"], drawn, machine, out, tell
        )
    busiest = f"the busiest device has {times(baseline.device_peak_to_mean)} the mean"
    chosen, reason = choose_rung(rungs, gains_of(baseline, rungs), loss, busiest)
    if bound is None and constant_norms(subject.model):
        chosen, reason = None, UNTRAINED
    if bound is not None and loss is None:
        chosen, reason = rungs[0], "It is the bound that was asked for."
    ladder = Ladder(
        **header(SCHEMA),
        seconds=round(time.perf_counter() - started, 1),
        command=command_line(),
        subject=replace(subject, policies={BASELINE: None}).describe(),
        split={},
        tokens={"choose": found.tokens, "judge": judged},
        batch_size=sampling.batch_size,
        sequence_length=sampling.sequence_length,
        hardware=None if machine is None else machine.hardware.name,
        loss=loss,
        baseline=baseline,
        in_order=in_order,
        rungs=rungs,
        chosen=None if chosen is None else chosen.bound,
        verdict=[],
    )
    ladder.verdict = ladder_verdict(ladder, chosen, reason)
    own = () if chosen is None else policies[named(chosen.bound)]
    if not decode or reason is UNTRAINED:
        return ladder, own
    with progress() as tell:
        ladder.decode = judge_decode(
            subject, parts["judge"], drawn, base, loss, own, store_in(out), tell
        )
    most = ladder.decode.chosen
    if most is not None:
        for rung in rungs:  # a server that moves between rungs keeps it
            rung.policies = [str(p.replace(max_active=most)) for p in policies[named(rung.bound)]]
        own = tuple(p.replace(max_active=most) for p in own or (base,))
    return ladder, own


def show_ladder(ladder: Ladder) -> None:
    """Print the verdict and a row per rung."""
    from paceline.text import times

    decode = ladder.decode
    print_verdict([*ladder.verdict, *(decode.verdict if decode else [])])
    timed = ladder.hardware is not None
    header = ["rung", "busiest device", *_COST]
    rows = [
        [
            *_row(rung, ladder.chosen, times(rung.device_peak_to_mean)),
            *([times(rung.speedup or 1)] if timed else []),
        ]
        for rung in ladder.rungs
    ]
    print_lines([""])
    print_table(
        f"Rungs, judged on {ladder.tokens['judge']:,} tokens; a star: in the plan",
        [*header, *(["speed-up"] if timed else [])],
        rows,
    )
    lines = [
        "A rung is the mean over layers of the capacity factor per device; at most: with 95% "
        "confidence."
    ]
    if timed:
        lines.append(
            f"Speed-up of the MoE layers on {ladder.hardware} x {ladder.subject.devices}: modelled "
            "from the loads, without the stand-ins' own work."
        )
    print_lines(lines)
    if decode is not None:
        print_lines([""])
        print_table(
            f"max_active, judged on {decode.tokens:,} decoded tokens; a star: in the plan",
            ["max_active", "experts read", *_COST],
            [_row(rung, decode.chosen, f"{rung.experts_read:.2f}") for rung in decode.rungs],
        )
        print_lines([
            f"Experts read per step by the device that reads most; without max_active "
            f"{decode.experts_read:.2f}. {decode.sequences} sequences decode together."
        ])  # fmt: skip


_COST = "dropped", "perplexity", "at most", "next tokens kept"


def _row(rung: Rung, chosen: float | None, figure: str) -> list[str]:
    from paceline.evaluation.ladder import named
    from paceline.text import percent, signed_percent

    error, change = rung.standard_error, signed_percent(rung.change)
    return [
        named(rung.bound) + ("*" if rung.bound == chosen else ""),
        figure,
        percent(rung.dropped_share),
        change if error is None else f"{change} ± {percent(error, 2)}",
        "" if rung.at_most is None else signed_percent(rung.at_most),
        percent(1 - rung.changed_next_tokens),
    ]


def next_commands(model: str, plan: Path, ladder: Ladder) -> list[list[str]]:
    """Return the commands to run with the plan."""
    if ladder.decode is not None and ladder.decode.chosen is not None:
        # max_active caps a whole batch, which a prefix cache that requests share excludes
        return [["serve", model, "--plan", str(plan), "--no-enable-prefix-caching"]]
    return [] if ladder.chosen is None else [["serve", model, "--plan", str(plan)]]


def relative(folder: Path, out: Path) -> str:
    """Return a calibration's folder as a plan in another folder names it."""
    return os.path.relpath(folder.absolute(), out.absolute())


# -- factors alone ---------------------------------------------------------------------------------


def base_policy(texts: list[str], bound: float | None, alone: bool) -> CapacityPolicy:
    """Return the policy of every layer, with the bound as its factor where there is one.

    Args:
        texts: of --policy.
        alone: True if factors are chosen and nothing else.

    Raises:
        ValueError: if there are several policies, or a factor is missing or given twice.
    """
    from paceline.evaluation.layer_factors import bound_of
    from paceline.policy import CapacityPolicy

    if len(texts) > 1:
        raise ValueError(f"--policy must be given once to choose factors, got {len(texts)}.")
    if alone and not texts and bound is None:
        raise ValueError("--only factors needs --bound, the mean factor over layers.")
    base = CapacityPolicy.parse(texts[0]) if texts else CapacityPolicy()
    if not texts and not alone:
        base = CapacityPolicy(keep="contribution", compensate=True)
    if not alone and base.capacity_factor is not None:
        raise ValueError(f"--policy {texts[0]} must have no factor: --bound is that of a rung.")
    if bound is not None:
        if base.capacity_factor not in (None, bound):
            raise ValueError(f"--policy {texts[0]} and --bound {bound} must have the same factor.")
        base = base.replace(capacity_factor=bound)
    bound_of(base if base.capacity_factor is not None or alone else base.replace(capacity_factor=1))
    return base


def choose_factors(
    network: Any, tokenizer: Any, texts: dict[str, str], sampling: Any, base: CapacityPolicy,
    places: Plan, fitted: Calibration | None, folder: Path | None, out: Path,
) -> tuple[dict[str, Any], Plan]:  # fmt: skip
    """Choose a factor per layer, and return what was measured and the plan for the folder."""
    from paceline.evaluation.layer_factors import measure_layers

    with progress() as tell:
        found = measure_layers(
            network,
            tokenizer,
            texts,
            base,
            plan=places,
            calibration=fitted,
            sampling=sampling,
            progress=tell,
        )
    plan = places.replace(
        policies=found.share(base),
        calibration=None if folder is None else relative(folder, out),
        layers=len(found.names),
    )
    return found.result(base).to_dict() | {"plan": str(out / PLAN)}, plan


def show_factors(result: Mapping[str, Any]) -> None:
    """Print the factor of every layer and what it costs."""
    print_table(
        "Layers capped alone: divergence from the model without a cap, in millinats per token",
        ("layer", "at the bound", "its factor", "at its factor"),
        [
            (
                layer["name"],
                f"{1e3 * layer['at_bound']:.2f}",
                f"{layer['factor']:.2f}",
                f"{1e3 * layer['at_factor']:.2f}",
            )
            for layer in result["layers"]
        ],
    )
    alike, own = (
        sum(layer[name] for layer in result["layers"]) for name in ("at_bound", "at_factor")
    )
    print_lines(
        [
            f"Together {1e3 * own:.2f} instead of {1e3 * alike:.2f}, on {result['tokens']:,} "
            "tokens, if the losses of layers add up."
        ]
    )
    print_end([result["plan"]])
