"""Assemble a benchmark: machine, workload, measurement, and the result as JSON-able values."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from paceline.batches import check_length
from paceline.bench import model as whole_model
from paceline.bench.emulated import CLOCK
from paceline.bench.layer import emulate_layer
from paceline.bench.layer import summary as layer_summary
from paceline.bench.machine import prepare_machine
from paceline.bench.planned import placement_of, placements_of, policy_of
from paceline.bench.trace import trace_workload
from paceline.bench.workload import (
    SHAPES,
    Shape,
    Workload,
    build_experts,
    model_workload,
    parse_policies,
    skewed_workload,
)
from paceline.numbers import check_count
from paceline.placement import describe_placements
from paceline.plan import Plan
from paceline.routing import RoutingInputs
from paceline.system_info import system_info

Progress = Callable[[], None]
EMULATED, RANKS = "emulated devices", "ranks"


def under_torchrun() -> bool:
    """Whether this process is one of torchrun's ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _start() -> tuple[int, int, dict[str, Any]]:
    """Rank, number of ranks, and what was done to the machine."""
    rank, local = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    machine = prepare_machine(local, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if under_torchrun():
        from paceline.engines.transformers.expert_parallel import join

        join()
    return rank, ranks, machine


def named_shape(name: str) -> Shape:
    """One of `SHAPES`, or five numbers: hidden,intermediate,experts,k,devices.

    Raises:
        ValueError: if it is neither.
    """
    if name in SHAPES:
        return SHAPES[name]
    parts = name.split(",")
    if len(parts) == 5 and all(part.strip().isdigit() and int(part) > 0 for part in parts):
        hidden, intermediate, experts, k, devices = map(int, parts)
        if k <= experts and devices <= experts:
            return Shape(name, hidden, intermediate, experts, k, devices)
    raise ValueError(
        f"shape {name!r} is not allowed: it is one of {', '.join(SHAPES)}, or "
        "hidden,intermediate,experts,k,devices with k and devices at most experts."
    )


def bench_layer(
    *,
    shape: Shape | None,
    policies: Sequence[str],
    tokens: int,
    rounds: int,
    plan: Plan | None = None,
    peak_to_mean: float = 2.0,
    shares_batch: bool = False,
    trace: Path | None = None,
    layer: int = 0,
    model: Any = None,
    model_name: str = "",
    text_ids: torch.Tensor | None = None,
    progress: Progress = lambda: None,
) -> dict[str, Any]:
    """Time one MoE layer, on this process's emulated devices or, under torchrun, on its ranks.

    Args:
        shape: of random experts; None where `model` is given.
        policies: short forms, compared with no cap.
        tokens: of each device (with `shares_batch`, of all together).
        rounds: of measurement.
        plan: the layer's placement, else as many devices as the shape names, and one more policy.
        peak_to_mean: of the synthetic routing.
        shares_batch: whether all devices hold the same tokens.
        trace: recorded routing instead of synthetic.
        layer: of the trace or model.
        model: whose layer is run with its own weights and routing on `text_ids` [batch, length].
        model_name: for the report.
        progress: called after each policy of each round.

    Raises:
        ValueError: if these don't fit together.
    """
    if (model is None) == (shape is None) or (model is not None and text_ids is None):
        raise ValueError("shape or model with text_ids is needed: give one of the two.")
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
        loads = [
            trace_workload(trace, shape, layer, tokens, offset=source * tokens)
            if trace is not None
            else skewed_workload(shape, tokens, peak_to_mean, placement, seed=source)
            for source in sources
        ]
        experts = build_experts(shape, placement.sizes[rank] if real else shape.experts, seed=rank)
    load = loads[0]
    if real:
        from paceline.bench.ranks import time_layer

        measured = time_layer(
            load, experts, placement, chosen, rounds, shares_batch=shares_batch, progress=progress
        )
    else:
        measured = emulate_layer(loads, experts, placement, chosen, rounds, progress)
    return {
        "kind": "paceline bench layer",
        "version": 1,
        **system_info(),
        "timing": machine,
        "devices": {
            "kind": RANKS if real else EMULATED,
            "count": count,
            "placement": describe_placements([placement]),
            "expert_to_device": list(placement.expert_to_device),
            "batch": "shared" if shares_batch else "own",
            "sends": "over gloo or nccl"
            if real
            else "nothing, so network time is not in these figures",
            "clock": "wall" if real else CLOCK,
        },
        "workload": {
            "label": load.label,
            "routing": load.origin,
            "tokens_a_device": load.hidden.shape[0],
            "dtype": str(load.hidden.dtype).removeprefix("torch."),
            "rounds": rounds,
            "shape": asdict(load.shape),
        },
        "plan_policies": list(map(str, plan.policies)),
        "policies": layer_summary(measured),
    }


def _split(load: Workload, parts: int) -> list[Workload]:
    """A layer's tokens dealt to devices in order, with their routing."""
    inputs = load.gate(load.hidden)
    router = load.gate
    bounds = [len(load.hidden) * i // parts for i in range(parts + 1)]
    split = []
    for start, end in pairwise(bounds):
        rows = slice(start, end)
        own = RoutingInputs(
            topk_ids=inputs.topk_ids[rows],
            topk_weights=inputs.topk_weights[rows],
            scores=None if inputs.scores is None else inputs.scores[rows],
            valid=None if inputs.valid is None else inputs.valid[rows],
            token_request=None if inputs.token_request is None else inputs.token_request[rows],
            num_experts=inputs.num_experts,
            layer=inputs.layer,
        )

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
) -> dict[str, Any]:
    """Time a whole model: prefill and decode under every policy.

    Args:
        model: loaded whole, alike on every rank.
        model_name: for the report.
        prompt_ids: rank -> its prompts, [batch, length] token ids.
        policies: short forms, compared with no cap.
        new_tokens: generated for each prompt.
        rounds: of measurement.
        plan: placements, one for all layers or one a layer, else 8 emulated devices or the ranks of
            torchrun; and one more policy, or one a layer.
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
        from paceline.engines.transformers.expert_parallel import place_experts

        place_experts(model, placements)
        served = whole_model.serve_on_ranks(model, prompt, chosen, new_tokens, rounds, progress)
        sequences = prompt.shape[0] * ranks
    else:
        served = whole_model.serve_emulated(
            model, prompt, chosen, placements, new_tokens, rounds, progress
        )
        sequences = prompt.shape[0]
    return {
        "kind": "paceline bench model",
        "version": 1,
        **system_info(),
        "timing": machine,
        "devices": {
            "kind": RANKS if real else EMULATED,
            "count": max(placement.num_devices for placement in placements),
            "placement": describe_placements(placements),
            "batch": "own",
            "clock": "wall" if real else CLOCK,
        },
        "workload": {
            "label": model_name,
            "sequences": sequences,
            "prompt_tokens": prompt.shape[1],
            "new_tokens": new_tokens,
            "rounds": rounds,
            "parameters": parameters,
        },
        "plan_policies": list(map(str, plan.policies)),
        "policies": whole_model.summary(served, sequences * prompt.shape[1], new_tokens, sequences),
    }
