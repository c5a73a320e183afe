"""Assemble a benchmark: machine, workload, measurement, and its results."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from paceline.batches import check_length
from paceline.bench.comparison import parse_policies, placement_of, placements_of, policy_of
from paceline.bench.emulated import CLOCK
from paceline.bench.layer_timing import (
    LayerRow,
    compare_layers,
    emulate_layer,
    time_layer_on_ranks,
)
from paceline.bench.model_timing import (
    ModelRow,
    compare_models,
    serve_emulated,
    serve_on_ranks,
)
from paceline.bench.patterns import Pattern, pattern_workloads
from paceline.bench.timing import prepare_machine
from paceline.bench.workload import (
    Shape,
    Workload,
    build_experts,
    model_workload,
    skewed_workload,
    trace_workload,
)
from paceline.numbers import check_count
from paceline.placement import describe_placements
from paceline.plan import Plan
from paceline.routing import RoutingInputs
from paceline.system_info import system_info

Progress = Callable[[], None]
EMULATED, RANKS = "emulated devices", "ranks"


class Devices(BaseModel):
    """Devices of a benchmark, and the clock that times them."""

    kind: str
    count: int
    placement: str
    batch: str
    clock: str
    expert_to_device: list[int] | None = None
    sends: str | None = None


class Results(BaseModel):
    """Results of `paceline bench`; the first policy is none, which the others are compared with."""

    kind: str
    version: int
    machine: dict[str, Any]
    versions: dict[str, str]
    timing: dict[str, Any]
    devices: Devices
    workload: dict[str, Any]
    plan_policies: list[str]
    policies: list[LayerRow] | list[ModelRow]
    placement_file: str | None = None
    plan_file: str | None = None
    created: str | None = None
    command: str | None = None
    seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the results as JSON-able values."""
        schema = "-".join(self.kind.split()) + f"/{self.version}"
        return {"schema": schema, **self.model_dump(exclude_unset=True)}


def under_torchrun() -> bool:
    """Return True in a process that torchrun started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _start() -> tuple[int, int, dict[str, Any]]:
    """Join the ranks: rank, number of ranks, and the changes to the machine."""
    rank, local = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    machine = prepare_machine(local, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if under_torchrun():
        from paceline.engines.transformers.expert_parallel.collectives import join

        join()
    return rank, ranks, machine


def bench_layer(
    *,
    shape: Shape | None,
    policies: Sequence[str],
    tokens: int,
    rounds: int,
    plan: Plan | None = None,
    peak_to_mean: float = 2.0,
    shares_batch: bool = False,
    pattern: Pattern | None = None,
    trace: Path | None = None,
    layer: int = 0,
    model: Any = None,
    model_name: str = "",
    text_ids: torch.Tensor | None = None,
    progress: Progress = lambda: None,
) -> Results:
    """Time one MoE layer, on this process's emulated devices or, under torchrun, on its ranks.

    Args:
        shape: of random experts; None where `model` is given.
        policies: short forms, compared with no cap.
        tokens: of each device (with `shares_batch`, of all together).
        rounds: of measurement.
        plan: the layer's placement, else as many devices as the shape names, and one more policy.
        shares_batch: True if all devices hold the same tokens.
        pattern: of a synthetic routing with exact loads.
        model: to take a layer of, with its own weights and routing on `text_ids` [batch, length].
        progress: called after each policy of each round.

    Raises:
        ValueError: if these don't fit together.
    """
    if (model is None) == (shape is None) or (model is not None and text_ids is None):
        raise ValueError("one of shape, or model with text_ids, must not be None.")
    check_count("tokens", tokens)
    check_count("rounds", rounds)
    check_count("layer", layer, 0)
    plan = plan or Plan()
    rank, ranks, machine = _start()
    real = under_torchrun()
    chosen = parse_policies(policies, shares_batch, planned=policy_of(plan, layer))
    if model is not None and text_ids is not None:
        load, experts = model_workload(model, text_ids, layer, model_name)
        placement = placement_of(plan, layer, load.shape, ranks if real else None)
        count = placement.num_devices
        loads = [load] if shares_batch else _split(load, count)
        if real:
            from paceline.engines.transformers.expert_parallel.implementation import keep_experts

            keep_experts(experts, placement.experts_of(rank))
            loads = [loads[0 if shares_batch else rank]]
    elif shape is not None:
        placement = placement_of(plan, layer, shape, ranks if real else None)
        count = placement.num_devices
        sources = [0] if shares_batch else [rank] if real else range(count)
        if pattern is not None:
            every = pattern_workloads(
                pattern, shape, tokens, peak_to_mean, placement, 1 if shares_batch else count
            )
            loads = [every[source] for source in sources]
        else:
            loads = [
                trace_workload(trace, shape, layer, tokens, offset=source * tokens)
                if trace is not None
                else skewed_workload(shape, tokens, peak_to_mean, placement, seed=source)
                for source in sources
            ]
        experts = build_experts(shape, placement.sizes[rank] if real else shape.experts, seed=rank)
    load = loads[0]
    if real:
        measured = time_layer_on_ranks(
            load, experts, placement, chosen, rounds, shares_batch=shares_batch, progress=progress
        )
    else:
        measured = emulate_layer(loads, experts, placement, chosen, rounds, progress)
    sends = "over gloo or nccl" if real else "nothing, so network time is not in these figures"
    return Results(
        kind="paceline bench layer",
        version=1,
        **system_info(),
        timing=machine,
        devices=Devices(
            kind=RANKS if real else EMULATED,
            count=count,
            placement=describe_placements([placement]),
            expert_to_device=list(placement.expert_to_device),
            batch="shared" if shares_batch else "own",
            sends=sends,
            clock="wall" if real else CLOCK,
        ),
        workload={
            "label": load.label,
            "routing": load.origin,
            "tokens_a_device": load.hidden.shape[0],
            "dtype": str(load.hidden.dtype).removeprefix("torch."),
            "rounds": rounds,
            "shape": asdict(load.shape),
        },
        plan_policies=list(map(str, plan.policies)),
        policies=compare_layers(measured),
    )


def _split(load: Workload, parts: int) -> list[Workload]:
    """Divide a layer's tokens among devices in order, with their routing."""
    inputs = load.gate(load.hidden)
    router = load.gate
    bounds = [len(load.hidden) * i // parts for i in range(parts + 1)]
    split = []
    for start, end in pairwise(bounds):
        rows = slice(start, end)
        facts = ("topk_ids", "topk_weights", "scores", "valid", "token_request")
        cut: dict[str, Any] = {
            f: None if (x := getattr(inputs, f)) is None else x[rows] for f in facts
        }
        own = RoutingInputs(**cut, num_experts=inputs.num_experts, layer=inputs.layer)

        def gate(hidden: torch.Tensor, own: Any = own) -> Any:
            router(hidden)
            return own

        split.append(replace(load, hidden=load.hidden[rows].clone(), gate=gate))
    return split


def bench_model(
    *,
    model: Any,
    model_name: str,
    prompt_ids: Callable[[int], torch.Tensor],
    policies: Sequence[str],
    new_tokens: int,
    rounds: int,
    plan: Plan | None = None,
    progress: Progress = lambda: None,
) -> Results:
    """Time a whole model: prefill and decode under every policy.

    Args:
        model: loaded whole, alike on every rank.
        prompt_ids: rank -> its prompts, [batch, length] token ids.
        policies: short forms, compared with no cap.
        new_tokens: generated for each prompt.
        rounds: of measurement.
        plan: placements, one for all layers or one per layer, else 8 emulated devices or the ranks
            of torchrun; and one more policy, or one per layer.
        progress: called after each policy of each round.
    """
    from paceline.engines.transformers import attach

    check_count("new_tokens", new_tokens)
    check_count("rounds", rounds)
    plan = plan or Plan()
    rank, ranks, machine = _start()
    real = under_torchrun()
    planned = plan.policies or None
    chosen = parse_policies(policies, shares_batch=False, any_load=False, planned=planned)
    with attach(model) as pace:
        experts = [len(layer.expert_loads_before) for layer in pace.stats().layers]
    placements = placements_of(plan, experts, ranks if real else None)
    parameters = sum(p.numel() for p in model.parameters())  # before a rank forgets what isn't its
    prompt = prompt_ids(rank)
    check_length(model, prompt.shape[1] + new_tokens - 1)
    if real:
        from paceline.engines.transformers.expert_parallel.implementation import place_experts

        place_experts(model, placements)
        served = serve_on_ranks(model, prompt, chosen, new_tokens, rounds, progress)
        sequences = prompt.shape[0] * ranks
    else:
        served = serve_emulated(model, prompt, chosen, placements, new_tokens, rounds, progress)
        sequences = prompt.shape[0]
    rows = compare_models(served, sequences * prompt.shape[1], new_tokens, sequences)
    return Results(
        kind="paceline bench model",
        version=1,
        **system_info(),
        timing=machine,
        devices=Devices(
            kind=RANKS if real else EMULATED,
            count=max(placement.num_devices for placement in placements),
            placement=describe_placements(placements),
            batch="own",
            clock="wall" if real else CLOCK,
        ),
        workload={
            "label": model_name,
            "sequences": sequences,
            "prompt_tokens": prompt.shape[1],
            "new_tokens": new_tokens,
            "rounds": rounds,
            "parameters": parameters,
        },
        plan_policies=list(map(str, plan.policies)),
        policies=rows,
    )
